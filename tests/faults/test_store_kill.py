"""kill -9 takes nothing that was flushed and leaves nothing that does not open, whenever it comes."""

import multiprocessing
import os
import random
import signal
import threading
import time

import duckdb
import pytest

from depthbench.store.folder import SEALED, SEGMENTS, list_run
from depthbench.store.reader import Store
from depthbench.store.seal import seal_run
from tests.faults import store_child
from tests.faults.store_child import BATCH

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.faults.store_child"])


def start(target, *args):
    """A process, and the pipe on which it acknowledges what it has drained."""
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=target, args=(*args, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def acknowledged(receiver):
    """All that was acknowledged until the other end closed."""
    messages = []
    while True:
        try:
            messages.append(receiver.recv())
        except EOFError:
            return messages


def assert_nothing_lost(store, run_id, steps_acknowledged):
    """Each step once, none missing, and at most one batch more than was acknowledged; the run itself is readable."""
    runs = store.runs()
    assert (runs["status"] != "unreadable").all()
    steps = store.rows("scalars", [run_id])["step"].tolist() if run_id in set(runs["run_id"]) else []
    assert steps == list(range(len(steps)))
    assert steps_acknowledged <= len(steps) <= steps_acknowledged + BATCH
    return len(steps)


def assert_every_file_opens(folder):
    for path in (folder / SEGMENTS).glob("*.parquet"):
        duckdb.execute(f"SELECT * FROM '{path}'").fetchall()
    if (folder / SEALED).exists():
        duckdb.connect(folder / SEALED, read_only=True).close()


def kill_at_random_moments(folder, times, seed):
    chance, store, steps = random.Random(seed), Store(folder.parent), 0
    for _ in range(times):
        process, receiver = start(store_child.go_on, folder)
        assert receiver.poll(30), "the writer did not come to its first batch"
        time.sleep(chance.uniform(0, 0.4))
        os.kill(process.pid, signal.SIGKILL)
        steps = max([steps, *acknowledged(receiver)])
        process.join()
        steps = assert_nothing_lost(store, folder.name, steps)
        assert_every_file_opens(folder)
    seal_run(folder)
    assert not list_run(folder).segments
    assert assert_nothing_lost(store, folder.name, steps) == steps


def test_kills_at_random_moments_lose_nothing(tmp_path):
    kill_at_random_moments(tmp_path / "r", times=5, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_many_kills_at_random_moments_lose_nothing(tmp_path, seed):
    kill_at_random_moments(tmp_path / "r", times=20, seed=seed)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_before_any_rename_or_removal_loses_and_doubles_nothing(tmp_path, every):
    """Every state a folder can be left in: between two flushes, amid a merge, amid a seal, of a first and of a resumed attempt."""
    process, receiver = start(store_child.die_before_call, None, tmp_path / "whole")
    *_, calls = acknowledged(receiver)
    store, left = Store(tmp_path), set()
    for number in range(0, int(calls.split()[0]), every):
        folder = tmp_path / f"killed-{number}"
        process, receiver = start(store_child.die_before_call, number, folder)
        steps = max([0, *acknowledged(receiver)])
        process.join()
        assert process.exitcode == -signal.SIGKILL
        steps = assert_nothing_lost(store, folder.name, steps)
        listing = list_run(folder)
        left.add((bool(listing.sealed), bool(listing.segments), any(segment.merged for segment in listing.segments)))
        if listing:
            seal_run(folder)
            assert not list_run(folder).segments
            assert assert_nothing_lost(store, folder.name, steps) == steps
    assert left >= {(False, True, False), (False, True, True), (True, True, True), (True, True, False), (True, False, False)}


def test_readers_beside_a_writer_see_each_row_once(tmp_path):
    """Flushes, merges, seals and resumes go on while threads read: no error, no row missing, doubled or taken back."""
    folder = tmp_path / "r"
    process, receiver = start(store_child.go_on, folder)
    assert receiver.poll(30)
    store, problems, until = Store(tmp_path), [], time.monotonic() + 2.5

    def read():
        seen = 0
        try:
            while time.monotonic() < until:
                steps = store.scalars(["r"], ["x"])["step"].tolist()
                if steps != list(range(len(steps))) or len(steps) < seen:
                    problems.append(f"{len(steps)} rows after {seen}: {steps[:3]} ... {steps[-3:]}")
                seen = len(steps)
                (row,) = store.runs()[["status", "n_scalars"]].values.tolist()
                if row[0] not in ("running", "finished") or row[1] < seen:
                    problems.append(row)
        except Exception as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.kill(process.pid, signal.SIGKILL)
    assert not problems
    assert max(acknowledged(receiver)) > 20 * BATCH, "too little happened beside the readers"
