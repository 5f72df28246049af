"""What a user sees while a run trains: a bar on a terminal, lines in a log."""

import io
from types import SimpleNamespace

import pytest

from depthbench.training.progress import TrainingProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def show(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")

    def run(stream, steps=40):
        recorder = SimpleNamespace(latest={"train/loss": 4.1234, "perf/tokens_per_s": 12_345.6, "val/loss": 4.5})
        trainer = SimpleNamespace(
            global_step=0,
            fit_loop=SimpleNamespace(_should_accumulate=lambda: False),
            state=SimpleNamespace(fn="fit"),
            callback_metrics={"val/loss": 4.5},
        )
        progress = TrainingProgress(recorder, last_step=steps, stream=stream)
        progress._trainer = trainer
        progress.on_train_start(trainer, None)
        for trainer.global_step in range(1, steps + 1):
            progress.on_train_batch_end(trainer, None, None, None, 0)
        progress.on_validation_start(trainer, None)
        progress.on_validation_end(trainer, None)
        progress.on_train_end(trainer, None)
        return stream.getvalue()

    return run


def test_a_terminal_shows_a_bar_with_loss_rate_and_time_left(show):
    shown = show(Terminal())
    assert "step 40/40" in shown and "loss 4.123, val 4.500, 12,346 tokens/s" in shown and " < 00:00" in shown
    assert "validating" in shown


def test_a_log_gets_some_lines_instead(show):
    lines = show(io.StringIO()).splitlines()
    assert lines[0].startswith("step 1/40, loss 4.123, val 4.500, 12,346 tokens/s, ") and lines[0].endswith(" left")
    assert lines[-2].startswith("step 40/40") and lines[-1] == "step 40/40, validation loss 4.5000"
    assert len(lines) == 22  # the first step, twenty more, and the validation
