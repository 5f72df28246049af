import math
import os
import shutil
import threading
from datetime import UTC, datetime, timedelta

import duckdb
import numpy as np
import pytest

from depthbench.errors import UserError
from depthbench.store import reading, sources, summary, writer
from depthbench.store.folder import SEALED, SEGMENTS, list_run
from depthbench.store.reader import Store, read_run
from depthbench.store.schema import SCHEMA_VERSION
from tests.store.conftest import SPIKE, curve


def layer_rows(steps, layers, metric="norm", value=lambda step, layer: float(10 * step + layer)):
    place = {"site": "block_out", "direction": "forward", "metric": metric}
    return [{**place, "step": s, "tokens": 100 * s, "layer": n, "value": value(s, n)} for s in steps for n in range(layers)]


# ---- the list of runs


def test_no_runs_are_an_empty_table(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        runs = Store(place).runs()
        assert runs.empty and {"run_id", "status", "val_loss", "folder", "problem"} <= set(runs.columns)
        assert isinstance(Store(place).version(), str)


def test_a_run_is_summed_up_in_one_row(tmp_path, record):
    rows = curve("val/loss", [5.0, 2.0, math.nan, 3.0, math.inf]) + curve("train/loss", [9.0, 1.5]) + curve("perf/tokens_per_s", [1e4, 2e4])
    record(tmp_path / "older", {"ratio": 32.0})
    record(tmp_path / "run", {"arch": "mhc"}, status=None, scalars=rows)
    runs = Store(tmp_path).runs()
    assert runs["run_id"].tolist() == ["older", "run"]
    run = runs.iloc[1]
    assert (run["arch"], run["status"], run["folder"], run["problem"]) == ("mhc", "running", str(tmp_path / "run"), None)
    assert (run["step"], run["tokens_done"], run["wall_s"], run["n_scalars"]) == (4, 400, 2.0, 9)
    assert (run["val_loss"], run["val_loss_best"], run["val_loss_best_step"]) == (math.inf, 2.0, 1)
    assert (run["n_val_loss"], run["n_val_loss_finite"], run["train_loss"], run["tokens_per_s"]) == (5, 3, 1.5, 2e4)
    assert runs.loc[0, "ratio"] == 32.0 and math.isnan(runs.loc[0, "val_loss"])
    assert abs(run["updated_at"] - datetime.now(UTC).replace(tzinfo=None)) < timedelta(minutes=1)


def test_the_list_follows_the_runs(tmp_path, record):
    store = Store(tmp_path)
    live = record(tmp_path / "a", status=None)
    assert store.runs()["n_scalars"].isna().all()
    live.add("scalars", curve("x", [1.0]))
    live.drain()
    assert store.runs()["n_scalars"].tolist() == [1]
    live.seal("diverged")
    record(tmp_path / "b")
    assert store.runs()["status"].tolist() == ["diverged", "finished"]
    shutil.rmtree(tmp_path / "a")
    assert store.runs()["run_id"].tolist() == ["b"]
    shutil.rmtree(tmp_path / "b")
    record(tmp_path / "b", {"arch": "mhc"}, status=None)  # begun afresh in its place
    assert store.runs()["arch"].tolist() == ["mhc"]


def test_running_without_a_sign_of_life_is_stale(tmp_path, record):
    store = Store(tmp_path)
    record(tmp_path / "live", status=None)
    record(tmp_path / "done")
    assert store.runs()["status"].tolist() == ["running", "finished"]
    version = store.version()
    old = datetime.now().timestamp() - 121
    os.utime(tmp_path / "live" / "heartbeat", (old, old))
    assert store.runs()["status"].tolist() == ["stale", "finished"]
    assert read_run(tmp_path / "live")["status"] == "stale"
    assert store.version() != version


# ---- runs that cannot be read

BAD = {
    "newer": "run newer was written by a newer depthbench",
    "newer-live": "run newer-live was written by a newer depthbench",
    "cut": "run cut cannot be read",
    "no-database": "run no-database cannot be read",
}


@pytest.fixture
def good_and_bad(tmp_path, record, monkeypatch):
    for name in ("good-1", "good-2", "cut", "no-database"):
        record(tmp_path / name, scalars=curve("x", [1.0]))
    with monkeypatch.context() as future:
        for module in (writer, sources, summary):
            future.setattr(module, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        record(tmp_path / "newer", scalars=curve("x", [1.0]))
        record(tmp_path / "newer-live", status=None, scalars=curve("x", [1.0]))
    os.truncate(tmp_path / "cut" / SEALED, 30_000)
    (tmp_path / "no-database" / SEALED).write_text("not a database, whatever its name")
    return Store(tmp_path)


def test_bad_runs_hide_no_good_ones_and_say_what_is_wrong(good_and_bad):
    runs = good_and_bad.runs().set_index("run_id")
    assert sorted(runs.index) == sorted([*BAD, "good-1", "good-2"])
    assert runs.loc[["good-1", "good-2"], "status"].tolist() == ["finished"] * 2
    for name, message in BAD.items():
        assert runs.loc[name, "status"] == "unreadable"
        assert message in runs.loc[name, "problem"] and "\n" not in runs.loc[name, "problem"]
    assert good_and_bad.runs().set_index("run_id").equals(runs)
    assert set(good_and_bad.scalars(list(runs.index), ["x"])["run_id"]) == {"good-1", "good-2"}


def test_a_bad_run_alone_is_the_users_error(good_and_bad):
    for name, message in BAD.items():
        with pytest.raises(UserError, match=message):
            good_and_bad.scalars([name], ["x"])
        with pytest.raises(UserError, match=message):
            read_run(good_and_bad.runs_dir / name)


def test_an_unknown_run_is_the_users_error(tmp_path, record):
    record(tmp_path / "pre_ln")
    for ask in (lambda: Store(tmp_path).scalars(["pre_nl"], ["x"]), lambda: Store(tmp_path).version("pre_nl")):
        with pytest.raises(UserError, match="did you mean 'pre_ln'"):
            ask()
    with pytest.raises(UserError, match="holds no run"):
        read_run(tmp_path)


def test_an_older_run_is_read_with_what_it_lacks_empty(tmp_path, record):
    """A sealed file without a column and without a table, and segments without a column beside those that have it."""
    live = record(tmp_path / "live", status=None, scalars=curve("x", [1.0]))
    live.add("scalars", curve("x", [2.0], step=1))
    live.drain()
    first = min((tmp_path / "live" / SEGMENTS).glob("scalars-*"))
    duckdb.execute(f"COPY (SELECT * EXCLUDE (wall_s) FROM '{first}') TO '{first}.older' (FORMAT parquet)")
    os.replace(f"{first}.older", first.with_name("scalars-000003.parquet"))
    first.unlink()
    record(tmp_path / "sealed", scalars=curve("x", [3.0]))
    with duckdb.connect(tmp_path / "sealed" / SEALED) as sealed:
        for change in ("TABLE run DROP COLUMN schema_version", "TABLE run DROP COLUMN suite", "TABLE scalars DROP COLUMN wall_s"):
            sealed.execute(f"ALTER {change}")
        sealed.execute("DROP TABLE probes")
    store = Store(tmp_path)
    scalars = store.scalars(["live", "sealed"], ["x"])
    assert scalars["value"].tolist() == [1.0, 2.0, 3.0]
    assert scalars["wall_s"].isna().tolist() == [True, False, True]
    assert store.runs()["status"].tolist() == ["running", "finished"]
    assert store.rows("probes", ["live", "sealed"]).empty


# ---- attempts


@pytest.mark.parametrize("sealed", [False, True])
def test_rows_beyond_the_step_that_was_resumed_from_are_superseded(tmp_path, record, sealed):
    """Attempt 1 to step 9; 2 from step 6, to 11; 3 from step 3, to 5: what stands is 0-3 of the first and 4-5 of the third."""

    def attempt(number, steps, resumed_from_step=None):
        steps = list(steps)
        record(
            tmp_path / "r",
            status="interrupted" if sealed else None,
            attempt=number,
            resumed_from_step=resumed_from_step,
            scalars=curve("train/loss", [float(number)] * len(steps), step=steps[0]),
            layer_stats=layer_rows(steps, 2, value=lambda *_: float(number)),
            probes=[{"step": step, "value": float(number)} for step in steps],
            costs=[{"seq_len": 8, "value": float(number)}],
        ).close()

    store = Store(tmp_path)
    attempt(1, range(10))
    attempt(2, range(7, 12), 6)
    assert store.rows("scalars", ["r"])["value"].tolist() == [1.0] * 7 + [2.0] * 5
    attempt(3, range(4, 6), 3)
    standing = [1.0] * 4 + [3.0] * 2
    for table in ("scalars", "probes"):
        assert store.rows(table, ["r"])["value"].tolist() == standing
    assert store.scalars(["r"], ["train/loss"])["value"].tolist() == standing
    assert store.scalars(["r"], ["train/loss"], buckets=1)["n"].tolist() == [6]
    assert store.layer_stats("r", "norm", "block_out", "forward")["value"].tolist() == [value for value in standing for _ in range(2)]
    assert store.layer_steps("r")["step"].tolist() == list(range(6))
    assert store.layer_stat_keys("r")[["n", "n_steps"]].values.tolist() == [[12, 6]]
    assert store.scalar_names(["r"])["n"].tolist() == [6]
    assert store.runs()[["step", "n_scalars", "n_attempts", "attempt"]].values.tolist() == [[5, 6, 3, 3]]
    assert store.rows("costs", ["r"])["value"].tolist() == [1.0, 2.0, 3.0]  # they belong to no step
    attempt(4, range(2))
    assert store.rows("scalars", ["r"])["value"].tolist() == [4.0, 4.0]  # resumed from nothing: it began anew


# ---- curves


def test_reduction_keeps_a_spike_of_one_step_and_leaves_out_what_is_no_number(tmp_path, record):
    values = [1.0] * 1000
    values[700], values[13], values[14] = SPIKE, math.nan, -math.inf
    record(tmp_path / "r", scalars=curve("train/loss", values) + curve("val/loss", [4.0, math.nan, 2.0]))
    reduced = Store(tmp_path).scalars(["r"], ["train/loss", "val/loss"], buckets=50)
    curves = {name: rows for name, rows in reduced.groupby("name")}
    train = curves["train/loss"]
    assert len(train) == 50 and train["n"].tolist() == [20] * 50 and train["n_finite"].tolist() == [18] + [20] * 49
    assert train["step"].tolist() == list(range(19, 1000, 20)) and train["tokens"].iloc[-1] == 99_900
    assert train["value_max"].max() == SPIKE and train["value_min"].min() == 1.0
    assert train.loc[train["value_max"] == SPIKE, "value"].tolist() == [pytest.approx((SPIKE + 19) / 20)]
    val = curves["val/loss"]  # fewer points than buckets: each is there as recorded
    assert val["step"].tolist() == [0, 1, 2] and val["n_finite"].tolist() == [1, 0, 1]
    np.testing.assert_array_equal(val["value"], [4.0, math.nan, 2.0])
    np.testing.assert_array_equal(val["value_max"], [4.0, math.nan, 2.0])


@pytest.mark.parametrize("sealed", [False, True])
def test_curves_of_several_runs_come_in_order(tmp_path, record, sealed):
    for run, first in (("b", 10.0), ("a", 20.0)):
        rows = curve("y", [first + 2]) + curve("x", [first, first + 1])[::-1]
        record(tmp_path / run, status="finished" if sealed else None, scalars=rows)
    frame = Store(tmp_path).scalars(["b", "a", "b"], ["x", "y", "z"])
    assert frame[["run_id", "name", "value"]].values.tolist() == [
        *(["a", "x", 20.0], ["a", "x", 21.0], ["a", "y", 22.0]),
        *(["b", "x", 10.0], ["b", "x", 11.0], ["b", "y", 12.0]),
    ]
    assert Store(tmp_path).scalars([], ["x"]).columns.equals(frame.columns)
    assert Store(tmp_path).scalar_names(["a", "b"]).values.tolist() == [["x", 2, 4, 4], ["y", 2, 2, 2]]


def test_more_runs_than_are_opened_at_once(tmp_path, record, monkeypatch):
    monkeypatch.setattr(reading, "_BATCH", 2)
    names = [f"r{n}" for n in range(5)]
    for name in names:
        record(tmp_path / name, status=None, scalars=curve("x", [1.0, 2.0]))
    store = Store(tmp_path)
    assert store.scalars(names, ["x"])["run_id"].tolist() == [name for name in names for _ in range(2)]
    assert store.scalar_names(names).values.tolist() == [["x", 5, 10, 10]]
    assert store.runs()["n_scalars"].tolist() == [2] * 5


# ---- layers


def test_a_layer_statistic_is_steps_by_layers(tmp_path, record):
    rows = layer_rows([0, 10, 20], 3) + layer_rows([0, 10], 3, metric="mean")
    record(tmp_path / "r", layer_stats=rows[::-1])
    store = Store(tmp_path)
    norm = store.layer_stats("r", "norm", "block_out", "forward")
    assert norm[["step", "tokens", "layer", "value"]].values.tolist() == [
        [step, 100 * step, layer, 10 * step + layer] for step in (0, 10, 20) for layer in range(3)
    ]
    assert store.layer_stats("r", "norm", "block_out", "backward").empty
    keys = store.layer_stat_keys("r")
    assert keys.columns.tolist() == ["metric", "site", "direction", "n", "n_finite", "n_steps", "n_layer"]
    assert keys.values.tolist() == [["mean", "block_out", "forward", 6, 6, 2, 3], ["norm", "block_out", "forward", 9, 9, 3, 3]]
    assert store.layer_steps("r").values.tolist() == [[0, 0], [10, 1000], [20, 2000]]


def test_a_layer_statistic_is_reduced_over_steps_only(tmp_path, record):
    odd = {(50, 1): SPIKE, (3, 0): math.nan, (4, 0): math.inf}
    record(tmp_path / "r", layer_stats=layer_rows(range(100), 2, value=lambda step, layer: odd.get((step, layer), float(layer))))
    reduced = Store(tmp_path).layer_stats("r", "norm", "block_out", "forward", buckets=10)
    assert len(reduced) == 20 and set(reduced["n"]) == {10}
    first, second = (reduced[reduced["layer"] == layer] for layer in (0, 1))
    assert first["n_finite"].tolist() == [8] + [10] * 9 and first["value"].tolist() == [0.0] * 10
    assert second["value_max"].tolist() == [1.0] * 5 + [SPIKE] + [1.0] * 4 and second["value_min"].tolist() == [1.0] * 10
    assert first["step"].tolist() == second["step"].tolist() == list(range(9, 100, 10))


# ---- beside writers, and in many threads


def test_a_file_that_vanishes_is_looked_for_again(tmp_path, record, monkeypatch):
    """The run is sealed between the listing and the reading: the listed segments are gone."""
    live = record(tmp_path / "r", status=None, scalars=curve("x", [1.0, 2.0]))
    before = list_run(tmp_path / "r")
    live.seal("finished")
    listings = [before]
    monkeypatch.setattr(reading, "list_run", lambda folder: listings.pop() if listings else list_run(folder))
    assert Store(tmp_path).rows("scalars", ["r"])["value"].tolist() == [1.0, 2.0]


def test_threads_share_a_store(tmp_path, record):
    names = [f"r{n}" for n in range(4)]
    for n, name in enumerate(names):
        rows = curve("x", [float(n)] * 500)
        record(tmp_path / name, status="finished" if n % 2 else None, scalars=rows, layer_stats=layer_rows([n], 3))
    store, wrong = Store(tmp_path), []

    def ask(n):
        try:
            for _ in range(10):
                frame = store.scalars([names[n]], ["x"])
                if frame["value"].tolist() != [float(n)] * 500 or store.layer_steps(names[n])["step"].tolist() != [n]:
                    wrong.append(n)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(n % 4,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_folder_may_have_any_name(tmp_path, record):
    runs_dir = tmp_path / "it's [an] *odd* place" / "lr=3"
    record(runs_dir / "live", status=None, scalars=curve("x", [1.0]))
    record(runs_dir / "sealed", scalars=curve("x", [2.0]))
    assert Store(runs_dir).scalars(["live", "sealed"], ["x"])["value"].tolist() == [1.0, 2.0]
    assert Store(runs_dir).runs()["status"].tolist() == ["running", "finished"]


# ---- probes


def probe_rows(value, *, rule=None, step=100, at=None, pairs=1, **more):
    row = {"step": step, "probe": "causal", "metric": "score", "value": value, "rule": rule, "measured_at": at}
    return [{**row, "i": 0, "j": j, **more} for j in range(pairs)]


def test_of_a_repeated_probe_the_latest_measurement_is_returned_whole(tmp_path, record):
    noon = datetime(2030, 1, 1, 12)
    writer = record(tmp_path / "run", status=None)
    writer.add("probes", probe_rows(1.0, at=noon, pairs=3))
    writer.add("probes", probe_rows(2.0, at=noon, rule="renormalise") + probe_rows(3.0, at=noon, step=50))
    writer.add("probes", probe_rows(4.0, at=noon, probe="angular"))
    writer.add("probes", probe_rows(5.0, at=noon + timedelta(seconds=1), pairs=2))  # fewer rows than the one it supersedes
    writer.drain()
    store = Store(tmp_path)
    for status in (None, "finished"):
        if status:
            writer.seal(status)
        found = store.probes(["run"])
        assert list(zip(found["step"], found["probe"], found["rule"].fillna(""), found["value"], strict=True)) == [
            (50, "causal", "", 3.0), (100, "angular", "", 4.0), (100, "causal", "renormalise", 2.0),
            (100, "causal", "", 5.0), (100, "causal", "", 5.0),
        ]  # fmt: skip
        assert store.rows("probes", ["run"]).shape == (5, len(found.columns))
    assert store.probes(["run"], ["angular"])["value"].tolist() == [4.0] and store.probes(["run"], []).empty
    with duckdb.connect(str(tmp_path / "run" / SEALED), read_only=True) as sealed:
        assert sealed.execute("SELECT count(*) FROM probes").fetchone() == (5,)


def test_probes_are_measured_anew_by_a_later_writer(tmp_path, record):
    record(tmp_path / "run", probes=probe_rows(1.0, at=datetime(2030, 1, 1), pairs=2))
    with writer.RunWriter(tmp_path / "run") as later:
        later.add("probes", probe_rows(2.0, at=datetime(2030, 1, 2), windows=8, length=64))
    (row,) = Store(tmp_path).probes(["run"]).to_dict("records")
    assert (row["value"], row["windows"], row["length"], row["attempt"]) == (2.0, 8, 64, 1)


def test_probes_of_a_step_that_was_given_up_do_not_stand(tmp_path, record):
    record(tmp_path / "run", status="interrupted", probes=probe_rows(1.0, step=100) + probe_rows(2.0, step=50))
    record(tmp_path / "run", attempt=2, resumed_from_step=60)
    assert Store(tmp_path).probes(["run"])["value"].tolist() == [2.0]
