"""Two runs are written while a reader polls, each in a process of its own: nobody waits, nobody fails, and rows are seen soon."""

import time

import pytest

from depthbench.store.reader import Store
from tests.faults import store_child
from tests.faults.test_store_kill import start

SEEN_WITHIN_S = 10.0  # flushes come every 5 s by default
POLL_EVERY_S = 1.0


def newest_row(store, name, before):
    """When the newest visible row of a run was logged, ``before`` where none is visible; each row is there once."""
    if name not in store.runs().query("status in ('running', 'finished') and problem.isna()")["run_id"].tolist():
        return before
    curve = store.scalars([name], ["logged_at"])
    assert curve["step"].tolist() == list(range(len(curve)))
    return curve["value"].max() if len(curve) else before


def watch(runs_dir, seconds):
    """Both writers log for ``seconds``. Returns the times at which rows of each became visible, as often as the polls saw new ones."""
    children = {name: start(store_child.log_steadily, runs_dir / name, seconds) for name in ("a", "b")}
    seen = {name: [receiver.recv()] for name, (_, receiver) in children.items()}
    store = Store(runs_dir)
    while any(process.is_alive() for process, _ in children.values()):
        for name, (process, _) in children.items():
            began, alive = time.monotonic(), process.is_alive()
            newest = newest_row(store, name, seen[name][-1])
            assert not alive or began - newest <= SEEN_WITHIN_S, name
            if newest > seen[name][-1]:
                seen[name].append(newest)
        time.sleep(POLL_EVERY_S)
    for name, (process, receiver) in children.items():
        assert process.exitcode == 0
        assert len(store.scalars([name], ["logged_at"])) == receiver.recv()
    assert store.runs()[["status", "problem"]].values.tolist() == [["finished", None]] * 2
    return seen


@pytest.mark.parametrize(("seconds", "times_new"), [(10, 1), pytest.param(60, 8, marks=pytest.mark.slow)])
def test_rows_of_two_writers_are_seen_by_a_polling_reader(tmp_path, seconds, times_new):
    seen = watch(tmp_path, seconds)
    assert all(len(times) > times_new for times in seen.values())
