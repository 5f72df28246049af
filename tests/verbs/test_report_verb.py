"""`depthbench report`: the page, its tables and where they go; and one line for every mistake."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path

import pandas as pd
import pytest

from depthbench.figures import catalogue
from depthbench.store.writer import RunWriter
from tests.app.conftest import write
from tests.figures.probe_rows import measured


def record(root: Path, rows: pd.DataFrame | None, **run) -> Path:
    """A run folder with these probe rows."""
    folder = write(root, **run).folder
    if rows is not None:
        rows = rows.assign(measured_at=datetime(2026, 5, 5))
        with RunWriter(folder) as later:
            later.add("probes", rows.astype(object).where(rows.notna(), None).to_dict("records"))
    return folder


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> Path:
    """A run probed at two steps; permutation at the first alone."""
    rows = measured(4)
    later = rows[rows["probe"] != "permutation"]
    return record(tmp_path_factory.mktemp("runs"), pd.concat([rows.assign(step=20), later]), options='{"depth": 2}')


def test_the_page_and_its_tables_lie_in_the_runs_folder(says, probed):
    code, out, err = says("report", "pre_ln", "--runs", probed.parent, "--no-png")
    assert (code, err) == (0, "")
    text = (probed / "report.html").read_text(encoding="utf-8")
    for fact in ("pre_ln depth=2, 4 blocks of width 128", "32.00 = d_model / n_layer", "2,000,000, 1,400,000 in the backbone",
                 "3.0000 nats per token at step 40", "at step 40, after 40,960 tokens", "8 windows of 64 tokens, 512 in all, loss 3.2500",
                 f"depthbench fit --config {probed}/config.yaml", "--step 40 --windows 8 --length 64 --probes"):  # fmt: skip
        assert fact in text, fact
    assert "9 figures of 10 probes at step 40" in out and "not measured: permutation" in out and "no pictures" not in out
    assert sorted(path.name for path in probed.iterdir() if path.name.startswith((".report", "report"))) == ["report", "report.html"]
    drawn = {drawing.name for probe in catalogue.PROBES for drawing in probe.drawings if f'id="figure-{drawing.name}"' in text}
    assert {path.name for path in (probed / "report").iterdir()} == {f"{name}.csv" for name in drawn | {"numbers"}}
    angular = pd.read_csv(probed / "report" / "angular.csv")
    assert len(angular) == 10 and angular["value"].max() == 0.8


def test_another_step_and_place_can_be_asked_for_and_nothing_of_others_is_touched(says, probed, tmp_path):
    kept = tmp_path / "pages" / "mine" / "notes.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    (kept.parent / "transport_rank.csv").write_text("of an earlier report")
    code, out, _ = says("report", probed, "--step", "20", "--out", tmp_path / "pages" / "mine.html", "--no-png")
    assert code == 0 and "at step 20" in out and "not measured" not in out
    assert 'href="mine/permutation.csv"' in (tmp_path / "pages" / "mine.html").read_text(encoding="utf-8")
    assert kept.read_text() == "mine" and not (kept.parent / "transport_rank.csv").exists()


def test_without_kaleido_one_line_says_so_and_the_page_is_written(says, probed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    code, out, _ = says("report", probed, "--out", tmp_path / "page.html")
    assert code == 0 and (tmp_path / "page.html").exists()
    assert [line for line in out.splitlines() if "no pictures: kaleido is not installed" in line]


def test_pictures_lie_beside_the_tables_and_a_browser_that_fails_is_one_line(says, probed, tmp_path, monkeypatch):
    class Kaleido:
        @staticmethod
        def write_fig_from_object_sync(figures, kopts):
            assert kopts["mathjax"] is False, "nothing is fetched from the network"
            for figure in figures:
                Path(figure["path"]).write_bytes(b"png")
            return ()

    monkeypatch.setitem(sys.modules, "kaleido", Kaleido)
    assert says("report", probed, "--out", tmp_path / "page.html")[0] == 0
    assert (tmp_path / "page" / "angular.png").read_bytes() == b"png"
    assert 'href="page/angular.png"' in (tmp_path / "page.html").read_text(encoding="utf-8")

    def fail(figures, kopts):
        raise RuntimeError("no\nbrowser")

    monkeypatch.setattr(Kaleido, "write_fig_from_object_sync", fail)
    code, out, _ = says("report", probed, "--out", tmp_path / "page.html")
    assert code == 0 and "no pictures: the browser gave none (no browser)" in out
    assert not (tmp_path / "page" / "angular.png").exists(), "it is of an earlier report"
    assert "page/angular.png" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_mistakes_are_one_line(says, probed, tmp_path):
    bare = record(tmp_path / "runs", None)
    (tmp_path / "taken").write_text("a file")
    for arguments, message in (
        (["nowhere", "--runs", probed.parent], "unknown run"),
        ([bare], f"measure its layers with `depthbench probe {bare.name}`"),
        ([probed, "--step", "30"], "was not probed at step 30; it was at 20, 40"),
        ([probed, "--out", tmp_path / "page.pdf"], "give a name that ends in .html"),
        ([probed, "--out", tmp_path / "taken.html"], "the tables need a folder of that name"),
        ([probed, "--out", tmp_path / "taken" / "page.html"], "cannot write the report"),
    ):
        code, out, err = says("report", *arguments)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1, err
