"""Ctrl-C and SIGTERM on a real process: the step ends, the run is sealed as interrupted, and the same command goes on."""

import os
import signal
import subprocess
import sys
import time

import pytest

from depthbench.store.reader import Store
from tests.conftest import REPOSITORY


def start(corpus, runs, steps):
    arguments = [
        "fit", "--size", "pico", "--corpus", str(corpus), "--runs", str(runs), "--tokens", str(steps * 2048), "--trainer.accelerator", "cpu"
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "depthbench", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended without saying {text!r}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step_and_the_same_command_goes_on(tiny_corpus, tmp_path, number, code):
    process = start(tiny_corpus, tmp_path, steps=30)
    wait_for(process, "step 3/30")
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == code
    assert "Interrupted at step" in rest and "repeat the same command" in rest and "Traceback" not in rest
    (row,) = Store(tmp_path).runs().to_dict("records")
    stopped = int(row["step"])
    assert row["status"] == "interrupted" and 3 <= stopped < 30
    assert not list((tmp_path / row["run_id"]).glob("segments/*"))

    process = start(tiny_corpus, tmp_path, steps=30)
    said = process.stdout.read()
    assert process.wait(timeout=120) == 0, said
    assert f"going on from the checkpoint at step {stopped}" in said
    (row,) = Store(tmp_path).runs().to_dict("records")
    losses = Store(tmp_path).scalars([row["run_id"]], ["train/loss"]).sort_values("step")
    assert row["status"] == "finished" and losses.step.tolist() == list(range(1, 31))


def test_a_second_ctrl_c_need_not_wait(tiny_corpus, tmp_path):
    process = start(tiny_corpus, tmp_path, steps=2000)
    wait_for(process, "step 1/2000")
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 130 and "Traceback" not in rest
    assert Store(tmp_path).runs().status.tolist() == ["interrupted"]


def test_a_run_that_is_being_written_is_refused_to_a_second_process(tiny_corpus, tmp_path, depthbench):
    process = start(tiny_corpus, tmp_path, steps=2000)
    try:
        wait_for(process, "step 1/2000")
        second = depthbench(*process.args[3:])
        assert second.returncode == 2 and f"process {process.pid}" in second.stderr and second.stderr.count("\n") == 1
    finally:
        process.kill()
        process.communicate()


def test_a_killed_run_goes_on_where_its_last_checkpoint_was(tiny_corpus, tmp_path, depthbench):
    process = start(tiny_corpus, tmp_path, steps=30)  # five validations: checkpoints at 6, 12, ...
    wait_for(process, "step 13/30")
    process.kill()
    process.communicate()
    again = depthbench(*process.args[3:])
    assert again.returncode == 0, again.stderr
    assert "going on from the checkpoint at step 12" in again.stdout
    (row,) = Store(tmp_path).runs().to_dict("records")
    losses = Store(tmp_path).scalars([row["run_id"]], ["train/loss"]).sort_values("step")
    assert row["status"] == "finished" and row["n_attempts"] == 2 and losses.step.tolist() == list(range(1, 31))
