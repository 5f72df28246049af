"""Data parallelism: two processes, half of the batch each, equal one process."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from depthbench.contract.explain import brief
from depthbench.contract.subject import ContractError, NotDefined, Subject, check, listed, require, require_near, some_tokens

PROCESSES, ROWS_EACH = 2, 2
PATIENCE = timedelta(seconds=60)  # with the other process


class Found(NamedTuple):
    """What one process found: nothing, or what is wrong, and the whole traceback."""

    message: str = ""
    whole: str = ""


@check
def two_processes_equal_one(subject: Subject) -> None:
    """Losses and gradients of two steps under DistributedDataParallel (gloo) equal one process's on the whole batch. A parameter outside
    the graph, or one that a process changes on its own, shows here."""
    (found,) = in_two_processes([subject])
    raise_if_wrong(found)


def raise_if_wrong(found: Found) -> None:
    if found.message:
        error = ContractError(found.message)
        error.add_note(found.whole)
        raise error


def in_two_processes(subjects: Sequence[Subject]) -> list[Found]:
    """What is wrong with each, all in one pair of spawned processes."""
    for subject in subjects:
        if subject.design.__module__ == "__main__" or not picklable(subject.design):
            raise NotDefined(f"other processes cannot import {subject.design.__qualname__}: put it at the top of a module of its own")
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(PROCESSES, mp_context=spawning) as pool:
        asked = [(subject.design, subject.options) for subject in subjects]
        by_rank = [future.result() for future in [pool.submit(compare_all, rank, folder, asked) for rank in range(PROCESSES)]]
    return [next((found for found in of_ranks if found.message), Found()) for of_ranks in zip(*by_rank, strict=True)]


def picklable(design: type) -> bool:
    try:
        pickle.dumps(design)
    except (pickle.PicklingError, AttributeError):
        return False
    return True


def compare_all(rank: int, folder: str, asked: Sequence[tuple[type, dict[str, Any]]]) -> list[Found]:
    """One process's part. Each design has a process group of its own: what one leaves behind must not meet the next."""
    torch.set_num_threads(1)
    found = []
    for number, (design, options) in enumerate(asked):
        store = (Path(folder) / f"group-{number}").as_uri()
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES, timeout=PATIENCE)
        try:
            compare(Subject(design, options), rank)
            found.append(Found())
        except Exception as error:
            found.append(Found(brief(error, design), "".join(traceback.format_exception(error))))
        finally:
            dist.destroy_process_group()
    return found


def compare(subject: Subject, rank: int) -> None:
    for build, tolerance, precision in ((subject.fresh, 1e-5, "fp32"), (subject.moved, 1e-12, "fp64")):
        alone, model = build(), build()
        parallel = DistributedDataParallel(model)
        for step in range(2):
            tokens = some_tokens(batch=PROCESSES * ROWS_EACH, seed=step)
            expected = loss_of(alone, tokens)
            expected.backward()
            loss = loss_of(parallel, tokens[rank * ROWS_EACH : (rank + 1) * ROWS_EACH])
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            where = f"step {step + 1}, {precision}, two processes against one"
            require_near(mean / PROCESSES, expected.detach(), tolerance, f"loss at {where}")
            without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
            require(not without, f"no gradient for {listed(without)}: two processes wait for it forever")
            for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
                require_near(mine.grad, theirs.grad, tolerance, f"gradient of {name} at {where}")
            for parameter in (*model.parameters(), *alone.parameters()):
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
