"""A read that hangs in a real process: the run ends in one line that names the chunk, and goes on from its last checkpoint."""

import os
import time
from pathlib import Path

import lightning as L

from depthbench.corpora import BlockDataset
from depthbench.store.reader import Store
from depthbench.training import checkpoints


class Hang(L.Callback):
    """From the batch of step ``$HANG_AT`` on, no block is read any more."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if str(trainer.global_step + 2) == os.environ.get("HANG_AT"):
            BlockDataset.__getitem__ = lambda blocks, index: time.sleep(3600)


def command(corpus: Path, runs: Path, *more: str) -> list[str]:
    small = ["--size", "pico", "--corpus", str(corpus), "--tokens", str(6 * 2048), "--validations", "2", "--probes", "none"]
    at = ["--runs", str(runs), "--trainer.accelerator", "cpu", "--trainer.callbacks+=tests.faults.test_loader.Hang"]
    return ["fit", *small, *at, *more]


def test_a_run_whose_read_hangs_ends_in_one_line_and_goes_on_with_another_limit(tiny_corpus, tmp_path, depthbench, says):
    hung = depthbench(*command(tiny_corpus, tmp_path, "--loader-timeout", "3"), HANG_AT="5")
    assert hung.returncode == 2, hung.stderr
    (line,) = [line for line in hung.stderr.splitlines() if not line.startswith("step ")]
    assert line.startswith("depthbench: no batch in 3 s") and f" of {tiny_corpus}/train/chunk-0-0.bin did not arrive" in line
    (row,) = Store(tmp_path).runs().to_dict("records")
    assert row["status"] == "failed" and checkpoints.newest(tmp_path / row["run_id"])[0] == 3

    code, out, err = says("resume", row["run_id"], "--runs", tmp_path, "--loader-timeout", "0")
    assert code == 0, err
    assert "going on from the checkpoint at step 3" in out
    assert Store(tmp_path).runs()[["run_id", "status"]].values.tolist() == [[row["run_id"], "finished"]]


def test_a_negative_limit_is_refused(says):
    code, _, err = says("fit", "--loader-timeout", "-1")
    assert (code, err.count("\n")) == (2, 1) and "--loader-timeout cannot be negative, as -1 is" in err
