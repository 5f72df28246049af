import math
import subprocess
import sys
from datetime import datetime

import pytest

from depthbench.errors import UserError
from depthbench.store import segments, writer
from depthbench.store.folder import SEGMENTS, list_run
from depthbench.store.reader import Store, read_run
from depthbench.store.writer import RunWriter
from tests.store.conftest import curve


def test_rows_come_back_as_they_were_recorded(tmp_path, record, odd_values):
    record(
        tmp_path / "r", status=None, scalars=curve("val/loss", odd_values), probes=[{"probe": "lens", "step": 3, "i": 1, "note": "a 'b'"}]
    )
    rows = Store(tmp_path).rows("scalars", ["r"])
    assert [repr(value) for value in rows["value"]] == [repr(value) for value in odd_values]
    assert rows[["run_id", "attempt", "step", "tokens", "wall_s", "name"]].iloc[3].tolist() == ["r", 1, 3, 300, 1.5, "val/loss"]
    probe = Store(tmp_path).rows("probes", ["r"]).iloc[0]
    assert (probe["i"], probe["note"], probe["step"]) == (1, "a 'b'", 3)
    assert math.isnan(probe["j"]) and math.isnan(probe["value"])


def test_what_the_run_is_stands_before_the_first_row(tmp_path, record):
    record(tmp_path / "r", {"n_layer": 7, "config": '{"x": [1]}'}, status=None)
    row = read_run(tmp_path / "r")
    assert (row["run_id"], row["status"], row["attempt"], row["n_layer"], row["config"]) == ("r", "running", 1, 7, '{"x": [1]}')
    assert row["suite"] is None and row["created_at"] <= row["updated_at"]
    attempts = Store(tmp_path).rows("attempts", ["r"])
    assert attempts["attempt"].tolist() == [1] and attempts["ended_at"].isna().all() and attempts["host"].notna().all()


@pytest.mark.parametrize(
    ("table", "rows", "error"),
    [
        ("scalars", [{"step": 1, "nmae": "x"}], "no column 'nmae'"),
        ("scalers", [{"step": 1}], "no table 'scalers'"),
        ("scalars", [{"step": 1, "value": "high"}], "high"),
        ("scalars", [{"step": 1.5}], "1.5"),
        ("run", [{"status": "finished"}], "update_run"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_where_it_is_added(tmp_path, record, table, rows, error):
    live = record(tmp_path / "r", status=None)
    with pytest.raises((ValueError, TypeError), match=error):
        live.add(table, [{"step": 0}, *rows])
    live.drain()
    assert Store(tmp_path).rows("scalars", ["r"]).empty


def test_the_latest_row_of_the_run_counts_though_the_clock_goes_back(tmp_path, record, monkeypatch):
    live = record(tmp_path / "r", status=None)
    monkeypatch.setattr(writer, "_now", lambda: datetime(2001, 1, 1))
    for device in ("cpu", "cuda"):
        live.update_run(device=device)
    live.drain()
    assert read_run(tmp_path / "r")["device"] == "cuda"
    live.seal("finished")
    again = record(tmp_path / "r", {"device": "tpu"}, status=None, attempt=2)
    assert (read_run(tmp_path / "r")["device"], read_run(tmp_path / "r")["attempt"]) == ("tpu", 2)
    with pytest.raises(ValueError, match="no column 'devise'"):
        again.update_run(devise="x")


def test_a_resumed_run_keeps_its_beginning(tmp_path, record):
    record(tmp_path / "r", status="interrupted")
    created = read_run(tmp_path / "r")["created_at"]
    record(tmp_path / "r", attempt=2, resumed_from_step=0)
    assert read_run(tmp_path / "r")["created_at"] == created
    attempts = Store(tmp_path).rows("attempts", ["r"])
    assert attempts["attempt"].tolist() == [1, 2] and attempts["ended_at"].notna().all()
    assert math.isnan(attempts["resumed_from_step"][0]) and attempts["resumed_from_step"][1] == 0


def test_many_flushes_leave_few_files_and_every_row_once(tmp_path, record, monkeypatch):
    monkeypatch.setattr(segments, "MAX_LIVE", 6)
    live = record(tmp_path / "r", status=None)
    for n in range(40):
        live.add("scalars", curve("x", [float(n)], step=n))
        live.drain()
        assert len(list_run(tmp_path / "r").live("scalars")) < 6
        assert Store(tmp_path).rows("scalars", ["r"])["step"].tolist() == list(range(n + 1))
    assert any(segment.merged for segment in list_run(tmp_path / "r").segments)


def test_large_segments_are_merged_last():
    names = [f"scalars-{first:06d}-{first + 1:06d}.parquet" for first in range(0, 200, 2)]
    merged = [segments.Segment.parse(name) for name in names]
    plain = [segments.Segment("scalars", n, n) for n in range(200, 400)]
    assert segments.merge_due(merged[:50] + plain[:149]) == []
    assert segments.merge_due(merged[:50] + plain[:150]) == plain[:150]
    assert segments.merge_due(merged + plain[:100]) == plain[:100]
    assert segments.merge_due(merged + merged[:1] + plain[:99]) == merged + merged[:1] + plain[:99]


def test_a_later_writer_adds_to_the_attempt_that_stands(tmp_path, record):
    record(tmp_path / "r", status="interrupted", scalars=curve("x", [1.0, 2.0]))
    record(tmp_path / "r", attempt=2, resumed_from_step=1, scalars=curve("x", [3.0], step=2))
    before = read_run(tmp_path / "r")
    with RunWriter(tmp_path / "r") as later:
        later.add("probes", [{"step": 1, "probe": "lens", "value": 1.0}])
        with pytest.raises(ValueError, match="later writer"):
            later.update_run(device="x")
    assert read_run(tmp_path / "r") == before and not list_run(tmp_path / "r").segments
    store = Store(tmp_path)
    assert store.rows("probes", ["r"])["attempt"].tolist() == [2]
    assert store.rows("scalars", ["r"])["value"].tolist() == [1.0, 2.0, 3.0]


def test_numbers_of_segments_are_never_used_again(tmp_path, record):
    """The sealed file lists the names it contains: a new segment of an old name would be taken for old rows."""
    for attempt in (1, 2, 3):
        live = record(tmp_path / "r", status=None, attempt=attempt, resumed_from_step=attempt, scalars=curve("x", [1.0], step=attempt))
        assert Store(tmp_path).rows("scalars", ["r"])["step"].tolist() == list(range(1, attempt + 1))
        live.seal("interrupted")
        assert Store(tmp_path).rows("scalars", ["r"])["step"].tolist() == list(range(1, attempt + 1))


@pytest.mark.parametrize(("error", "status"), [(None, "finished"), (KeyboardInterrupt, "interrupted"), (RuntimeError, "failed")])
def test_leaving_the_block_seals_with_what_happened(tmp_path, error, status):
    try:
        with RunWriter(tmp_path / "r", {"arch": "pre_ln"}) as live:
            live.add("scalars", curve("x", [1.0]))
            if error:
                raise error
    except (KeyboardInterrupt, RuntimeError):
        pass
    assert read_run(tmp_path / "r")["status"] == status
    assert (tmp_path / "r" / "metrics.duckdb").is_file() and not (tmp_path / "r" / SEGMENTS).exists()
    assert len(Store(tmp_path).rows("scalars", ["r"])) == 1


def test_a_closed_writer_takes_nothing(tmp_path, record):
    live = record(tmp_path / "r")
    live.close()
    for action in (lambda: live.add("scalars", curve("x", [1.0])), lambda: live.update_run(device="x")):
        with pytest.raises(ValueError, match="closed"):
            action()


def test_a_run_cannot_end_in_an_unknown_way(tmp_path, record):
    with pytest.raises(ValueError, match="finished"):
        record(tmp_path / "r", status=None).seal("done")


def test_a_writer_for_nothing_is_the_users_error(tmp_path):
    (tmp_path / "r").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        RunWriter(tmp_path / "r")
    assert not list((tmp_path / "r").iterdir())


def test_a_process_that_ends_without_sealing_loses_nothing(tmp_path):
    """An error that nobody caught; and a forked child that ends on its own must neither wait nor take the run with it."""
    code = """
import multiprocessing, sys
from pathlib import Path
from depthbench.store.writer import RunWriter
writer = RunWriter(Path(sys.argv[1]), {"arch": "pre_ln"}, flush_every_s=3600)
writer.add("scalars", [{"step": n, "name": "x", "value": 1.0} for n in range(10)])
child = multiprocessing.get_context("fork").Process(target=sys.exit)
child.start()
child.join(20)
assert child.exitcode == 0
raise RuntimeError("nobody caught this")
"""
    ended = subprocess.run([sys.executable, "-c", code, tmp_path / "r"], capture_output=True, text=True, timeout=60)
    assert "nobody caught this" in ended.stderr and ended.returncode == 1
    assert len(Store(tmp_path).rows("scalars", ["r"])) == 10


def test_rows_are_written_without_being_asked_for(tmp_path):
    with RunWriter(tmp_path / "r", {"arch": "pre_ln"}, flush_every_s=0.01) as live:
        live.add("scalars", curve("x", [1.0]))
        while (written := Store(tmp_path).rows("scalars", ["r"])).empty:
            pass  # the test's time limit is the limit
        assert written.value.tolist() == [1.0]
