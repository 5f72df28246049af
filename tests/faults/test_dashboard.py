"""Two training runs and a dashboard that is looked at each second, for a minute: no error on any page, no run stopped, rows seen soon."""

import signal
import sys
import time

import pytest
from streamlit.testing.v1 import AppTest

from depthbench.resources import resource
from depthbench.store.reader import Store
from tests.faults.test_interruption import start, wait_for

SECONDS, SEEN_WITHIN_S = 60, 10.0
ENOUGH = 100_000  # steps: the minute ends first


@pytest.mark.slow
def test_two_trainers_and_a_dashboard(tiny_corpus, tmp_path, monkeypatch):
    trainers = [start(tiny_corpus, tmp_path, ENOUGH, "--seed", str(seed)) for seed in (1, 2)]
    try:
        for trainer in trainers:
            wait_for(trainer, "step 1/")
        monkeypatch.setattr(sys, "argv", ["main.py", "--runs", str(tmp_path)])
        page, store, steps = AppTest.from_file(str(resource("app/main.py")), default_timeout=60), Store(tmp_path), {}
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            page.run()
            assert not page.exception and not page.error
            assert store.runs().problem.isna().all()
            for run_id, rows in store.scalars(store.runs().run_id.tolist(), ["train/loss"]).groupby("run_id"):
                assert rows.step.tolist() == list(range(1, len(rows) + 1))
                if len(rows) > steps.get(run_id, (0, 0))[0]:
                    steps[run_id] = (len(rows), time.monotonic())
                assert time.monotonic() - steps[run_id][1] < SEEN_WITHIN_S, f"no new row of {run_id}"
            time.sleep(1)
        assert len(steps) == 2 and all(count > 20 for count, _ in steps.values())
        assert [trainer.poll() for trainer in trainers] == [None, None]
    finally:
        for trainer in trainers:
            trainer.send_signal(signal.SIGTERM)
        codes = [(trainer.communicate()[0], trainer.returncode)[1] for trainer in trainers]
    assert codes == [143, 143]
    assert store.runs().status.tolist() == ["interrupted"] * 2
