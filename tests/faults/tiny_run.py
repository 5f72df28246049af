"""One tiny training run, and everything that it leaves: what the tests interrupt in many ways, and compare with an uninterrupted one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch

from depthbench.store.reader import Store
from depthbench.training import checkpoints
from tests.faults.witness import Crash, witnessed

STEPS, EVERY, SEQUENCES = 12, 3, 16  # optimizer steps, steps from one validation and checkpoint to the next, sequences per step

EXIT_CODE = {"SIGTERM": 143, "SIGINT": 130, "fill": 2, "nan_weight": 3, "nan_gradient": 3, "nan_weight+SIGTERM": 3}

KEYS = ["name", "metric", "site", "direction", "layer", "step"]


def command(corpus: Path, runs: Path, *, accumulation: int = 1, workers: int = 0, callback: str = "witness.Witness") -> list[str]:
    """The run as arguments of depthbench, with one of this folder's callbacks."""
    words = [
        *("fit", "--size", "pico", "--corpus", corpus, "--runs", runs, "--trainer.accelerator", "cpu", "--probes", "none"),
        *("--tokens", STEPS * SEQUENCES * 128, "--validations", STEPS // EVERY, "--layer-stats-every", 2),
        *("--micro-batch", SEQUENCES // accumulation, "--workers", workers, f"--trainer.callbacks+=tests.faults.{callback}"),
    ]  # fmt: skip
    return [str(word) for word in words]


def rows(runs: Path) -> dict[str, pd.DataFrame]:
    """Table -> what the only run in ``runs`` recorded, in a fixed order and without what depends on the clock or the attempt."""
    store = Store(runs)
    (run_id,) = store.runs().run_id
    tables = {name: store.rows(name, [run_id]) for name in ("scalars", "layer_stats")}
    tables["scalars"] = tables["scalars"][~tables["scalars"].name.str.startswith("perf/")]
    return {
        name: table.drop(columns=["attempt", "wall_s"], errors="ignore").sort_values([*table.columns.intersection(KEYS)], ignore_index=True)
        for name, table in tables.items()
    }


@dataclass
class Result:
    """Everything a finished run leaves that does not depend on the clock."""

    tables: dict[str, pd.DataFrame]
    seen: dict  # sample ids and random numbers of each micro-batch
    state: dict  # weights, optimizer and learning rates

    @classmethod
    def of(cls, runs: Path, witness_file: Path) -> Result:
        (folder,) = folders(runs)
        stored = torch.load(checkpoints.path(folder, STEPS), weights_only=True)
        state = {name: stored[name] for name in ("state_dict", "optimizer_states", "lr_schedulers")}
        return cls(rows(runs), witnessed(witness_file), state)


def folders(runs: Path) -> list[Path]:
    return [path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(".")]


def equal(a, b) -> bool:
    """Equality to the bit of nested tensors and plain values."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def assert_same(got: Result, expected: Result) -> None:
    for name, table in expected.tables.items():
        pd.testing.assert_frame_equal(got.tables[name], table, check_exact=True)
    assert got.seen == expected.seen
    for part, value in expected.state.items():
        assert equal(got.state[part], value), f"{part} of the last checkpoint differs"


class Trial:
    """The run in a folder of its own, attempt by attempt, in this process: ``says`` and ``monkeypatch`` are the fixtures."""

    def __init__(self, corpus, folder, says, monkeypatch, **how):
        self.says, self.monkeypatch = says, monkeypatch
        self.runs, self.file = folder / "runs", folder / "seen.jsonl"
        self.command = command(corpus, self.runs, **how)
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("WITNESS_FILE", str(self.file))

    @property
    def folder(self) -> Path:
        (folder,) = folders(self.runs)
        return folder

    def attempt(self, stop: str = "") -> str:
        """Run the command until ``stop`` (see Witness), or to its end. Returns what it said, warnings included."""
        self.monkeypatch.setenv("WITNESS_STOP", stop)
        if stop.endswith("crash"):
            with pytest.raises(Crash):
                self.says(*self.command)
            return ""
        code, out, err = self.says(*self.command)
        assert code == EXIT_CODE.get(stop.rpartition(":")[2], 0), out + err
        return out + err

    def result(self) -> Result:
        return Result.of(self.runs, self.file)
