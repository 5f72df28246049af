"""What the processes do that test_store_kill.py kills and test_readers.py watches. A module of its own, so that they start in a few
milliseconds."""

import os
import signal
import time

from depthbench.store import segments
from depthbench.store.folder import is_run_folder
from depthbench.store.reader import Store, read_run
from depthbench.store.writer import RunWriter

BATCH = 7


def recorded_steps(folder):
    return Store(folder.parent).rows("scalars", [folder.name])["step"].tolist() if is_run_folder(folder) else []


def go_on(folder, acknowledged, flushes_per_attempt=9, attempts=10**6, max_live=5):
    """Record steps 0, 1, 2, ... batch by batch, going on from what is there; merge every few flushes, seal and resume every
    ``flushes_per_attempt``. Each batch is acknowledged once it is drained, with the number of steps recorded by then."""
    segments.MAX_LIVE = max_live
    step = len(recorded_steps(folder))
    first = read_run(folder)["attempt"] + 1 if is_run_folder(folder) else 1
    for attempt in range(first, first + attempts):
        with RunWriter(
            folder, {"arch": "pre_ln"}, attempt=attempt, resumed_from_step=step - 1 if step else None, flush_every_s=3600
        ) as writer:
            for _ in range(flushes_per_attempt):
                writer.add("scalars", [{"step": n, "name": "x", "value": float(n)} for n in range(step, step + BATCH)])
                writer.drain()
                step += BATCH
                acknowledged.send(step)


def die_before_call(number, folder, acknowledged):
    """``go_on`` for two short attempts, killed before the ``number``-th rename or removal of a file; says how many there are."""
    calls = 0

    def counted(action):
        def wrapper(*args, **kwargs):
            nonlocal calls
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            calls += 1
            return action(*args, **kwargs)

        return wrapper

    for name in ("replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    go_on(folder, acknowledged, flushes_per_attempt=3, attempts=2, max_live=3)
    acknowledged.send(f"{calls} calls")


def log_steadily(folder, seconds, told):
    """Record a row every 50 ms, the time it is logged at as its value, with the interval of flushes that training has. Tells when it
    begins, and how many rows there were."""
    with RunWriter(folder, {"arch": "pre_ln"}) as writer:
        began, step = time.monotonic(), 0
        told.send(began)
        while (now := time.monotonic()) < began + seconds:
            writer.add("scalars", [{"step": step, "name": "logged_at", "value": now}])
            step += 1
            time.sleep(0.05)
    told.send(step)
