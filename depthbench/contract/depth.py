"""What probes ask of a state at the boundary between two blocks: the depth state, its gradient, a readout, and the linear form."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthbench.contract.subject import EXACT, NotDefined, Subject, check, fail, require, require_near, some_tokens, tensors_of
from depthbench.nn.layers import LayerNorm, RMSNorm
from depthbench.nn.model import LanguageModel
from depthbench.residuals.base import State, map_tensors


@check
def depth_states_and_readouts_exist(subject: Subject) -> None:
    """Every boundary from 0 to L has a depth state, of one width, on which angles, norms and ranks are measured, and a readout, the single
    stream that an early exit reads. The last readout through the final norm is what the head multiplies, up to the eps of that norm."""
    model = subject.moved()
    state, width = model.embed(some_tokens()), None
    for block in range(model.config.n_layer + 1):
        depth_state, readout = (ask(state, block=block) for ask in (model.residual.depth_state, model.residual.readout))
        width = width or depth_state.shape[-1]
        shapes = f"at boundary {block} the depth state has shape {tuple(depth_state.shape)}, the readout {tuple(readout.shape)}"
        require(depth_state.shape == (2, 6, width) and readout.shape == (2, 6, model.config.d_model), shapes)
        require(width % model.config.d_model == 0, f"{shapes}: its width is no multiple of d_model {model.config.d_model}")
        require(depth_state.isfinite().all() and readout.isfinite().all(), f"at boundary {block} the depth state is not finite")
        closed = model.residual.close(state, model.final_norm, block=block)
        require(closed.shape == readout.shape, f"close at boundary {block} gives shape {tuple(closed.shape)}")
        if block < model.config.n_layer:
            state = model.run(state, block, block + 1)
    normed: list[Tensor] = []
    with model.final_norm.register_forward_pre_hook(lambda _, given: normed.append(given[0])):
        hidden = model.hidden(state)
    if sum(tensor.numel() for tensor in normed) <= readout.numel():  # else each stream is normed by itself, and there is no single one
        through_norm = model.final_norm(readout)
        lengths = [vectors.norm(dim=-1, keepdim=True) for vectors in (hidden, through_norm)]
        require_near(hidden / lengths[0], through_norm / lengths[1], EXACT, "direction of close against the last readout, normed")
        require_near(lengths[0] / lengths[1], torch.ones_like(lengths[0]), 0.01, "length of close against the last readout, normed")


@check
def depth_gradients_exist(subject: Subject) -> None:
    """The loss gradient on every boundary's depth state, from the gradients on the state's tensors: layer statistics record it while a
    model trains. Where the depth state only rearranges the state, it is the gradient in the same arrangement."""
    model, random = subject.moved(), torch.Generator().manual_seed(5)
    residual = model.residual
    boundaries: dict[int, State] = {}
    caught: dict[int, Tensor] = {}

    def watch(name: str, sublayer: int, value: State) -> None:
        if name == "state_out" and sublayer % 2:
            boundaries[sublayer // 2 + 1] = value
            for tensor in tensors_of(value):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient, tensor=tensor: caught.__setitem__(id(tensor), gradient))

    with model.taps(watch):
        model(some_tokens()).square().sum().backward()
    for block, state in boundaries.items():
        on_state = map_tensors(lambda tensor: caught.get(id(tensor), torch.zeros_like(tensor)), state)
        gradient, depth_state = residual.depth_gradient(on_state, block=block), residual.depth_state(state, block=block)
        require(gradient.shape == depth_state.shape, f"at boundary {block}: shape {tuple(gradient.shape)}, not {tuple(depth_state.shape)}")
        require(gradient.isfinite().all() and gradient.abs().max() > 0, f"at boundary {block} it is zero or not finite")
        tensors = tensors_of(state)
        if depth_state.numel() == sum(tensor.numel() for tensor in tensors):
            along = map_tensors(lambda tensor: torch.randn(tensor.shape, dtype=tensor.dtype, generator=random), state)
            on_depth_state = (gradient * residual.depth_state(along, block=block)).sum()
            on_tensors = sum((g * d).sum() for g, d in zip(tensors_of(on_state), tensors_of(along), strict=True))
            require_near(on_depth_state, on_tensors, 1e-10, f"at boundary {block}, the loss's derivative along a random direction")


@check
def the_linear_form_composes(subject: Subject) -> None:
    """From the coefficients of ``linear`` alone, sum_i W(i, l) f_i is what sublayer l reads, un-normalised: the path weights are those of
    the computation that took place. A gain per channel has no scalar weight, so that norms among the design's own parameters have gains
    of one here; where one of them centres, sources are compared without their means."""
    model, tokens = with_unit_gains(subject.moved()), some_tokens()
    residual, count = model.residual, model.config.n_sublayer
    records: dict[int, dict[str, State]] = {}
    with torch.no_grad():
        with model.taps(lambda name, sublayer, value: records.setdefault(sublayer, {}).__setitem__(name, value)):
            last = model.run(model.embed(tokens))
        records[count] = {"state_in": last, "branch_in": residual.readout(last, block=model.config.n_layer), "branch_out": None}
        forms = [residual.linear(records[k]["state_in"], sublayer=k, branch_out=records[k]["branch_out"]) for k in range(count + 1)]
        if all(form is None for form in forms):
            raise NotDefined("linear gives None: path weights are recorded as not defined")
        require(None not in forms, f"linear gives None for {forms.count(None)} of {count + 1} steps, and a form for the others")
        compose(model, tokens, forms, records)


def compose(model: LanguageModel, tokens: Tensor, forms: list, records: dict[int, dict[str, State]]) -> None:
    """Follows how much of each source (embedding, branch outputs) every slot holds, and holds each sublayer's input against it."""
    seen = without_mean if centres(model.residual) else lambda term: term
    sources = [seen(model.embedding(tokens))]
    slots = sources[0].new_ones(2, 6, forms[0].read.shape[-1], 1)  # (B, T, slots, sources so far)
    for sublayer, form in enumerate(forms):
        where = f"sublayer {sublayer}" if sublayer < len(forms) - 1 else "the readout"
        weights = torch.einsum("btn,btni->bti", form.read.expand(2, 6, -1), slots)
        read = torch.einsum("bti,ibtd->btd", weights, torch.stack(sources))
        require_near(read, seen(records[sublayer]["branch_in"]), EXACT, f"the weighted sum of sources that {where} reads")
        if sublayer == len(forms) - 1:
            require(form.mix is None and form.write is None, "at the readout nothing is written: mix and write are None there")
            return
        if form.mix is None or form.write is None:
            fail(f"linear gives no mix or no write for {where}")
        mixed = torch.einsum("btmn,btni->btmi", form.mix.expand(2, 6, -1, -1), slots)
        slots = torch.cat((mixed, form.write.expand(2, 6, -1).unsqueeze(-1)), -1)
        sources.append(seen(records[sublayer]["branch_out"]))


def without_mean(term: Tensor) -> Tensor:
    return term - term.mean(-1, keepdim=True)


def centres(residual: nn.Module) -> bool:
    return any(isinstance(module, LayerNorm | nn.LayerNorm) for module in residual.modules())


@torch.no_grad()
def with_unit_gains(model: LanguageModel) -> LanguageModel:
    for module in model.residual.modules():
        if isinstance(module, RMSNorm | nn.RMSNorm | nn.LayerNorm):
            for name, parameter in module.named_parameters(recurse=False):
                parameter.fill_(float(name == "weight"))
    return model
