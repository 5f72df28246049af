"""What recording costs: `python benchmarks/recording.py`.

The store: how long `add` and `flush` keep the training thread, how much longer a step takes while a flush is under way, and what a
flush costs against opening, inserting into and closing a DuckDB file; and how long 500 sealed runs take to list.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np

from depthbench.store.folder import SEGMENTS, Segment
from depthbench.store.reader import Store
from depthbench.store.schema import TABLES
from depthbench.store.segments import columnar, write_segment
from depthbench.store.sources import connect
from depthbench.store.writer import RunWriter

METRICS = ("mean", "variance", "magnitude", "norm", "residual_norm", "cosine_drift", "skip_delta")


def layer_rows(step: int, n_rows: int) -> list[dict]:
    """``n_rows`` rows as the callback for layer statistics makes them at one step."""
    places = [
        (site, way, metric) for site in ("block_out", "attn_branch", "ffn_branch") for way in ("forward", "backward") for metric in METRICS
    ]
    return [
        {
            **dict(zip(("site", "direction", "metric"), places[n % len(places)], strict=True)),
            "layer": n // len(places),
            "step": step,
            "tokens": step * 1024,
            "value": 0.5 + n,
        }
        for n in range(n_rows)
    ]


def milliseconds(action: Callable[[], object], times: int) -> np.ndarray:
    taken = np.empty(times)
    for n in range(times):
        begun = time.perf_counter()
        action()
        taken[n] = 1e3 * (time.perf_counter() - begun)
    return taken


def report(what: str, taken: np.ndarray) -> None:
    p50, p99 = np.quantile(taken, [0.5, 0.99])
    print(f"{what:<48} p50 {p50:7.3f} ms   p99 {p99:7.3f} ms   max {taken.max():7.3f} ms   n {len(taken)}", flush=True)


def flush_against_insert(folder: Path, n_rows: int, times: int) -> None:
    """A segment written, synced and renamed, against the same rows put into a DuckDB file that is opened and closed each time."""
    rows = columnar("layer_stats", layer_rows(0, n_rows), 1)
    (folder / SEGMENTS).mkdir(parents=True)
    memory, number = connect(), iter(range(1, 10**6))
    segment = milliseconds(lambda: write_segment(memory, folder, Segment("layer_stats", n := next(number), n), [rows]), times)
    columns = ", ".join(f"{name} {kind}" for name, kind in TABLES["layer_stats"].items())

    def insert() -> None:
        with duckdb.connect(str(folder / "rows.duckdb")) as connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS layer_stats ({columns})")
            connection.register("rows", rows)
            connection.execute("INSERT INTO layer_stats SELECT * FROM rows")

    inserted = milliseconds(insert, times)
    report(f"flush of {n_rows} rows as a segment", segment)
    report(f"open, insert {n_rows} rows, close a DuckDB file", inserted)
    print(f"ratio of the medians, insert / segment: {np.median(inserted) / np.median(segment):.1f}")


def standstill(seconds: float) -> float:
    """The longest time, in ms, between two looks at the clock: how long a thread that wants to go on is kept from it."""
    longest, last, end = 0.0, time.perf_counter(), time.perf_counter() + seconds
    while last < end:
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return 1e3 * longest


def blocking(folder: Path, n_rows: int, times: int) -> None:
    """Time taken from the training thread: by ``add`` and ``flush``, by sharing the cores with the writer's thread, and by its locks.

    Steps with a flush under way and steps without take turns, so that whatever else the machine does meets both alike.
    """
    matrix = np.random.default_rng(0).standard_normal((256, 256), dtype=np.float32)

    def step() -> None:  # some 10 ms in many short calls, as a training step is
        for _ in range(25):
            np.tanh(matrix @ matrix)

    add, flush, beside, alone, kept, free = (np.empty(times) for _ in range(6))
    with RunWriter(folder, {"arch": "pre_ln"}, flush_every_s=3600) as writer:
        for n in range(times):
            rows = layer_rows(n, n_rows)
            add[n] = milliseconds(lambda rows=rows: writer.add("layer_stats", rows), 1)[0]
            flush[n] = milliseconds(writer.flush, 1)[0]
            beside[n] = milliseconds(step, 1)[0]
            writer.drain()
            alone[n] = milliseconds(step, 1)[0]
            writer.add("layer_stats", rows)
            writer.flush()
            kept[n] = standstill(0.02)
            writer.drain()
            free[n] = standstill(0.02)
    report(f"add {n_rows} rows", add)
    report("flush (asks for it)", flush)
    report("step, nothing to write", alone)
    report(f"step, {n_rows} rows being written", beside)
    print(f"a step beside a flush is longer by {np.median(beside) - np.median(alone):.3f} ms in the median: it shares the cores")
    report("longest standstill in 20 ms, nothing to write", free)
    report(f"longest standstill, {n_rows} rows being written", kept)


def listing(runs_dir: Path, n_runs: int) -> None:
    """The list of runs in a new process's store, then again in the same one; and without the summaries kept beside sealed files."""
    scalars = [{"step": n, "tokens": n, "name": name, "value": 3.0} for name in ("train/loss", "val/loss") for n in range(1000)]
    with RunWriter(runs_dir / "run-0", {"arch": "pre_ln", "config": "x" * 5000}) as writer:
        writer.add("scalars", scalars)
        writer.add("layer_stats", layer_rows(0, 20_000))
    for n in range(1, n_runs):
        shutil.copytree(runs_dir / "run-0", runs_dir / f"run-{n}")
    store = Store(runs_dir)
    report(f"list {n_runs} sealed runs, first time", milliseconds(store.runs, 1))
    report(f"list {n_runs} sealed runs, again", milliseconds(store.runs, 5))
    for summary in runs_dir.glob("*/.summary-*"):
        summary.unlink()
    report(f"list {n_runs} sealed runs, no summaries", milliseconds(Store(runs_dir).runs, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3200)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--runs", type=int, default=500)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as place:
        flush_against_insert(Path(place) / "cost", args.rows, args.times)
        blocking(Path(place) / "blocking", args.rows, args.times)
        listing(Path(place) / "runs", args.runs)


if __name__ == "__main__":
    main()
