"""`depthbench runs`: what it lists, shows and compares, what it removes and what it never does, and what sealing repairs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from depthbench.store.folder import HEARTBEAT, list_run
from depthbench.store.reader import Store
from depthbench.store.removal import PREFIX
from depthbench.store.writer import RunWriter
from tests.app.conftest import write

HOLD = """
import sys
from pathlib import Path
from depthbench.store.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print(flush=True)
    input()
"""


def half_written(root: Path, *, beat: bool, **run) -> Path:
    """A run whose writer was killed: unsealed; ``beat``: a moment ago, not long ago."""
    writer = write(root, status=None, steps=20, **run)
    writer.close()
    if not beat:
        os.utime(writer.folder / HEARTBEAT, (1, 1))
    return writer.folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    root = tmp_path_factory.mktemp("recorded")
    config = {"recipe": {"clip": 1.0, "betas": [0.9, 0.95]}, "command": {"lr": 1e-3, "trainer": {"max_steps": 40}}}
    write(root, arch="hc", options='{"streams": 2}', lr=1e-3, config=json.dumps(config))
    write(root, arch="keel", status="failed", steps=10, size="pico")
    half_written(root, arch="moda", beat=False)
    half_written(root, arch="lns", beat=True)
    return root


@pytest.fixture
def runs(recorded, tmp_path):
    """A finished run, one that failed, one that is stale and one that is running, each of a design of its own."""
    shutil.copytree(recorded, tmp_path / "runs")
    (next((tmp_path / "runs").glob("lns-*")) / HEARTBEAT).touch()
    return tmp_path / "runs"


@pytest.fixture
def call(says, runs):
    return lambda *arguments: says("runs", *arguments, "--runs", runs)


@pytest.fixture
def locked(runs):
    """Another process that holds the failed run's lock; the run's folder."""
    (folder,) = runs.glob("keel-*")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        yield folder
        holder.communicate("\n")


def names(runs: Path) -> set[str]:
    return {path.name.split("-")[0] for path in runs.iterdir()}


# Looking -------------------------------------------------------------------------------------------------------------------------


def test_list_has_a_line_for_each_run_with_its_design_and_progress(call):
    code, out, err = call("list")
    assert (code, err) == (0, "")
    lines = {line.split("-")[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert lines["hc"] == "hc streams=2 4 x 128 finished 40/40 100 % 3.0337 3.0000 3.0000"
    assert lines["moda"].startswith("moda 4 x 128 stale 20/40 50 % ")
    assert out.splitlines()[-1] == "4 runs: 1 finished, 1 failed, 1 running, 1 stale"


def test_list_filters_and_gives_json(call):
    code, out, _ = call("list", "--status", "failed,stale", "--size", "pico", "--json")
    (row,) = json.loads(out)
    assert code == 0 and (row["arch"], row["status"], row["step"], row["options"], row["lr"]) == ("keel", "failed", 10, None, 4e-3)
    (row,) = json.loads(call("list", "--arch", "hc", "--json")[1])
    assert row["options"] == {"streams": 2} and row["design"] == "hc streams=2" and "config" not in row
    assert call("list", "--status", "diverged")[:2] == (0, "none of 4 runs passes the filters\n")
    assert call("list", "--arch", "hc", "--status", "failed")[0] == 0


def test_a_damaged_run_is_listed_with_its_problem_and_can_be_removed(call, runs):
    (sealed,) = runs.glob("hc-*/metrics.duckdb")
    sealed.write_bytes(b"\0" * 5000)
    (row,) = json.loads(call("list", "--status", "unreadable", "--json")[1])
    assert row["run_id"] == sealed.parent.name and row["created_at"] is None and "cannot be read" in row["problem"]
    out = call("list")[1]
    assert row["problem"] in out and "unreadable" in out
    assert call("show", "hc")[0] == 2
    assert call("rm", "hc", "--yes")[0] == 0 and "hc" not in names(runs)


def test_no_runs_is_said(says, tmp_path):
    assert says("runs", "list", "--runs", tmp_path / "none") == (0, f"{tmp_path / 'none'} holds no runs yet\n", "")


def test_show_says_what_is_known_and_stored(call, runs):
    (folder,) = runs.glob("hc-*")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-00000040.ckpt").write_bytes(bytes(2000))
    rows = [{"step": 40, "tokens": 40960, "probe": "causal", "metric": "effect", "i": 0, "j": 1, "value": 1.0, "rule": "restart",
             "status": "ok", "windows": 8, "length": 64},
            {"step": 40, "tokens": 40960, "probe": "angular", "status": "not_defined", "note": "no stream"}]  # fmt: skip
    with RunWriter(folder) as later:
        later.add("probes", rows)
    code, out, err = call("show", "hc")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in ("design hc streams=2", "status finished, 40 of 40 steps", "layers' norm, 4 steps x 4 layers block_out forward",
                 "probe causal, step 40 8 windows of 64 tokens; skip rule restart", "probe angular, step 40 not defined: no stream",
                 "step-00000040.ckpt 2.0 kB", "recipe.betas [0.9, 0.95]", "command.trainer.max_steps 40",
                 "scalars train/grad_norm 8, train/loss 40, val/loss 4"):  # fmt: skip
        assert line in lines, line
    assert [line for line in lines if line.startswith("1 the start 20")]


def test_diff_says_only_what_differs_and_nothing_twice(call, runs):
    write(runs, arch="hc", lr=2e-3, config=json.dumps({"recipe": {"clip": 1.0, "betas": [0.9, 0.99]}, "command": {"lr": 2e-3}}))
    code, out, _ = call("diff", "hc-nano-L4-d128-lr0.001", "hc-nano-L4-d128-lr0.002")
    differing = {line.split()[0]: line.split(maxsplit=1)[1].split("  ") for line in out.splitlines()[4:]}
    assert code == 0 and set(differing) == {"options", "lr", "recipe.betas", "command.trainer.max_steps"}
    assert [text.strip() for text in differing["lr"] if text.strip()] == ["0.001", "0.002"]
    assert "they differ in no fact" in call("diff", "keel", "keel")[1]


# Removing ------------------------------------------------------------------------------------------------------------------------


def test_rm_shows_what_would_go_and_without_a_yes_removes_nothing(call, runs, monkeypatch):
    before = names(runs)
    code, out, err = call("rm", "--status", "failed,stale")
    assert code == 2 and err.count("\n") == 1 and "--yes" in err
    assert "keel-" in out and "moda-" in out and "kB" in out and names(runs) == before
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert call("rm", "--status", "failed")[1].endswith("nothing is removed\n") and names(runs) == before
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert call("rm", "--status", "failed")[0] == 0 and names(runs) == before - {"keel"}


def test_rm_takes_names_and_filters_together(call, runs):
    assert call("rm", "hc", "keel", "--status", "failed", "--yes")[0] == 0
    assert names(runs) == {"hc", "moda", "lns"}
    assert call("rm", runs / next(runs.glob("moda-*")).name, "--yes")[0] == 0
    assert names(runs) == {"hc", "lns"} and set(Store(runs).runs()["arch"]) == {"hc", "lns"}
    assert call("rm", "--status", "failed", "--yes")[1] == "no run passes the filters; nothing is removed\n"


def test_a_running_run_stays(call, runs):
    code, out, err = call("rm", "--status", "running", "--yes")
    assert code == 2 and "stays: lns-" in out and "it is running" in out and err.count("\n") == 1 and "lns" in names(runs)


def test_a_locked_run_stays_and_the_others_go(call, runs, locked):
    code, out, _ = call("rm", "--status", "failed,stale", "--yes")
    assert code == 0 and f"stays: {locked.name}: run {locked.name} is being written by process" in out
    assert locked.exists() and names(runs) == {"hc", "keel", "lns"}


def test_a_kill_leaves_a_run_whole_or_hidden_and_the_next_removal_clears_it(call, runs, monkeypatch):
    def killed(path, **_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", killed)
        assert call("rm", "keel", "--yes")[0] == 130
    assert list(runs.glob(f"{PREFIX}keel-*")) and "keel" not in set(Store(runs).runs()["arch"])
    assert call("rm", "moda", "--yes")[0] == 0 and names(runs) == {"hc", "lns"}


def test_a_linked_folder_stays(call, runs, tmp_path_factory):
    elsewhere = write(tmp_path_factory.mktemp("elsewhere"), arch="deepnorm").folder
    (runs / elsewhere.name).symlink_to(elsewhere)
    assert "it is a link" in call("rm", "deepnorm", "--yes")[1] and elsewhere.exists()


# Sealing -------------------------------------------------------------------------------------------------------------------------


def test_seal_repairs_half_written_runs_and_says_so(call, runs):
    rows = Store(runs).scalars([next(runs.glob("moda-*")).name], ["train/loss"])
    code, out, _ = call("seal", "moda")
    (folder,) = runs.glob("moda-*")
    assert code == 0 and out.startswith(f"{folder.name}: sealed, 4 segments into metrics.duckdb")
    assert not list_run(folder).segments and Store(runs).scalars([folder.name], ["train/loss"]).equals(rows)
    assert call("seal", "moda")[1] == f"{folder.name}: was sealed already\n"
    assert "lns-" in call("seal", "--all")[1]
    assert call("seal", "--all")[1] == f"every run in {runs} is sealed\n"


def test_seal_leaves_a_run_that_is_being_written_and_a_damaged_one(call, runs, locked):
    code, _, err = call("seal", "keel")
    assert code == 2 and err == "depthbench: 1 run not sealed: see above why\n"
    for path in runs.glob("moda-*/segments/scalars-*.parquet"):
        path.write_bytes(b"PAR1" + b"\0" * 100)
    code, out, _ = call("seal", "--all")
    assert code == 2 and "lns-" in out and ": sealed, 4 segments" in out and "Traceback" not in out
    assert ": sealed, 3 segments" in out and "is damaged" in out and list(runs.glob("moda-*/segments/scalars-*.parquet"))
    assert "is damaged" in call("show", "moda")[1]


@pytest.mark.parametrize(
    "command",
    [("list", "--status", "fialed"), ("list", "--arch", "kele"), ("list", "--arch", "hc", "--arch.streams", "2"), ("show", "nothing"),
     ("show", "hc", "--arch.streams", "2"), ("diff", "hc"), ("rm",), ("rm", "nothing", "--yes"), ("seal",), ("seal", "hc", "--all"), ()],
)  # fmt: skip
def test_mistakes_are_one_line(call, command):
    code, _, err = call(*command)
    assert code == 2 and err.count("\n") == 1 and err.startswith("depthbench: ")
