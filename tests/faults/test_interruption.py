"""Ctrl-C and SIGTERM on a real process: the step ends, and the run is sealed as interrupted. (How it goes on: test_exact_resume.py.)"""

import os
import signal
import subprocess
import sys

import pytest

from depthbench.store.reader import Store
from depthbench.training import checkpoints
from depthbench.training.interruption import Interrupted, Interruption
from tests.conftest import REPOSITORY

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def command(corpus, runs, steps):
    common = ["fit", "--size", "pico", "--corpus", str(corpus), "--trainer.accelerator", "cpu"]
    return [*common, "--runs", str(runs), "--tokens", str(steps * 2048)]


def start(corpus, runs, steps, *more):
    process = [sys.executable, "-m", "depthbench", *command(corpus, runs, steps), *more]
    return subprocess.Popen(process, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)


def wait_for(process, text):
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended without saying {text!r}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step(tiny_corpus, tmp_path, number, code):
    process = start(tiny_corpus, tmp_path, steps=30)
    wait_for(process, "step 3/30")
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == code
    assert "Interrupted at step" in rest and "Repeat the same command" in rest and "Traceback" not in rest
    (row,) = Store(tmp_path).runs().to_dict("records")
    stopped = int(row["step"])
    assert row["status"] == "interrupted" and 3 <= stopped < 30
    assert not list((tmp_path / row["run_id"]).glob("segments/*"))
    assert checkpoints.newest(tmp_path / row["run_id"])[0] == stopped


def test_a_second_ctrl_c_does_not_wait(tmp_path, capfd):
    interruption = Interruption(tmp_path)
    interruption._receive(signal.SIGINT, None)
    assert "Ctrl-C again: at once" in capfd.readouterr().err
    with pytest.raises(Interrupted):
        interruption._receive(signal.SIGINT, None)


def test_a_disk_that_refuses_a_checkpoint_is_one_line(tiny_corpus, tmp_path):
    arguments = command(tiny_corpus, tmp_path, steps=30)
    code = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000)); "
        "runpy.run_module('depthbench', run_name='__main__')"
    )
    limited = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=200)
    assert limited.returncode == 2
    errors = [line for line in limited.stderr.splitlines() if line.startswith("depthbench:")]
    assert len(errors) == 1 and "the file size limit is reached" in errors[0] and "Traceback" not in limited.stderr


def test_a_run_that_is_being_written_is_refused_to_a_second_process(tiny_corpus, tmp_path, depthbench):
    process = start(tiny_corpus, tmp_path, steps=2000)
    try:
        wait_for(process, "step 1/2000")
        second = depthbench(*process.args[3:])
        assert second.returncode == 2 and f"process {process.pid}" in second.stderr and second.stderr.count("\n") == 1
    finally:
        process.kill()
        process.communicate()


def test_a_signal_before_training_ends_at_once(tiny_corpus, tmp_path, says, monkeypatch):
    from depthbench.training import fit

    def stopped(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was not obeyed")

    monkeypatch.setattr(fit, "build", stopped)
    code, out, err = says(*command(tiny_corpus, tmp_path, steps=30))
    assert code == 143 and "Interrupted while no step was under way" in out and not err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_lock_of_a_killed_process_is_no_lock(tiny_corpus, tmp_path, says):
    arguments = [*command(tiny_corpus, tmp_path, steps=30), "--trainer.max_steps", "1", "--probes", "none"]
    assert says(*arguments)[0] == 0
    (lock,) = tmp_path.glob("*/.lock")
    lock.write_text("process 4194304 on another-host")
    code, out, _ = says(*arguments)
    assert code == 0 and "already finished" in out


def test_a_signal_that_duckdb_turns_into_an_error_of_its_own(tiny_corpus, tmp_path, says, monkeypatch):
    from depthbench.training import fit

    def stopped(*args, **kwargs):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Interrupted:
            raise RuntimeError("Query interrupted") from None

    monkeypatch.setattr(fit, "build_trainer", stopped)
    code, out, err = says(*command(tiny_corpus, tmp_path, steps=30))
    assert code == 143 and "Interrupted while no step was under way" in out and not err


def test_a_signal_between_the_run_row_and_the_first_step_leaves_an_interrupted_run(tiny_corpus, tmp_path, says, monkeypatch):
    from depthbench.training import fit

    monkeypatch.setattr(fit, "build_trainer", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert says(*command(tiny_corpus, tmp_path, steps=30))[0] == 130
    assert Store(tmp_path).runs().status.tolist() == ["interrupted"]


def test_a_loss_whose_perplexity_is_no_number_is_summed_up(tiny_corpus, tmp_path, says):
    short = ["--trainer.max_steps", "3", "--validations", "1", "--probes", "none"]
    arguments = [*command(tiny_corpus, tmp_path, steps=30), "--lr", "30", *short]
    codes = [says(*arguments)[0] for _ in range(2)]
    assert codes == [0, 0]
    assert Store(tmp_path).runs().val_loss.item() > 709, "the loss became too small for this test"
