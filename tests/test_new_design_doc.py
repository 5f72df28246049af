"""docs/new-design.md does what it says: its design, in a folder of the user's, goes from check to the dashboard's figures as it is."""

from __future__ import annotations

import re
import sys

import pytest

from depthbench import contract
from depthbench.figures import curves, scaling
from depthbench.store.reader import Store
from tests.conftest import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "new-design.md").read_text(encoding="utf-8")
SHORT = ["--size", "pico", "--tokens", str(2 * 2048), "--validations", "1", "--trainer.accelerator", "cpu"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder, with the design that the document asks for; what it imports is forgotten afterwards."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_design.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_design", None)


def test_it_takes_60_lines_and_its_commands_are_the_ones_tested_here():
    assert len(DOCUMENT.splitlines()) <= 60
    assert re.findall(r"depthbench (\w+)", DOCUMENT.replace("from depthbench", "")) == ["archs", "check", "fit", "app"]


@pytest.mark.xdist_group("two_processes")
def test_the_design_keeps_the_contract(folder, says):
    code, out, err = says("check", "my_design.Echo")
    assert code == 0, out + err
    assert f"{len(contract.CHECKS) - 1} ok, 0 failed, 1 not defined" in out  # path weights are what it leaves out


def test_the_design_goes_from_fit_to_the_figures(folder, tiny_corpus, says):
    for run in ("pre_ln --ratio 32", "my_design.Echo --ratio 32", "my_design.Echo --ratio 16", "my_design.Echo --arch.decay 0.8"):
        code, out, err = says("fit", "--ratio", "32", "--arch", *run.split(), "--corpus", tiny_corpus, *SHORT)
        assert code == 0, out + err
    store = Store(folder / "runs")
    runs = store.runs()
    assert runs["arch"].value_counts().to_dict() == {"my_design.Echo": 3, "pre_ln": 1}
    assert (runs["status"] == "finished").all() and runs["val_loss"].notna().all()
    assert (runs["params_extra"] == (2 * runs["n_layer"]).where(runs["arch"] == "my_design.Echo", 0)).all()

    mine = runs.loc[runs["options"].str.contains("0.8"), "run_id"].item()
    code, out, _ = says("validate", mine)
    assert code == 0 and f"validation loss {runs.set_index('run_id').loc[mine, 'val_loss']:.6f}" in out

    points = scaling.points(runs[scaling.complete(runs)])
    assert points["arch"].value_counts().to_dict() == {"my_design.Echo": 2, "my_design.Echo decay=0.8": 1, "pre_ln": 1}
    assert {trace.name for trace in scaling.figure(points).data if trace.name} >= set(points["arch"])
    assert curves.figure(store.scalars(list(runs["run_id"]), ["train/loss"]), runs).data
    assert len(store.layer_stats(mine, "norm", "block_out", "backward"))
