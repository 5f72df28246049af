"""Designs against other people's packages, their modules given our weights. docs/designs.md says where they differ from the papers.

hyper-connections 0.4.11 wraps a branch, so its connections take our sublayers in between. attn-res 0.1.0 is a model of its own, whose
attention rotates neighbouring pairs and whose head is its embedding; it sums all sources where the paper mixes them once more, which
up to a norm is our mix with a query of zero.
"""

from __future__ import annotations

import pytest
import torch

from depthbench import build_model
from depthbench.nn.rotary import rotation_for
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=13, d_ff=24, norm_eps=1e-24)


# hyper-connections --------------------------------------------------------------------------------------------------------------------


def connections_of(package, kind, model):
    """Their connections with the weights of ours, in our model's precision."""
    streams, dtype = model.residual.streams, model.embedding.weight.dtype
    theirs = [kind(streams, dim=model.config.d_model, layer_index=k).to(dtype) for k in range(model.config.n_sublayer)]
    for ours, their in zip(model.residual.connections, theirs, strict=True):
        weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}
        their.load_state_dict(package(weights, streams) | {"norm.gamma": torch.zeros(model.config.d_model)})  # + 1 is their gain
    return theirs


def hyper_weights(ours, streams):
    return {
        "static_alpha": ours["static_alpha"],
        "static_beta": ours["static_beta"],
        "dynamic_alpha_fn": ours["dynamic"][:-1].T,
        "dynamic_beta_fn": ours["dynamic"][-1],
        "dynamic_alpha_scale": ours["scale_alpha"],
        "dynamic_beta_scale": ours["scale_beta"],
    }


def manifold_weights(ours, streams):
    """Theirs of ours where streams do not share a norm: with one stream, or without dynamic weights."""
    bias_pre, bias_post, bias_res = ours["bias"].split((streams, streams, streams**2))
    phi_pre, phi_post, phi_res = ours["phi"].unflatten(1, (streams, -1))[:, 0].split((streams, streams, streams**2))
    pre, post, res = ours["alpha"]
    return {
        "static_alpha": torch.cat((bias_pre.unsqueeze(1), bias_res.view(streams, streams).T), 1),  # their first index is the old stream
        "static_beta": bias_post,
        "dynamic_alpha_fn": torch.cat((phi_pre[:1], phi_res[:streams])).T.unsqueeze(0),
        "dynamic_beta_fn": phi_post[0],
        "pre_branch_scale": pre.view(1),
        "residual_scale": res.view(1),
        "h_post_scale": post,
    }


def through(connections, model, tokens):
    """Logits of our sublayers with their connections between them."""
    x = model.embedding(tokens).repeat_interleave(model.residual.streams, 0)
    for k, connection in enumerate(connections):
        block = model.blocks[k // 2]
        branch_in, add = connection(x)
        branch_out, _ = (block.feed_forward if k % 2 else block.attention)(branch_in, None, rotation_for(branch_in, model.config.head_dim))
        x = add(branch_out)
    return model.head(model.final_norm(x.unflatten(0, (-1, model.residual.streams)).sum(1)))


def assert_same(model, connections, tolerance):
    """Logits, and the gradients of everything outside the connections, of both ways through the model."""
    tokens = some_tokens(model)
    actual, expected = model(tokens), through(connections, model, tokens)
    assert_near(actual, expected, tolerance)
    shared = {name: parameter for name, parameter in model.named_parameters() if not name.startswith("residual.")}
    mine, theirs = gradients(actual, shared), gradients(expected, shared)
    for name, gradient in mine.items():
        assert_near(gradient, theirs[name], tolerance, name)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_hc_equals_hyper_connections(streams):
    package = pytest.importorskip("hyper_connections", reason="hyper-connections is not installed")
    model = randomise(build_model("hc", **SMALL, streams=streams).double())
    connections = connections_of(hyper_weights, package.HyperConnections, model)
    assert_same(model, connections, 1e-11)
    tokens = some_tokens(model)
    ours = dict(model.residual.connections[3].named_parameters())
    mine = hyper_weights(gradients(model(tokens), ours), streams)
    theirs = gradients(through(connections, model, tokens), {name: connections[3].get_parameter(name) for name in mine})
    for name, gradient in mine.items():
        assert_near(gradient, theirs[name], 1e-11, name)


def test_static_mhc_equals_hyper_connections():
    """Where 20 iterations converge: they normalise rows first and columns last."""
    package = pytest.importorskip("hyper_connections", reason="hyper-connections is not installed")
    model = randomise(build_model("mhc", **SMALL, bias_gap=0.5))
    with torch.no_grad():
        for connection in model.residual.connections:
            connection.phi.zero_()
    assert_same(model, connections_of(manifold_weights, package.mHC, model), 1e-5)


def test_dynamic_mhc_of_one_stream_equals_hyper_connections():
    """With more streams, theirs norms each stream and ours, as the paper, all at once."""
    package = pytest.importorskip("hyper_connections", reason="hyper-connections is not installed")
    model = randomise(build_model("mhc", **SMALL, streams=1))
    assert_same(model, connections_of(manifold_weights, package.mHC, model), 1e-5)


# attn-res -----------------------------------------------------------------------------------------------------------------------------

BOTH = dict(d_model=32, vocab_size=29)


@pytest.mark.parametrize(("design", "n_blocks"), [("full_attnres", None), ("block_attnres", 3), ("block_attnres", 2)])
def test_attention_residuals_equal_attn_res_but_for_the_output_mix(design, n_blocks):
    """Groups of 2 and of 3 sublayers. Their norms work in fp32."""
    package = pytest.importorskip("attn_res", reason="attn-res is not installed")
    mode = package.AttnResMode.BLOCK if n_blocks else package.AttnResMode.FULL
    config = package.TransformerConfig(**BOTH, n_layers=6, n_heads=4, n_kv_heads=2, eps=1e-12, attn_res_mode=mode, n_blocks=n_blocks or 1)
    theirs = package.AttnResTransformer(config)
    options = {"group_size": 6 // n_blocks} if n_blocks else {}
    model = randomise(
        build_model(design, **BOTH, n_layer=3, n_head=4, n_kv_head=2, d_ff=config.d_ff, norm_eps=1e-12, **options), spread=0.1
    )
    with torch.no_grad():
        model.head.weight.copy_(model.embedding.weight)
        model.residual.key_norms.fill_(1)  # their key norm has no weight
        model.residual.queries[-1].zero_()
    names = {name: ours(name) for name, _ in theirs.named_parameters()}
    parameters = dict(model.named_parameters())
    state = {name: value for name, value in theirs.state_dict().items() if name not in names}  # of the first query, which does nothing
    for name, mine in names.items():
        state[name] = torch.zeros(32) if mine is None else in_pairs(pick(parameters, mine), mine)
    theirs.load_state_dict(state | {"lm_head.weight": parameters["head.weight"]})

    tokens = some_tokens(model)
    actual, expected = model(tokens), theirs(tokens)
    assert_near(actual, expected, 1e-5)
    mine, others = gradients(actual, parameters), gradients(expected, dict(theirs.named_parameters()))
    mine["embedding.weight"] = mine["embedding.weight"] + mine["head.weight"]
    for name, gradient in others.items():
        if names[name] is None:
            assert gradient.abs().max() <= 1e-6
        else:
            assert_near(in_pairs(pick(mine, names[name]), names[name]), gradient, 1e-5, name)


def ours(name):
    """Our name of a weight of AttnResTransformer; "residual.queries.<row>" is a row; None for the query of the first sublayer."""
    if not name.startswith("layers."):
        return {"token_emb.weight": "embedding.weight", "out_norm.weight": "final_norm.weight"}[name]
    _, layer, rest = name.split(".", 2)
    if rest == "attn_res.pseudo_query":
        return f"residual.queries.{int(layer) - 1}" if layer != "0" else None
    kind = "feed_forward" if int(layer) % 2 else "attention"
    rest = rest.replace("fn.w_", "core.").replace(".weight", "" if rest == "norm.weight" else "_proj.weight")
    return f"blocks.{int(layer) // 2}.{kind}.{'norm.weight' if rest == 'norm' else rest}"


def pick(tensors, name):
    rows = "residual.queries"
    return tensors[rows][int(name.removeprefix(f"{rows}."))] if name.startswith(rows) else tensors[name]


def in_pairs(weight, name):
    """Rows of query and key matrices from our order, two halves of a head, to theirs, neighbouring pairs."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    return weight.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
