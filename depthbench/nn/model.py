"""The language model: it walks the depth state through 2L sublayers and contains no design's name.

B batch, T time, D width, V vocabulary, L blocks. Blocks, sublayers and boundaries count from 0.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from depthbench import residuals
from depthbench.errors import UserError
from depthbench.nn.compiling import RegionCompiler
from depthbench.nn.config import ModelConfig
from depthbench.nn.layers import INIT_CUTOFF, INIT_STD, Embedding, Linear
from depthbench.nn.rotary import rotation_for
from depthbench.nn.sublayer import Block
from depthbench.residuals.base import Residual, State
from depthbench.shapes import Shape

Tap = Callable[[str, int, Any], None]


class LanguageModel(nn.Module):
    """Token ids (B, T) -> logits (B, T, V).

    The call is ``logits(run(embed(tokens)))``; probes and training use the pieces. What a design shares with Pre-LN has the same names
    in the state_dict: ``embedding``, ``blocks.<b>.attention``, ``blocks.<b>.feed_forward``, ``final_norm``, ``head``; its own
    parameters lie under ``residual``.
    """

    def __init__(self, config: ModelConfig, design: type[Residual], options: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.options = dict(options)
        residual = design(config, **options)
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(
            Block(*(residual.build_sublayer(config, sublayer=sublayer) for sublayer in (2 * block, 2 * block + 1)))
            for block in range(config.n_layer)
        )
        self.final_norm = residual.build_final_norm(config)
        self.head = Linear(config.d_model, config.vocab_size)
        self.residual = residual
        self._scale_initialisation()
        self._taps: tuple[Tap, ...] = ()
        self._compiled = False
        self._left_out: dict[int, str | None] = {}  # block -> skip rule

    # The walk -----------------------------------------------------------------------------------------------------------------

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.run(self.embed(tokens)))

    def embed(self, tokens: Tensor) -> State:
        """Token ids (B, T) -> the state before the first block."""
        return self.residual.open(self.embedding(tokens))

    def run(self, state: State, start: int = 0, stop: int | None = None) -> State:
        """The state after blocks start, ..., stop - 1 (default: all), from the state before ``start``, which is left as it was."""
        return deque(self.boundaries(state, start, stop), maxlen=1).pop()

    def boundaries(self, state: State, start: int = 0, stop: int | None = None) -> Iterator[State]:
        """As ``run``, but every state on the way: the one before ``start``, ready to go on from, and that after each block."""
        stop = self.config.n_layer if stop is None else stop
        if not 0 <= start <= stop <= self.config.n_layer:
            raise ValueError(f"blocks [{start}, {stop}) lie outside a model of {self.config.n_layer}")
        state = self.residual.begin(state, block=start)
        yield state
        for block in range(start, stop):
            if block in self._left_out:
                state = self.residual.skip(state, block=block, rule=self._left_out[block])
                state = self.residual.begin(state, block=block + 1)
            else:
                state = self._step(state, self.blocks[block].attention, 2 * block)
                state = self._step(state, self.blocks[block].feed_forward, 2 * block + 1)
            yield state

    def hidden(self, state: State) -> Tensor:
        """What the head multiplies, (B, T, D), from the state after the last block."""
        return self.residual.close(state, self.final_norm, block=self.config.n_layer)

    def logits(self, state: State) -> Tensor:
        """Logits (B, T, V) from the state after the last block."""
        return self.head(self.hidden(state))

    def _step(self, state: State, function: nn.Module, sublayer: int) -> State:
        branch_in, carry = self.residual.read(state, sublayer=sublayer)
        branch_out, emitted = function(branch_in, carry, rotation_for(branch_in, self.config.head_dim))
        after = self.residual.write(state, carry, branch_out, emitted, sublayer=sublayer)
        for tap in self._taps:
            tap("state_in", sublayer, state)
            tap("branch_in", sublayer, branch_in)
            tap("branch_out", sublayer, branch_out)
            tap("state_out", sublayer, after)
        return after

    # Looking in and stepping in -----------------------------------------------------------------------------------------------

    @contextmanager
    def taps(self, function: Tap) -> Iterator[None]:
        """Calls ``function(name, sublayer, value)`` for every sublayer that runs inside the ``with``, once it is done, in this order:
        ``state_in``, ``branch_in`` (un-normalised, (B, T, D)), ``branch_out`` (the term as it is added, (B, T, D)), ``state_out``.

        Taps may be nested, and cost nothing when there is none. They work on compiled models, being outside the regions.
        """
        before = self._taps
        self._taps = (*before, function)
        try:
            yield
        finally:
            self._taps = before

    @contextmanager
    def skipped(self, block: int, rule: str | None = None) -> Iterator[None]:
        """Block ``block`` (from 0) left out of every run inside the ``with``, by one of the design's skip rules (None: its default).

        Works on values of the depth state; no forward is replaced. Raises ValueError for a block that is not there, UserError for an
        unknown rule.
        """
        self._require(block)
        before = self._left_out
        self._left_out = {**before, block: self.residual.skip_rule(rule)}
        try:
            yield
        finally:
            self._left_out = before

    @contextmanager
    def swapped(self, first: int, second: int) -> Iterator[None]:
        """Blocks ``first`` and ``second`` (from 0) exchanged inside the ``with`` by the design's rule, and put back bit for bit."""
        self._require(first, second)
        self.residual.swap(self.blocks, first=first, second=second)
        try:
            yield
        finally:
            try:
                self.residual.swap(self.blocks, first=first, second=second)
            except BaseException:  # a second Ctrl-C: a swap undoes what it had begun, and so can be begun again
                self.residual.swap(self.blocks, first=first, second=second)
                raise

    def _require(self, *blocks: int) -> None:
        for block in blocks:
            if not 0 <= block < self.config.n_layer:
                raise ValueError(f"there is no block {block} in a model of {self.config.n_layer}")

    # Parameters ---------------------------------------------------------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Initialises every parameter, under the global seed.

        Each module draws from a generator seeded by its name: under one seed, what two designs or two depths share starts out equal,
        and so does a model built on the meta device, emptied and reset.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        with torch.random.fork_rng(sorted({p.device.index for p in self.parameters() if p.is_cuda})):
            for name, module in self.named_modules():
                if name and hasattr(module, "reset_parameters"):
                    _seed(module, seed + zlib.crc32(name.encode()))
                    module.reset_parameters()

    def _scale_initialisation(self) -> None:
        """The configuration's standard deviation in place of the usual one; what a design asks for relative to it stays."""
        for module in self.modules():
            if isinstance(module, Linear | Embedding):
                module.std *= self.config.init_std / INIT_STD
                module.cutoff = self.config.init_cutoff

    @property
    def params_extra(self) -> int:
        """Parameters beyond Pre-LN's at this shape, by the design's formula."""
        return self.residual.params_extra(self.config, **self.options)

    def parameter_groups(self, weight_decay: float, *, decay_vectors: bool = False) -> list[dict[str, Any]]:
        """Two groups for the optimizer: what decays (matrices and embeddings; norms, biases and other vectors and scalars too with
        ``decay_vectors``), and what does not (the rest, and whatever the design exempts)."""
        exempt = {id(parameter) for parameter in self.residual.no_decay_parameters()}
        vectors = {id(parameter) for parameter in self.residual.tables_of_vectors()}
        decays = {True: [], False: []}
        for parameter in self.parameters():
            is_matrix = parameter.ndim >= 2 and id(parameter) not in vectors
            decays[(decay_vectors or is_matrix) and id(parameter) not in exempt].append(parameter)
        return [{"params": decays[True], "weight_decay": weight_decay}, {"params": decays[False], "weight_decay": 0.0}]

    def compile_regions(self, backend: str = "inductor") -> None:
        """Compiles, in place and by region, every sublayer and whatever fixed-shape parts the design names; parameters keep their names."""
        compiler = RegionCompiler(backend)
        for block in self.blocks:
            for sublayer in (block.attention, block.feed_forward):
                compiler.module(sublayer, (type(sublayer), type(sublayer.core)), sublayer.regions)
        self.residual.compile_regions(compiler.function)
        self._compiled = True

    def eager(self) -> LanguageModel:
        """This model without compiled regions: itself where there are none, else one that shares its weights, in eval mode where it is.

        To be asked for outside ``taps``, ``skipped`` and ``swapped``.
        """
        if not self._compiled:
            return self
        with torch.device("meta"):
            twin = LanguageModel(self.config, type(self.residual), self.options)
        for mine, its in zip(self.parameters(), twin.parameters(), strict=True):
            its.requires_grad_(mine.requires_grad)  # assigning takes it from there, for the weight that is shared
        twin.load_state_dict(self.state_dict(keep_vars=True), assign=True)
        return twin.train(self.training)


def build_model(
    arch: str | type[Residual],
    *,
    n_layer: int,
    d_model: int,
    n_head: int,
    vocab_size: int,
    n_kv_head: int | None = None,
    d_ff: int | None = None,
    norm_eps: float = 1e-6,
    qk_norm: bool = False,
    init_std: float = INIT_STD,
    init_cutoff: float = INIT_CUTOFF,
    **options: Any,
) -> LanguageModel:
    """A freshly initialised model of any design, on the default device.

    ``arch`` is a name of ``depthbench.residuals.names()``, ``"my_module.MyDesign"`` or a subclass of Residual; ``options`` are
    that design's own. Defaults: as many key/value heads as query heads, a feed-forward width of 8/3 d_model rounded up to a multiple of 16.
    Raises UserError, in one line, for an unknown design or option and for numbers that make no model.

    >>> build_model("pre_ln", n_layer=2, d_model=32, n_head=2, vocab_size=64)(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 64])
    """
    config = ModelConfig(
        n_layer=n_layer,
        d_model=d_model,
        n_head=n_head,
        vocab_size=vocab_size,
        n_kv_head=n_kv_head,
        d_ff=d_ff,
        norm_eps=norm_eps,
        qk_norm=qk_norm,
        init_std=init_std,
        init_cutoff=init_cutoff,
    )
    design = residuals.get(arch)
    options = residuals.checked_options(design, options)
    device = torch.get_default_device()
    with torch.device("meta"):
        model = LanguageModel(config, design, options)
    if device.type != "meta":
        model.to_empty(device=device)
        model.reset_parameters()
    return model


def refuse_out_of_range(design: type[Residual], options: dict[str, Any], shape: Shape) -> None:
    """Raises the design's own UserError for option values out of range: builds its constructor's part at ``shape``, without weights.

    Also where its count of parameters there is no whole number, which tables and plans would only fall over later.
    """
    with torch.device("meta"):
        design(ModelConfig(**shape.model_kwargs()), **options)
    extra = design.params_extra(shape, **options)
    if not isinstance(extra, Integral):
        raise UserError(f"params_extra of design {design.__name__} gives {extra!r}: it must be a whole number of parameters")


def _seed(module: nn.Module, seed: int) -> None:
    """Seeds the generators of the devices that the module's own parameters lie on, and no others: torch.manual_seed would touch all."""
    torch.default_generator.manual_seed(seed)
    for index in {parameter.device.index for parameter in module.parameters(recurse=False) if parameter.is_cuda}:
        torch.cuda.default_generators[index].manual_seed(seed)
