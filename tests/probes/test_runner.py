"""Running probes on a run: what is measured, what is stored when, what is not measured again. The probes themselves are stand-ins."""

import math
from datetime import datetime

import pandas as pd
import pytest
import torch

from depthbench import build_model, probes, residuals
from depthbench.errors import UserError
from depthbench.probes import runner
from depthbench.probes.base import Rows
from depthbench.probes.runner import Measurement, Subject
from depthbench.store.reader import Store
from depthbench.store.writer import RunWriter


@pytest.fixture
def subject(tmp_path):
    """A sealed run and a model of its design."""
    return a_subject(tmp_path / "run", "block_attnres")


def a_subject(folder, arch):
    with RunWriter(folder, {"arch": arch}) as writer:
        writer.add("scalars", [{"step": 7, "name": "val/loss", "value": 1.0}])
    model = build_model(arch, n_layer=2, d_model=8, n_head=2, vocab_size=11)
    return Subject(folder, model, torch.zeros(3, 5, dtype=torch.long), step=7, tokens_seen=700)


@pytest.fixture
def calls(monkeypatch):
    """Every probe is a stand-in that gives the number of its call; returns the calls."""
    calls = []

    def stand_in(name):
        def probe(model, tokens, *, rule=None, micro_batch=8, progress=None):
            calls.append((name, rule, micro_batch))
            rows = Rows(tokens[:, 1:].numel(), rule)
            rows.add("score", len(calls), 0, 1)
            progress(1.0)
            return {"causal": rows.frame(), "pruning": rows.frame()} if name == "skips" else rows.frame()

        return probe

    for name in (*runner.NAMES, "skips"):
        monkeypatch.setattr(probes, name, stand_in(name))
    return calls


def run(subject, wanted, **how):
    with RunWriter(subject.folder) as writer:
        runner.measure(writer, subject, wanted, **how)


def rows(subject):
    return Store(subject.folder.parent).probes([subject.folder.name])


def test_the_probes_there_are_are_those_of_the_package():
    assert set(runner.NAMES) == set(probes.__all__) - {"skips", "windows"}


def test_names_are_put_in_the_order_they_run():
    assert runner.chosen("all") == list(runner.NAMES) == runner.chosen("norms, all")
    assert runner.chosen("permutation,logit-lens,norms") == ["norms", "logit_lens", "permutation"]
    for text, said in (("", "no probe is named"), ("angulr", "did you mean 'angular'")):
        with pytest.raises(UserError, match=said):
            runner.chosen(text)


@pytest.mark.parametrize("arch", residuals.names())
def test_blocks_are_left_out_by_every_rule_of_the_design_or_the_one_asked_for(arch):
    model = build_model(arch, n_layer=2, d_model=8, n_head=2, vocab_size=11)
    rules = model.residual.skip_rules
    wanted = runner.measurements(model, ["angular", "causal", "pruning"])
    assert wanted == [Measurement("angular"), *(Measurement(name, rule) for name in ("causal", "pruning") for rule in rules)]
    assert runner.measurements(model, ["causal"], rules[-1]) == [Measurement("causal", rules[-1])]
    with pytest.raises(UserError, match="unknown skip rule"):
        runner.measurements(model, ["angular"], "no such")


def test_attention_residuals_are_measured_by_both_rules():
    assert residuals.get("full_attnres").skip_rules == residuals.get("block_attnres").skip_rules == ("reference", "renormalise")


def test_rows_say_what_they_were_measured_on(subject, calls):
    run(subject, runner.measurements(subject.model, ["angular", "causal"]), micro_batch=2)
    assert calls == [("angular", None, 2), ("causal", "reference", 2), ("causal", "renormalise", 2)]
    found = rows(subject)
    assert found["probe"].tolist() == ["angular", "causal", "causal"] and found["value"].tolist() == [1, 2, 3]
    assert found["rule"].fillna("").tolist() == ["", "reference", "renormalise"]
    facts = found[["step", "tokens", "windows", "length", "n_tokens", "i", "j", "attempt"]].drop_duplicates()
    assert facts.iloc[0].tolist() == [7, 700, 3, 4, 12, 0, 1, 1] and len(facts) == 1
    assert found["measured_at"].notna().all() and found["measured_at"].is_monotonic_increasing
    assert runner.found(subject).keys() == {Measurement("angular"), *(Measurement("causal", rule) for rule in ("reference", "renormalise"))}


def test_causal_and_pruning_share_their_passes(subject, calls):
    run(subject, runner.measurements(subject.model, ["norms", "causal", "pruning"]))
    assert [name for name, *_ in calls] == ["norms", "skips", "skips"]
    assert sorted(zip(rows(subject)["probe"], rows(subject)["value"], strict=True)) == [
        ("causal", 2), ("causal", 3), ("norms", 1), ("pruning", 2), ("pruning", 3),
    ]  # fmt: skip


def test_a_repeated_measurement_takes_the_place_of_the_earlier(subject, calls, monkeypatch):
    wanted = [Measurement("angular"), Measurement("norms")]
    run(subject, wanted)
    monkeypatch.setattr(runner, "datetime", SetBack)
    run(subject._replace(windows=subject.windows[:2]), wanted[:1])
    assert sorted(zip(rows(subject)["probe"], rows(subject)["value"], rows(subject)["windows"], strict=True)) == [
        ("angular", 3, 2), ("norms", 2, 3),
    ]  # fmt: skip
    assert runner.found(subject).keys() == {Measurement("norms")}  # the other is of fewer windows now


class SetBack(datetime):
    """A clock that stands long before the first measurement."""

    @classmethod
    def now(cls, zone):
        return datetime(2001, 1, 1, tzinfo=zone)


@pytest.mark.parametrize("change", [{"step": 8}, {"windows": torch.zeros(2, 5).long()}, {"windows": torch.zeros(3, 4).long()}])
def test_what_was_measured_elsewhere_is_not_there(subject, calls, change):
    run(subject, [Measurement("angular")])
    assert runner.found(subject) and not runner.found(subject._replace(**change))


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ZeroDivisionError])
def test_each_probe_is_on_disk_before_the_next_starts(subject, calls, monkeypatch, raised):
    seen = []

    def fails(model, tokens, **how):
        seen.extend(rows(subject)["probe"])
        raise raised

    monkeypatch.setattr(probes, "collapse", fails)
    with pytest.raises(raised):
        run(subject, [Measurement("norms"), Measurement("angular"), Measurement("collapse"), Measurement("jacobian")])
    assert sorted(seen) == ["angular", "norms"] == sorted(rows(subject)["probe"])
    assert not list(subject.folder.glob("segments/*")) and Store(subject.folder.parent).runs()["status"].tolist() == ["finished"]


def test_not_defined_is_null_and_not_a_number_is_none(subject, calls, monkeypatch):
    def nothing(model, tokens, **how):
        found = Rows(12)
        found.not_defined("loss_ratio", "no map")
        return found.frame()

    def odd(model, tokens, **how):
        found = Rows(12)
        found.add("residual_norm", math.nan, 0)
        found.add("residual_norm", math.inf, 1, note="far")
        return found.frame()

    monkeypatch.setattr(probes, "usefulness", nothing)
    monkeypatch.setattr(probes, "norms", odd)
    added = []
    monkeypatch.setattr(RunWriter, "add", lambda self, table, rows, add=RunWriter.add: (added.extend(rows), add(self, table, rows)))
    run(subject, [Measurement("usefulness"), Measurement("norms")])
    assert [(row["value"], row["i"], row["j"], row["note"], row["status"]) for row in added[::2]] == [
        (None, None, None, "no map", "not_defined"), (math.inf, 1, None, "far", "ok"),
    ]  # fmt: skip
    assert math.isnan(added[1]["value"]) and rows(subject)["value"].isna().sum() == 2


def test_a_probe_that_refuses_the_windows_leaves_the_others_to_go_on(subject):
    wanted = [Measurement("usefulness"), Measurement("norms")]
    subject = subject._replace(windows=subject.windows[:1], model=build_model("pre_ln", n_layer=2, d_model=8, n_head=2, vocab_size=11))
    run(subject, wanted)
    assert "two or more" in runner.summary(subject, wanted).splitlines()[0]
    assert runner.found(subject).keys() == set(wanted)


def test_progress_is_told_of_each_title(subject, calls):
    told = {}

    class Show:
        def __init__(self, title):
            self.title = title

        def __enter__(self):
            return lambda done: told.__setitem__(self.title, done)

        def __exit__(self, *_):
            told[self.title] = (told[self.title], "ended")

    run(subject, runner.measurements(subject.model, ["norms", "causal", "pruning"], "renormalise"), show=Show)
    assert told == {"norms": (1.0, "ended"), "causal and pruning (renormalise)": (1.0, "ended")}


@pytest.mark.parametrize(("arch", "n_layer"), [("pre_ln", 1), ("mhc", 3), ("block_attnres", 3)])
def test_the_summary_has_a_line_for_every_measurement(tmp_path, arch, n_layer):
    subject = a_subject(tmp_path / "run", arch)
    subject = subject._replace(
        model=build_model(arch, n_layer=n_layer, d_model=8, n_head=2, vocab_size=11),
        windows=torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0)),
    )
    wanted = runner.measurements(subject.model, runner.NAMES)
    run(subject, wanted)
    said = runner.summary(subject, wanted)
    lines = said.splitlines()
    assert [line.split("  ")[0] for line in lines] == [str(one) for one in wanted]
    assert all(len(line.split("  ", 1)[1].strip()) > 10 for line in lines)
    losses = rows(subject).query("probe == 'logit_lens' and metric == 'loss'")["value"]
    assert f"loss {losses.iloc[-1]:.4f}" in said
    undefined = rows(subject).query("status == 'not_defined'")
    assert undefined["note"].notna().all() and all(note in said for note in undefined["note"])


def test_frames_are_stored_as_they_are(subject):
    run(subject, [Measurement("pruning", "renormalise")])
    mine = probes.pruning(subject.model, subject.windows, rule="renormalise")
    kept = runner.found(subject)[Measurement("pruning", "renormalise")]
    pd.testing.assert_series_equal(kept["value"].reset_index(drop=True), mine["value"])
