"""Shapes of a parameter budget: sizes, the aspect-ratio solver, and what a shape costs. No torch.

A size (conf/sizes.yaml) fixes heads, vocabulary, the feed-forward rule and a budget; the aspect ratio d_model / n_layer trades width
for depth under it. Counts are those of the Pre-LN model, as in the paper (arXiv 2609.32534); what a design adds comes in as
``params_extra``.

Symbols: L n_layer, D d_model, H n_head, K n_kv_head, d_h head_dim, F d_ff, V vocab_size, T sequence length in tokens.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import yaml

from depthbench.errors import UserError, unknown
from depthbench.resources import resource

BUDGETS = ("total", "backbone")
FAR = 0.15  # a realised ratio further than this from the asked one is refused
RATIO_DECIMALS = 4  # shapes whose log distance to the asked ratio agrees to so many decimals count as equally near


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


FFN_RULES: dict[str, Callable[[int], int]] = {
    "8/3": lambda d_model: _ceil_to(8 * d_model, 3 * 16) // 3,
    "3": lambda d_model: 3 * d_model,
}


def ffn_width(d_model: int, rule: str = "8/3") -> int:
    """d_ff by a size's rule: "8/3" of d_model up to a multiple of 16, or "3" times d_model."""
    return FFN_RULES[rule](d_model)


@dataclass(frozen=True, slots=True)
class Shape:
    """The integers of one model, and its parameters by formula (embedding and head untied, no biases)."""

    n_layer: int
    d_model: int
    n_head: int
    n_kv_head: int
    head_dim: int
    d_ff: int
    vocab_size: int

    @property
    def ratio(self) -> float:
        """Aspect ratio D / L."""
        return self.d_model / self.n_layer

    @property
    def params_matrices(self) -> int:
        """Weights of the blocks that multiply every token: L (2 D H d_h + 2 D K d_h + 3 D F)."""
        attention = 2 * self.d_model * self.head_dim * (self.n_head + self.n_kv_head)
        return self.n_layer * (attention + 3 * self.d_model * self.d_ff)

    @property
    def params_backbone(self) -> int:
        """The blocks, their two norms included. The final norm belongs to the head: 24 x 1024 at 400m counts 302,432,256."""
        return self.params_matrices + 2 * self.n_layer * self.d_model

    @property
    def params_embedding(self) -> int:
        """The embedding table, V D. The head has as many again."""
        return self.vocab_size * self.d_model

    @property
    def params_total(self) -> int:
        """Everything: backbone, final norm, embedding, head."""
        return self.params_backbone + self.d_model + 2 * self.params_embedding

    def params(self, budget: str) -> int:
        """Parameters that a budget of this kind counts: "total" or "backbone"."""
        return self.params_total if budget == "total" else self.params_backbone

    def model_kwargs(self) -> dict[str, int]:
        """What ``build_model(arch, **shape.model_kwargs())`` needs."""
        keys = ("n_layer", "d_model", "n_head", "n_kv_head", "d_ff", "vocab_size")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True, kw_only=True)
class Size:
    """One entry of conf/sizes.yaml, which says what each field means; tokens and batches count tokens, micro_batch sequences."""

    name: str
    base: tuple[int, int]
    backbone_base: tuple[int, int] | None = None
    total_budget: int | None = None
    tolerance: float = 0.035
    n_head: int
    n_kv_head: int
    vocab_size: int
    seq_len: int
    ffn: str
    ratio: float
    ratios: tuple[float, ...]
    backbone_ratios: tuple[float, ...] | None = None
    tokens: int
    batch_tokens: int
    micro_batch: int
    lr: float
    val_tokens: int
    corpus: str
    tokenizer: str

    @property
    def budgets(self) -> dict[str, int]:
        """Parameters by kind of budget: the exact count of the base shape, where no round number is set."""
        return {
            "total": self.total_budget or self.shape(*self.base).params_total,
            "backbone": self.shape(*(self.backbone_base or self.base)).params_backbone,
        }

    def ladder(self, budget: str = "total") -> tuple[float, ...]:
        """The aspect ratios to show for this kind of budget, widest first."""
        return self.backbone_ratios if budget == "backbone" and self.backbone_ratios else self.ratios

    def shape(self, n_layer: int, d_model: int) -> Shape:
        """The shape with this size's heads, vocabulary and feed-forward rule; d_model is a multiple of the number of heads."""
        head_dim = d_model // self.n_head
        return Shape(n_layer, d_model, self.n_head, self.n_kv_head, head_dim, ffn_width(d_model, self.ffn), self.vocab_size)


@cache
def sizes() -> dict[str, Size]:
    """All sizes by name, smallest first."""
    entries = yaml.safe_load(resource("conf", "sizes.yaml").read_text(encoding="utf-8"))
    return {name: Size(name=name, **{key: _frozen(value) for key, value in entry.items()}) for name, entry in entries.items()}


def _frozen(value):
    return tuple(value) if isinstance(value, list) else value


def size_named(name: str) -> Size:
    """The size called ``name``. Raises UserError with the known names."""
    if name not in sizes():
        raise unknown("size", name, sizes())
    return sizes()[name]


def solve_shape(
    size: str | Size = "nano",
    ratio: float | None = None,
    budget: str = "total",
    tolerance: float | None = None,
    params_extra: Callable[[Shape], int] | None = None,
) -> Shape:
    """The shape of a size's budget at an aspect ratio (the size's default where None).

    Of all shapes with an even head_dim whose count lies within ``tolerance`` (a fraction; the size's own where None) of the budget,
    the one nearest the ratio in log distance, rounded to 4 decimals, then nearest the budget. ``params_extra`` adds a design's own
    parameters to the count; it must not fall as layers or width are added.

    Raises UserError for an unknown size or budget, for a ratio or tolerance that is not a positive number, and where the nearest
    shape is more than 15 % away from the ratio.
    """
    size = size if isinstance(size, Size) else size_named(size)
    asked = positive("ratio", size.ratio if ratio is None else ratio)
    target, tolerance = _budget(size, budget), _tolerance(size, tolerance)

    def rank(candidate: tuple[int, int, int]) -> tuple[float, int, int]:
        n_layer, d_model, count = candidate
        return round(abs(math.log(d_model / n_layer) - math.log(asked)), RATIO_DECIMALS), abs(count - target), d_model

    within = target * (1 - tolerance), target * (1 + tolerance)
    best = min(_candidates(size, asked, budget, within, params_extra), key=rank, default=None)
    described = f"{size.name} shape within {100 * tolerance:g} % of {target:,} parameters ({budget})"
    if best is None:
        raise UserError(f"there is no {described}: raise --tolerance")
    shape = size.shape(*best[:2])
    if abs(shape.ratio / asked - 1) > FAR:
        nearest = f"the nearest reachable is {shape.ratio:.4g} ({shape.n_layer} x {shape.d_model})"
        raise UserError(f"no {described} has an aspect ratio near {asked:g}: {nearest}; ask for that, or take another --size")
    return shape


def positive(name: str, value: float | str) -> float:
    """``value`` as a finite number above 0. Raises UserError, calling it ``name``, for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"{name} must be a positive number, not {value}")
    return number


def over_budget(shape: Shape, size: str | Size, extra: int = 0, budget: str = "total", tolerance: float | None = None) -> bool:
    """Whether the shape with a design's ``extra`` parameters is larger than the size's budget and tolerance allow."""
    size = size if isinstance(size, Size) else size_named(size)
    return shape.params(budget) + extra > _budget(size, budget) * (1 + _tolerance(size, tolerance))


def prefill_flops(shape: Shape, seq_len: int) -> int:
    """FLOPs of one sequence's forward pass through the blocks: 2 T (matrices) + 2 L T (T+1) H d_h for causal attention.

    The head is left out (2 T V D more where every position is read), and so are norms, softmax and a design's own terms. At 400m and
    T = 4096 this is the paper's 3.0 TFLOP at ratio 76 and 4.4 at 9.14.
    """
    attention = 2 * shape.n_layer * seq_len * (seq_len + 1) * shape.n_head * shape.head_dim
    return 2 * seq_len * shape.params_matrices + attention


def flops_per_token_train(shape: Shape, seq_len: int) -> int:
    """FLOPs of one training token, forward and backward (twice the forward): 6 (matrices + V D) + 6 L (T+1) H d_h, the head included."""
    attention = 6 * shape.n_layer * (seq_len + 1) * shape.n_head * shape.head_dim
    return 6 * (shape.params_matrices + shape.params_embedding) + attention


def kv_cache_bytes(shape: Shape, seq_len: int, bytes_per_value: int = 2) -> int:
    """Bytes of one sequence's keys and values: 2 L K d_h T values, by default of 16 bits."""
    return 2 * shape.n_layer * shape.n_kv_head * shape.head_dim * seq_len * bytes_per_value


def _budget(size: Size, budget: str) -> int:
    if budget not in BUDGETS:
        raise unknown("budget", budget, BUDGETS)
    return size.budgets[budget]


def _tolerance(size: Size, tolerance: float | None) -> float:
    tolerance = positive("tolerance", size.tolerance if tolerance is None else tolerance)
    if tolerance >= 1:
        raise UserError(f"tolerance must be a fraction below 1, not {tolerance:g}: 0.035 is 3.5 %")
    return tolerance


def _candidates(
    size: Size, asked: float, budget: str, within: tuple[float, float], extra: Callable[[Shape], int] | None
) -> Iterator[tuple[int, int, int]]:
    """(n_layer, d_model, count) of the shapes that can win: at each width the layers nearest the asked ratio, with all ties."""
    tie = 10.0**-RATIO_DECIMALS
    for head_dim in itertools.count(2, 2):
        d_model = size.n_head * head_dim
        count = _counter(size, d_model, budget, extra)
        if count(1) > within[1]:
            return
        layers = _layers_between(count, *within)
        if layers:
            ideal = min(max(d_model / asked, layers[0]), layers[-1])
            fewest, most = math.floor(ideal * (1 - tie)), math.ceil(ideal * (1 + tie))
            for n_layer in range(max(fewest, layers[0]), min(most, layers[-1]) + 1):
                yield n_layer, d_model, count(n_layer)


def _counter(size: Size, d_model: int, budget: str, extra: Callable[[Shape], int] | None) -> Callable[[int], int]:
    """The count as a function of n_layer, without building a shape for each: it is affine, but for a design's own parameters."""
    one, two = (size.shape(n_layer, d_model).params(budget) for n_layer in (1, 2))
    if extra is None:
        return lambda n_layer: one + (n_layer - 1) * (two - one)
    return lambda n_layer: one + (n_layer - 1) * (two - one) + extra(size.shape(n_layer, d_model))


def _layers_between(count: Callable[[int], int], lowest: float, highest: float) -> range:
    """The n_layer whose count lies in [lowest, highest], by bisection."""
    beyond = 1
    while count(beyond) <= highest:
        beyond *= 2
    fewest = bisect_left(range(beyond + 1), lowest, lo=1, key=count)
    return range(fewest, bisect_right(range(beyond + 1), highest, lo=fewest, key=count))
