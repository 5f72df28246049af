"""The trainer that test_trainer_kill.py kills: the command line in a process forked from one that has imported everything."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from depthbench.cli import main
from depthbench.store import segments
from depthbench.store.writer import RunWriter
from depthbench.training import fit  # noqa: F401, for the forks
from tests.faults.witness import Witness

pipe: Connection | None = None


class Acknowledging(Witness):
    """Says through ``pipe`` which step is done and has all its rows on disk."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        trainer.logger.save()
        pipe.send(trainer.global_step)
        super().on_train_batch_start(trainer, module, batch, batch_idx)


def train(command: list[str], environment: dict[str, str], log: Path, kill: tuple[str, str, int] | None, acknowledge: Connection) -> None:
    """Run ``command``, flushing and merging often; exits as depthbench does. ``kill``: see ``die_before``."""
    global pipe
    pipe = acknowledge
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    segments.MAX_LIVE = 4
    RunWriter.__init__.__kwdefaults__["flush_every_s"] = 0.05
    if kill:
        die_before(*kill)
    raise SystemExit(main(command))


def die_before(call: str, suffix: str, number: int) -> None:
    """Have this process killed before its ``number``-th ``os.replace``, ``unlink`` or ``rmdir`` of a path with such an ending."""
    action, left = getattr(os, call), number

    def counted(path, *args, **kwargs):
        nonlocal left
        if str(args[0] if args else path).endswith(suffix):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return action(path, *args, **kwargs)

    setattr(os, call, counted)
