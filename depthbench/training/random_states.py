"""The states of all random generators in each checkpoint, so that a design or a callback that draws goes on where it stood."""

from __future__ import annotations

import random

import lightning as L
import numpy as np
import torch
from torch import distributed


class RandomStates(L.Callback):
    """Keeps the states of Python, NumPy (the global one), torch and every GPU of this process, for each rank its own.

    They are set last thing before training goes on: what building the model and the loaders drew is of no consequence.
    """

    def __init__(self):
        self._loaded: list[dict] | None = None

    def state_dict(self) -> dict:
        if not (distributed.is_available() and distributed.is_initialized()):
            return {"ranks": [states()]}
        ranks = [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, states())
        return {"ranks": ranks}

    def load_state_dict(self, state: dict) -> None:
        self._loaded = state["ranks"]

    def on_train_start(self, trainer, module) -> None:
        if self._loaded is not None:
            set_states(self._loaded[trainer.global_rank])
            self._loaded = None


def states() -> dict:
    """The states as tensors and plain values, which a checkpoint is read back from without unpickling."""
    version, words, gauss = random.getstate()
    _, key, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [torch.from_numpy(key.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_states(states: dict) -> None:
    """Put the generators where ``states`` found them; those of GPUs where there are as many."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    key, position, has_gauss, cached = states["numpy"]
    np.random.set_state(("MT19937", key.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])
