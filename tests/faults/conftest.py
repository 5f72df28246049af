"""Shared by the tests of faults: a corpus of which a tiny run sees more than one pass, that run attempt by attempt, and uninterrupted."""

import pytest

from tests.conftest import text_corpus
from tests.faults.tiny_run import Trial


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return text_corpus(tmp_path_factory, texts=6)


@pytest.fixture
def trial(corpus, tmp_path, says, monkeypatch):
    return lambda **how: Trial(corpus, tmp_path, says, monkeypatch, **how)


@pytest.fixture(scope="session")
def whole_runs():
    """What ``uninterrupted`` has trained already."""
    return {}


@pytest.fixture
def uninterrupted(whole_runs, corpus, tmp_path_factory, says, monkeypatch):
    """Accumulation -> the Result of a run that nothing interrupts."""

    def of(accumulation=1):
        if accumulation not in whole_runs:
            whole = Trial(corpus, tmp_path_factory.mktemp("whole"), says, monkeypatch, accumulation=accumulation)
            whole.attempt()
            whole_runs[accumulation] = whole.result()
        return whole_runs[accumulation]

    return of
