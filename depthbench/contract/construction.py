"""How a model of the design is built, counted, saved and given to the optimizer."""

from __future__ import annotations

import io

import torch
from torch import Tensor

from depthbench import shapes
from depthbench.contract.subject import SHAPE, Subject, check, deviation, listed, require, some_tokens
from depthbench.nn.model import LanguageModel

SHARED = ("embedding.weight", "head.weight", "blocks.0.attention.core.q_proj.weight", "blocks.2.feed_forward.core.up_proj.weight")


@check
def a_checkpoint_restores_the_function(subject: Subject) -> None:
    """The state_dict is all that is kept of a run: what it does not hold (a plain attribute, a random choice) is lost at a resume."""
    model, other, tokens = subject.moved(), subject.fresh(seed=4).double(), some_tokens()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    require(not torch.equal(model(tokens), other(tokens)), "two models of different weights give the same logits")
    other.load_state_dict(torch.load(saved))
    require(torch.equal(model(tokens), other(tokens)), "a model that loads another's state_dict does not give its logits")


@check
def meta_build_equals_direct_build(subject: Subject) -> None:
    """Large models are made on the meta device, emptied and initialised by ``reset_parameters``. What a constructor put into a parameter
    or a buffer is erased on the way: constants belong into Python numbers, initial values into ``reset_parameters``."""
    direct = subject.fresh()
    with torch.device("meta"):
        model = subject.fresh()
    require(all(p.is_meta for p in model.parameters()), "a parameter is made on a device of its own choice, not on the default one")
    poison(model.to_empty(device="cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model.reset_parameters()
    poisoned = poison(subject.fresh())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        poisoned.reset_parameters()
    for built in (model, poisoned):
        pairs = zip(all_tensors(built), all_tensors(direct), strict=True)
        differing = [name for (name, mine), (_, theirs) in pairs if not torch.equal(mine, theirs)]
        require(not differing, f"reset_parameters does not set all of {listed(differing)}")
        require(torch.equal(built(some_tokens()), direct(some_tokens())), "the same parameters, yet other logits than a direct build")


@torch.no_grad()
def poison(model: LanguageModel) -> LanguageModel:
    """Fills what ``reset_parameters`` must set with a value that nobody would choose."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.fill_(-7)
    return model


def all_tensors(model: LanguageModel) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@check
def what_is_shared_with_pre_ln_is_equal(subject: Subject) -> None:
    """Under one seed, what a design shares with Pre-LN has its names and starts out equal, up to a factor that the design may put on a
    matrix: else a difference between two designs may be one between two draws."""
    plain, model = subject.plain().state_dict(), subject.fresh().state_dict()
    shared = [name for name in plain if name in model and model[name].shape == plain[name].shape]
    missing = [name for name in SHARED if name not in shared]
    require(not missing, f"not there under Pre-LN's name and shape: {listed(missing)} (build_sublayer keeps the cores)")
    differing = [name for name in shared if deviation(model[name] / model[name].norm(), plain[name] / plain[name].norm()) > 1e-6]
    require(not differing, f"not Pre-LN's initial values, nor a multiple of them: {listed(differing)}")


@check
def extra_parameters_equal_their_formula(subject: Subject) -> None:
    """``params_extra`` decides whether a shape keeps to its budget before any model is built: it must equal the count, at any shape."""
    for changes in ({}, dict(n_layer=1), dict(n_layer=5, d_model=24, n_kv_head=4), dict(n_layer=9)):
        with torch.device("meta"):
            model, plain = subject.fresh(**changes), subject.plain(**changes)
        config = subject.config(**changes)
        shape = shapes.Shape(head_dim=config.head_dim, **{name: getattr(config, name) for name in SHAPE})
        counted = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters())
        for given in (shape, config):
            formula = subject.design.params_extra(given, **subject.options)
            where = f"at {config.n_layer} blocks of width {config.d_model}"
            require(formula == counted, f"params_extra says {formula:,} {where}, the model has {counted:,} beyond Pre-LN's")
        flops = subject.design.flops_extra(shape, 8, **subject.options)
        require(isinstance(flops, int) and flops >= 0, f"flops_extra says {flops!r}: give a whole number of at least 0")


@check
def parameter_groups_are_complete(subject: Subject) -> None:
    """The optimizer sees every parameter once. Vectors and scalars do not decay, nor what ``no_decay_parameters`` and
    ``tables_of_vectors`` name; the backbone's matrices always do, so that weight decay is the same factor in all designs."""
    model = subject.fresh()
    decay, no_decay = model.parameter_groups(0.1)
    require((decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0), "the groups' weight decay is not 0.1 and 0")
    grouped = [id(parameter) for group in (decay, no_decay) for parameter in group["params"]]
    require(len(grouped) == len({*grouped}), "a parameter is in both groups")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    require({*grouped} == {*names}, "the groups do not hold exactly the model's parameters")
    decaying = {id(parameter) for parameter in decay["params"]}
    for method in ("no_decay_parameters", "tables_of_vectors"):
        named = list(getattr(model.residual, method)())
        require(all(id(p) in names for p in named), f"{method} names a tensor that is no parameter of the model")
        require(not any(id(p) in decaying for p in named), f"a tensor that {method} names would decay")
    for parameter in model.parameters():
        name = names[id(parameter)]
        if parameter.ndim < 2:
            require(id(parameter) not in decaying, f"{name} has fewer than two dimensions and would decay")
        elif not name.startswith("residual."):
            require(id(parameter) in decaying, f"{name} is a matrix of the backbone and would not decay")
