import math

import pytest

from depthbench.store.writer import RunWriter

SPIKE = 99.0


def curve(name, values, step=0):
    """Rows of one scalar, at consecutive steps of 100 tokens."""
    return [
        {"step": step + n, "tokens": 100 * (step + n), "wall_s": 0.5 * (step + n), "name": name, "value": value}
        for n, value in enumerate(values)
    ]


@pytest.fixture
def record():
    """Records a run: ``record(folder, run=None, status="finished", attempt=..., **tables)``; status None leaves it live, and open."""
    writers = []

    def record(folder, run=None, *, status="finished", attempt=1, resumed_from_step=None, **tables):
        facts = {"arch": "pre_ln", "size": "nano", "n_layer": 5, "lr": 0.004, "seed": 42, "config": '{"a": 1}'} | (run or {})
        writer = RunWriter(folder, facts, attempt=attempt, resumed_from_step=resumed_from_step, flush_every_s=3600)
        writers.append(writer)
        for table, rows in tables.items():
            writer.add(table, rows)
        writer.drain()
        if status:
            writer.seal(status)
        return writer

    yield record
    for writer in writers:
        writer.close()


@pytest.fixture
def odd_values():
    return [3.0, math.nan, math.inf, -math.inf, 1.0]
