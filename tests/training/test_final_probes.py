"""The probes that `fit` ends with: which, what is recorded, and that they never cost a run its end."""

import os
import signal

import pytest
import yaml

from depthbench import probes
from depthbench.errors import UserError
from depthbench.store.reader import Store
from depthbench.training.plan import CHEAP_PROBES, final_probes


def fit(corpus, runs, *more):
    few = ["--ratio", "18", "--tokens", str(2 * 2048), "--validations", "1", "--layer-stats-every", "0", *more]
    return ["fit", "--size", "pico", "--corpus", str(corpus), "--runs", str(runs), "--trainer.accelerator", "cpu", *few]


def recorded(runs):
    """(the run's row, its probes, its perf/probes_s)."""
    store = Store(runs)
    (run,) = store.runs().to_dict("records")
    return run, store.probes([run["run_id"]]), store.scalars([run["run_id"]], ["perf/probes_s"])


def test_auto_means_the_cheap_ones_at_the_small_sizes():
    assert [bool(final_probes("auto", size)) for size in ("pico", "nano", "micro", "400m")] == [True, True, False, False]
    assert final_probes("none", "pico") == [] and final_probes("pruning,norms", "400m") == ["norms", "pruning"]
    with pytest.raises(UserError, match="unknown probe 'cheap'"):
        final_probes("cheap", "pico")


def test_a_small_run_ends_with_the_cheap_probes_of_its_final_weights(tiny_corpus, tmp_path, says):
    code, out, err = says(*fit(tiny_corpus, tmp_path))
    assert code == 0 and f"probes: {', '.join(CHEAP_PROBES)} (1 x 128 held-out tokens, " in out, err
    run, found, seconds = recorded(tmp_path)
    assert run["status"] == "finished" and set(found["probe"]) == set(CHEAP_PROBES)
    assert found[["step", "tokens", "windows", "length"]].drop_duplicates().to_numpy().tolist() == [[2, 4096, 1, 128]]
    assert seconds["step"].tolist() == [2] and 0 < seconds["value"].iloc[0] < 60 and seconds["wall_s"].iloc[0] == run["wall_s"]
    code, out, err = says("probe", run["run_id"], "--runs", tmp_path, "--windows", "1", "--probes", "angular,causal", "--fresh")
    assert code == 0, err
    again = Store(tmp_path).probes([run["run_id"]])
    assert (again["measured_at"] > found["measured_at"].max()).any()
    assert again["value"].tolist() == pytest.approx(found["value"].tolist(), nan_ok=True)


def test_they_are_a_choice_that_makes_no_other_run(tiny_corpus, tmp_path, says):
    code, out, _ = says(*fit(tiny_corpus, tmp_path, "--probes", "none"))
    assert code == 0 and "probes:" not in out
    run, found, seconds = recorded(tmp_path)
    assert found.empty and seconds.empty
    code, out, _ = says(*fit(tiny_corpus, tmp_path, "--probes", "norms"))
    assert code == 0 and f"Run {run['run_id']} is already finished" in out
    assert yaml.safe_load((tmp_path / run["run_id"] / "config.yaml").read_text())["probes"] == "none"


def test_an_unknown_probe_is_refused_before_anything_is_made(tiny_corpus, tmp_path, says):
    code, out, err = says(*fit(tiny_corpus, tmp_path / "runs", "--probes", "norms,angulr"))
    assert (code, out) == (2, "") and "did you mean 'angular'" in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def interrupted(model, tokens, **how):
    os.kill(os.getpid(), signal.SIGTERM)


def broken(model, tokens, **how):
    raise ZeroDivisionError


@pytest.mark.parametrize("happens", [interrupted, broken])
def test_whatever_happens_meanwhile_the_run_is_finished(tiny_corpus, tmp_path, says, monkeypatch, happens):
    monkeypatch.setattr(probes, "angular", happens)
    if happens is interrupted:
        code, out, _ = says(*fit(tiny_corpus, tmp_path))
        assert code == 143 and "The run is finished; `depthbench probe pre_ln-pico" in out and "validation loss:" in out
    else:
        with pytest.raises(ZeroDivisionError):
            says(*fit(tiny_corpus, tmp_path))
    run, found, seconds = recorded(tmp_path)
    assert run["status"] == "finished" and set(found["probe"]) == {"norms"} and seconds.empty
    assert not list((tmp_path / run["run_id"]).glob("segments/*"))
    monkeypatch.undo()
    assert says("probe", run["run_id"], "--runs", tmp_path, "--windows", "1", "--probes", "norms,angular")[0] == 0
    assert set(recorded(tmp_path)[1]["probe"]) == {"norms", "angular"}
