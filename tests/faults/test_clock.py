"""A clock that jumps: a run that lives does not look dead for longer than it takes to say so, and one that is dead not alive for good."""

import os
import time

import pytest

from depthbench.store import folder as store_folder
from depthbench.store import writer as store_writer
from depthbench.store.folder import HEARTBEAT, STALE_AFTER_S, heartbeat_at
from depthbench.store.reader import Store, read_run
from depthbench.store.removal import why_kept
from depthbench.store.writer import RunWriter

HOUR = 3600.0


@pytest.fixture
def clock(monkeypatch):
    """Sets the clock of this machine, as readers and the writer's file system see it: ``clock(offset)``, seconds from the true time."""

    def set_clock(offset):
        monkeypatch.setattr(store_folder, "clock", lambda: time.time() + offset)

    def give_sign_of_life(folder):
        with open(folder / HEARTBEAT, "ab") as file:
            os.utime(file.fileno(), (store_folder.clock(),) * 2)

    monkeypatch.setattr(store_writer, "give_sign_of_life", give_sign_of_life)
    return set_clock


def status(folder):
    store_status = Store(folder.parent).runs()["status"].tolist()
    assert store_status == [read_run(folder)["status"]]
    return store_status[0]


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
def test_a_living_run_is_seen_alive_after_the_clock_was_set(tmp_path, clock, monkeypatch, jump):
    monkeypatch.setattr(store_writer, "HEARTBEAT_EVERY_S", 0.01)
    with RunWriter(tmp_path / "r", {"arch": "pre_ln"}):
        assert status(tmp_path / "r") == "running"
        clock(jump)
        while abs(heartbeat_at(tmp_path / "r") - (time.time() + jump)) > 60:
            time.sleep(0.01)  # the test's time limit is the limit
        assert status(tmp_path / "r") == "running"


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
def test_a_dead_run_is_stale_whichever_way_the_clock_was_set(tmp_path, clock, jump):
    RunWriter(tmp_path / "r", {"arch": "pre_ln"}).close()  # as after a kill: it never ended
    assert status(tmp_path / "r") == "running" and "it is running" in why_kept(tmp_path / "r", "running")
    clock(jump)
    assert status(tmp_path / "r") == "stale" and why_kept(tmp_path / "r", "running") is None


@pytest.mark.parametrize(("age", "expected"), [(-1, "running"), (1, "stale")])
@pytest.mark.parametrize("side", [-1, 1])
def test_two_minutes_of_silence_are_counted_on_both_sides_of_now(tmp_path, clock, monkeypatch, age, expected, side):
    RunWriter(tmp_path / "r", {"arch": "pre_ln"}).close()
    now = 1_700_000_000.0
    monkeypatch.setattr(store_folder, "clock", lambda: now)
    beat = now + side * (STALE_AFTER_S + age)
    version = Store(tmp_path).version()
    os.utime(tmp_path / "r" / HEARTBEAT, (beat, beat))
    assert status(tmp_path / "r") == expected
    assert (Store(tmp_path).version() == version) == (expected == "stale")  # it was far in the future before
