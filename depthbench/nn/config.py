"""The numbers a model is built from, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from depthbench.errors import UserError
from depthbench.shapes import ffn_width


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of a model; carries every attribute of ``depthbench.shapes.Shape`` that a design counts with.

    Raises UserError, in one line, for numbers that make no model.
    """

    n_layer: int
    d_model: int
    n_head: int
    vocab_size: int
    n_kv_head: int | None = None  # None: as many as query heads
    d_ff: int | None = None  # None: 8/3 d_model, up to a multiple of 16
    norm_eps: float = 1e-6
    qk_norm: bool = False
    init_std: float = 0.02  # of every matrix and the embedding, before what a design scales
    init_cutoff: float = 3.0  # in standard deviations

    def __post_init__(self) -> None:
        for name in ("n_layer", "d_model", "n_head", "vocab_size", "n_kv_head", "d_ff"):
            value = getattr(self, name)
            optional = name in ("n_kv_head", "d_ff") and value is None
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError(f"{name} is {value!r}: give a whole number of at least 1")
        if isinstance(self.norm_eps, bool) or not isinstance(self.norm_eps, int | float) or not 0 < self.norm_eps < 1:
            raise UserError(f"norm_eps is {self.norm_eps!r}: give a number between 0 and 1, such as 1e-6")
        if self.d_model % self.n_head:
            raise UserError(f"d_model {self.d_model} does not split into {self.n_head} heads: make it a multiple of n_head")
        if self.head_dim % 2:
            raise UserError(
                f"d_model {self.d_model} with {self.n_head} heads gives heads {self.head_dim} wide: rotary positions need an even width"
            )
        if self.n_kv_head is None:
            object.__setattr__(self, "n_kv_head", self.n_head)
        if self.n_head % self.n_kv_head:
            raise UserError(f"n_head {self.n_head} is no multiple of n_kv_head {self.n_kv_head}: query heads share key/value heads evenly")
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", ffn_width(self.d_model))

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_head

    @property
    def n_sublayer(self) -> int:
        """Two per block: even ones are attention, odd ones feed-forward; both count from 0."""
        return 2 * self.n_layer
