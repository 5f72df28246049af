"""`depthbench probe` as a user calls it, on a small trained run: what it stores, says, skips, refuses, and how it is interrupted."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from depthbench import load_run, probes
from depthbench.probes import runner
from depthbench.store.reader import Store
from tests.conftest import REPOSITORY

FEW = ("--windows", "3", "--length", "12", "--device", "cpu")


def fit(corpus, runs, *more):
    """Trains four steps; returns the run's id."""
    from depthbench.cli import main

    few = ["--ratio", "18", "--tokens", str(4 * 2048), "--validations", "2", "--layer-stats-every", "0", "--probes", "none"]
    command = ["fit", "--size", "pico", "--corpus", str(corpus), "--runs", str(runs), "--trainer.accelerator", "cpu", *few, *more]
    assert main(command) == 0
    (run_id,) = Store(runs).runs()["run_id"]
    return run_id


@pytest.fixture(scope="module")
def trained(tiny_corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("trained")
    return runs, fit(tiny_corpus, runs, "--arch", "full_attnres")


@pytest.fixture
def run(trained, tmp_path):
    """(runs folder, run id) of a copy of the trained run, without a probe."""
    runs, run_id = trained
    shutil.copytree(runs / run_id, tmp_path / run_id)
    return tmp_path, run_id


@pytest.fixture
def probe(run, says):
    """Calls ``depthbench probe`` on the run."""
    return lambda *arguments: says("probe", run[1][:-1], "--runs", run[0], *FEW, *arguments)


def stored(run):
    return Store(run[0]).probes([run[1]])


def test_all_probes_are_measured_and_summed_up(run, probe):
    code, out, err = probe()
    assert code == 0
    found = stored(run)
    assert set(found["probe"]) == set(runner.NAMES)
    assert set(found.loc[found["probe"].isin(runner.BY_RULE), "rule"]) == {"reference", "renormalise"}
    assert found[["step", "tokens", "windows", "length"]].drop_duplicates().to_numpy().tolist() == [[4, 4 * 2048, 3, 12]]
    lines = out.splitlines()
    assert "step 4: 3 x 12 held-out tokens" in lines[0]
    titles = [*runner.NAMES[:6], "causal (reference)", "causal (renormalise)", "pruning (reference)", "pruning (renormalise)"]
    assert [line.split("  ")[0] for line in lines[2:]] == [*titles, *runner.NAMES[8:]]
    (reason,) = found.loc[(found["probe"] == "usefulness"), "note"].unique()
    assert f"{'usefulness':<21}  not defined: {reason}" in lines
    assert err.count("\n") == 11 and "causal and pruning (renormalise): " in err  # a line for each pass, none overwritten


def test_what_is_there_is_not_measured_again(run, probe):
    assert probe("--probes", "norms,causal", "--skip-rule", "renormalise")[0] == 0
    first = stored(run)
    code, out, err = probe("--probes", "causal,norms,angular")
    assert code == 0 and "already there: norms, causal (renormalise) (--fresh measures again)" in out
    assert [line.partition(":")[0] for line in err.splitlines()] == ["angular", "causal (reference)"]
    again = stored(run)
    assert again["measured_at"].isin(first["measured_at"]).sum() == len(first)
    assert probe("--probes", "norms", "--fresh")[0] == 0
    fresh = stored(run)
    assert len(fresh) == len(again) and fresh.loc[fresh["probe"] == "norms", "measured_at"].min() > again["measured_at"].max()


def test_another_step_is_another_measurement(run, probe):
    assert probe("--probes", "norms")[0] == probe("--probes", "norms", "--step", "2")[0] == 0
    found = stored(run).set_index(["step", "tokens", "metric", "i"])["value"]
    assert found.loc[2, 4096].to_dict() != found.loc[4, 8192].to_dict()


def test_the_function_in_a_notebook_gives_what_is_stored(run, probe):
    assert probe("--probes", "angular")[0] == 0
    opened = load_run(run[1], runs=run[0])
    frame = probes.angular(opened.model, probes.windows(opened.held_out, 3, length=12))
    assert frame["value"].tolist() == stored(run)["value"].tolist()


def test_micro_batches_change_nothing(run, probe):
    assert probe("--probes", "pruning", "--micro-batch", "1")[0] == 0
    one = stored(run)
    assert probe("--probes", "pruning", "--micro-batch", "8", "--fresh")[0] == 0
    assert stored(run)["value"].tolist() == pytest.approx(one["value"].tolist(), abs=1e-6)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_done_and_the_same_command_goes_on(run, probe, monkeypatch, number, code):
    with monkeypatch.context() as interrupted:
        interrupted.setattr(probes, "collapse", lambda model, tokens, **how: os.kill(os.getpid(), number))
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        stopped, out, err = probe("--probes", "norms,angular,collapse,paths")
        assert stopped == code and "the same command goes on" in out and "Traceback" not in err
        assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert set(stored(run)["probe"]) == {"norms", "angular"}
    assert Store(run[0]).runs()["status"].tolist() == ["finished"] and not list((run[0] / run[1]).glob("segments/*"))
    code, out, err = probe("--probes", "norms,angular,collapse,paths")
    assert code == 0 and "already there: norms, angular" in out and "norms" not in err
    assert set(stored(run)["probe"]) == {"norms", "angular", "collapse", "paths"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--probes", "angulr"), "did you mean 'angular'"),
        (("--probes", ""), "no probe is named"),
        (("--windows", "0"), "0 windows"),
        (("--windows", "many"), "--windows"),
        (("--length", "129"), "from 1 to 128"),
        (("--step", "3"), "no checkpoint at step 3: it has 2, 4"),
        (("--skip-rule", "identity"), "known: reference, renormalise"),
        (("--device", "gpu"), "unknown device"),
        (("--micro-batch", "0"), "--micro-batch"),
        (("--arch.streams", "2"), "takes no design"),
    ],
)
def test_mistakes_are_one_line(run, probe, arguments, said):
    code, out, err = probe(*arguments)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert stored(run).empty


def test_a_gpu_that_is_not_there_is_one_line(probe):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, _, err = probe("--device", "cuda")
    assert code == 2 and err.count("\n") == 1 and "PyTorch sees no GPU" in err


def test_a_gpu_that_is_too_small_is_one_line(run, probe, monkeypatch):
    def large(model, tokens, **how):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(probes, "angular", large)
    code, _, err = probe("--probes", "norms,angular", "--micro-batch", "2")
    assert code == 2 and "the GPU does not hold 2 windows at a time" in err
    assert set(stored(run)["probe"]) == {"norms"}


def test_a_run_that_is_being_written_says_so(run, probe):
    hold = "import sys; from depthbench.store.lock import run_lock\nwith run_lock(sys.argv[1]): print('held', flush=True); input()"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", hold, str(run[0] / run[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout.readline() == "held\n"
        code, out, err = probe()
        holder.communicate("\n")
    assert (code, out) == (2, "") and f"being written by process {holder.pid}" in err and err.count("\n") == 1


def test_a_corpus_that_changed_is_refused(run, probe, monkeypatch):
    from depthbench import corpora

    card = corpora.read_card
    monkeypatch.setattr(corpora, "read_card", lambda folder: replace(card(folder), fingerprint="another"))
    code, _, err = probe()
    assert code == 2 and "has changed since" in err and err.count("\n") == 1


@pytest.mark.parametrize("design", [("tests.contract.external.TwoLanes", "--arch.leak", "0.3"), ("hc", "--arch.streams", "2")])
def test_a_design_with_options_also_a_users_own(tiny_corpus, tmp_path, says, design):
    run_id = fit(tiny_corpus, tmp_path, "--arch", *design)
    code, out, err = says("probe", run_id, "--runs", tmp_path, *FEW)
    assert code == 0, err
    found = stored((tmp_path, run_id))
    assert set(found["probe"]) == set(runner.NAMES)
    undefined = found[found["status"] == "not_defined"]
    assert undefined["note"].notna().all() and found.loc[found["status"] == "ok", "value"].notna().all()


def test_a_checkpoint_of_another_design_is_one_line(run, probe):
    runs, run_id = run
    path = runs / run_id / "checkpoints" / "step-00000004.ckpt"
    saved = torch.load(path, weights_only=True)
    del saved["state_dict"]["model.final_norm.weight"]
    torch.save(saved, path)
    code, _, err = probe("--probes", "norms")
    assert code == 2 and err.count("\n") == 1
    assert "does not fit design full_attnres as it is now (Missing key(s) in state_dict" in err
