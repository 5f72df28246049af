import os
import shutil
import struct

import duckdb
import pytest

from depthbench.store import reader
from depthbench.store.folder import SEALED, SEGMENTS, list_run
from depthbench.store.reader import Store
from depthbench.store.schema import TABLES
from depthbench.store.seal import seal_run
from tests.store.conftest import curve


@pytest.fixture
def resumed(tmp_path, record):
    record(tmp_path / "r", status=None, scalars=curve("val/loss", [5.0, 4.0, 3.0])).close()
    return record(
        tmp_path / "r", attempt=2, resumed_from_step=1, scalars=curve("val/loss", [2.0], step=2), costs=[{"seq_len": 8, "value": 1.0}]
    )


def test_the_sealed_file_is_for_any_duckdb(tmp_path, resumed):
    """Read without our query layer: each row that stands once, the run's latest row, the tables and types of the schema."""
    with duckdb.connect(tmp_path / "r" / SEALED, read_only=True) as plain:
        assert plain.sql("SELECT attempt, step, value FROM scalars ORDER BY step").fetchall() == [(1, 0, 5.0), (1, 1, 4.0), (2, 2, 2.0)]
        assert plain.sql("SELECT attempt, status FROM run").fetchall() == [(2, "finished")]
        assert plain.sql("SELECT attempt, resumed_from_step FROM attempts").fetchall() == [(1, None), (2, 1)]
        for table, columns in TABLES.items():
            assert {name: kind for name, kind, *_ in plain.sql(f"DESCRIBE {table}").fetchall()} == columns
    header = (tmp_path / "r" / SEALED).read_bytes()[:20]
    assert header[8:12] == b"DUCK" and struct.unpack("<Q", header[12:20]) == (64,)  # the storage version of DuckDB 1.0


def test_nothing_else_is_left(tmp_path, resumed):
    names = {path.name for path in (tmp_path / "r").iterdir()}
    assert {name for name in names if not name.startswith(".summary-")} == {SEALED, ".lock"}
    assert len(names) == 3


def test_segments_left_by_a_kill_double_nothing_and_go_with_the_next_seal(tmp_path, record):
    live = record(tmp_path / "r", status=None, scalars=curve("x", [1.0, 2.0]))
    shutil.copytree(tmp_path / "r" / SEGMENTS, tmp_path / "left")
    live.seal("finished")
    shutil.copytree(tmp_path / "left", tmp_path / "r" / SEGMENTS)
    (tmp_path / "r" / SEGMENTS / ".scalars-000009.parquet.tmp").write_text("half")
    store = Store(tmp_path)
    assert store.rows("scalars", ["r"])["value"].tolist() == [1.0, 2.0]
    assert store.runs()[["status", "n_scalars"]].values.tolist() == [["finished", 2]]
    sealed = (tmp_path / "r" / SEALED).stat()
    seal_run(tmp_path / "r")
    assert not (tmp_path / "r" / SEGMENTS).exists()
    assert (tmp_path / "r" / SEALED).stat().st_ino == sealed.st_ino  # nothing was live, so nothing was written again
    assert store.rows("scalars", ["r"])["value"].tolist() == [1.0, 2.0]


def test_a_kept_summary_says_what_the_rows_say(tmp_path, resumed, monkeypatch):
    kept = Store(tmp_path).runs()
    monkeypatch.setattr(reader, "kept_summary", lambda listing: None)
    asked = Store(tmp_path).runs()
    assert kept.equals(asked) and (kept.dtypes == asked.dtypes).all()
    assert kept.loc[0, ["val_loss", "val_loss_best", "step", "n_attempts"]].tolist() == [2.0, 2.0, 2, 2]


def test_a_summary_speaks_for_its_own_sealed_file_only(tmp_path, record, resumed):
    (summary,) = (tmp_path / "r").glob(".summary-*")
    summary.write_text(summary.read_text().replace('"step": 2', '"step": 77'))
    assert Store(tmp_path).runs()["step"].tolist() == [77]  # it is what is read, as long as it fits
    os.utime(tmp_path / "r" / SEALED)
    assert Store(tmp_path).runs()["step"].tolist() == [2]
    os.utime(tmp_path / "r" / SEALED, ns=(0, int(summary.name.split("-")[1])))
    live = record(tmp_path / "r", status=None, attempt=3, resumed_from_step=2, scalars=curve("x", [0.0], step=5))
    assert Store(tmp_path).runs()["step"].tolist() == [5]
    live.seal("finished")
    assert Store(tmp_path).runs()["step"].tolist() == [5]
    assert not summary.exists() and len(list((tmp_path / "r").glob(".summary-*"))) == 1


@pytest.mark.parametrize("text", ["", "[", "[1, 2]", '["of another release", {"step": 77}]'])
def test_a_summary_that_is_not_ours_is_not_read(tmp_path, resumed, text):
    (summary,) = (tmp_path / "r").glob(".summary-*")
    summary.write_text(text)
    assert Store(tmp_path).runs()["step"].tolist() == [2]


def test_sealing_needs_no_writer(tmp_path, record):
    record(tmp_path / "r", status=None, scalars=curve("x", [1.0])).close()
    seal_run(tmp_path / "r")
    assert not list_run(tmp_path / "r").segments
    assert Store(tmp_path).rows("scalars", ["r"])["value"].tolist() == [1.0]
