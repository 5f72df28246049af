"""Every design that ships against a naive loop written from its formulas, and the loops against each other."""

from __future__ import annotations

import math

import pytest
import torch

from depthbench import build_model, residuals
from tests.oracles import block_attnres, deepnorm, full_attnres, hc, keel, lns, mhc, moda, ops, pre_ln, sandwich_ln
from tests.oracles.checks import GROUPED, UNGROUPED, equals_oracle, equals_oracle_without_a_block, oracle_of
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

THREE, NINE = {"n_layer": 3}, {"n_layer": 9}

# Per design: what to change in the shape, and the options. A design that is not listed is held to its oracle with its defaults.
# Nine blocks are more mixes and readings than those designs take at once that read all that came before.
CASES = {
    "keel": [({}, {}), (THREE, {"alpha": 2.5})],
    "hc": [
        ({}, {}),
        ({}, {"dynamic": False}),
        ({}, {"streams": 3, "norm_then_sum": True, "mix_eps": 1e-2}),
        ({}, {"streams": 1}),
    ],
    "mhc": [
        ({}, {}),
        ({}, {"streams": 3, "iterations": 4, "norm_then_sum": True, "mix_eps": 1e-2}),
        ({}, {"streams": 2, "iterations": 1}),
        ({}, {"streams": 1, "iterations": 2}),
    ],
    "full_attnres": [({}, {}), (THREE, {"mix_eps": 1e-2}), (NINE, {})],
    "block_attnres": [
        (THREE, {}),
        (THREE, {"group_size": 1}),
        (THREE, {"group_size": 2, "mix_eps": 1e-2}),
        (THREE, {"group_size": 3}),
        (THREE, {"group_size": 4}),
        (THREE, {"group_size": 5}),
        (THREE, {"group_size": 7}),
        (NINE, {}),
        (NINE, {"group_size": 1}),
        (NINE, {"group_size": 3}),
        (NINE, {"group_size": 5}),
        (NINE, {"group_size": 11}),
    ],
    "moda": [(THREE, {}), (THREE, {"rotate_depth_keys": True}), ({"n_layer": 1}, {}), (NINE, {})],
}


def cases(names):
    for name in names:
        for changes, options in CASES.get(name, [({}, {})]):
            says = "-".join([name, *(f"{key}={value}" for key, value in (changes | options).items())])
            yield pytest.param(name, changes, options, id=says)


@pytest.mark.parametrize(("name", "changes", "options"), [*cases(residuals.names())])
def test_equals_the_oracle_with_all_gradients(name, changes, options):
    sizes = {"length": 2, "batch": 1} if changes == NINE else {}
    equals_oracle(name, name, GROUPED | changes, **sizes, **options)


@pytest.mark.parametrize("name", residuals.names())
@pytest.mark.parametrize("shape", [UNGROUPED, GROUPED | {"qk_norm": True}], ids=["heads of their own", "QK-norm"])
def test_equals_the_oracle_with_other_heads(name, shape):
    changes, options = CASES.get(name, [({}, {})])[0]
    equals_oracle(name, name, shape | changes, length=3, batch=1, **options)


@pytest.mark.parametrize("name", residuals.names())
def test_gives_the_oracles_logits_for_a_single_token(name):
    model = randomise(build_model(name, **GROUPED | THREE).double())
    tokens = some_tokens(model, batch=1, length=1)
    with torch.no_grad():
        assert_near(model(tokens), oracle_of(name)(dict(model.named_parameters()), tokens, model.config), 1e-11)


@pytest.mark.parametrize("name", residuals.names())
def test_gradients_pass_through_boundaries_where_runs_end_and_two_begin(name):
    """Two runs that share their first block, take turns and stop at the same boundaries, give twice the gradients of one run."""
    model = randomise(build_model(name, **GROUPED | NINE).double(), spread=0.2)
    tokens, parameters = some_tokens(model), dict(model.named_parameters())
    expected = model(tokens)
    states = [model.run(model.embed(tokens), 0, 1)] * 2
    for start, stop in ((1, 5), (5, 6), (6, 9)):
        states = [model.run(state, start, stop) for state in states]
    first, second = map(model.logits, states)
    for actual in (first, second):
        assert_near(actual, expected, 1e-12)
    twice, once = gradients(first + second, parameters), gradients(expected, parameters)
    for parameter in once:
        assert_near(twice[parameter], 2 * once[parameter], 1e-11, parameter)


RULES = {"full_attnres": ["reference", "renormalise"], "block_attnres": ["reference", "renormalise"], "moda": ["zeros", "dropped"]}


@pytest.mark.parametrize("name", sorted(RULES.keys() & set(residuals.names())))
def test_a_skipped_block_follows_the_rule(name):
    """All blocks, so that with groups it lies before, at, across and after a boundary, in odd groups too."""
    assert residuals.get(name).skip_rules == tuple(RULES[name])
    for options in [{"group_size": size} for size in (1, 2, 3, 4, 5, 6, 8, 9)] if name == "block_attnres" else [{}]:
        for rule in RULES[name]:
            for block in range(4):
                equals_oracle_without_a_block(name, name, block, rule, GROUPED | {"n_layer": 4}, **options)


# The oracles themselves, by what must be true of the formulas -----------------------------------------------------------------------

TOKENS = torch.tensor([[3, 1, 4]])


def plain(n_layer=2):
    """Weights of Pre-LN, none at its initial value, and their config; with an eps so small that a norm divides any factor out."""
    model = randomise(build_model("pre_ln", **GROUPED | {"n_layer": n_layer}, norm_eps=1e-24).double())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, model.config


def random(*size, seed=5):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_is_pre_ln(oracle, own, w, config, **options):
    """With the weights ``own``: Pre-LN's logits and gradients."""
    w = {name: weight.clone().requires_grad_() for name, weight in w.items()}
    actual, expected = oracle(w | own, TOKENS, config, **options), pre_ln.logits(w, TOKENS, config)
    assert_near(actual, expected, 1e-12)
    mine, theirs = gradients(actual, w), gradients(expected, w)
    for name in w:
        assert_near(mine[name], theirs[name], 1e-12, name)


def hyper_connections(n, config, connection):
    """``connection(k)`` gives (A_m, A_r, B) of sublayer k as nested lists, A_r[s][t]; the dynamic part gives nothing."""
    own = {}
    for k in range(2 * config.n_layer):
        A_m, A_r, B = (torch.tensor(matrix, dtype=torch.float64) for matrix in connection(k))
        prefix = f"residual.connections.{k}"
        own |= {f"{prefix}.static_alpha": torch.cat((A_m[:, None], A_r), 1), f"{prefix}.static_beta": B}
        own |= {f"{prefix}.dynamic": torch.zeros(n + 2, config.d_model, dtype=torch.float64)}
        own |= {f"{prefix}.{name}": torch.tensor(0.01, dtype=torch.float64) for name in ("scale_alpha", "scale_beta")}
    return own


def test_hc_starts_as_pre_ln():
    w, config = plain()
    own = hyper_connections(3, config, lambda k: ([k % 3 == s for s in range(3)], [[s == t for t in range(3)] for s in range(3)], [1] * 3))
    assert_is_pre_ln(hc.logits, own, w, config, streams=3)
    assert_is_pre_ln(hc.logits, own, w, config, streams=3, dynamic=False)


def test_two_streams_of_hc_can_run_attention_and_feed_forward_side_by_side():
    """Only as long as A_r[s, t] leads from s to t: its transpose would not do."""

    def connection(k):
        return ([1, 0], [[0, 0], [1, 1]], [1, 1]) if k % 2 else ([1, 0], [[1, 0], [0, 1]], [0, 1])

    w, config = plain()
    x = [w["embedding.weight"][token] for token in TOKENS[0]]
    for b in range(config.n_layer):
        both = zip(x, ops.sublayer(w, 2 * b, x, config), ops.sublayer(w, 2 * b + 1, x, config), strict=True)
        x = [vector + first + second for vector, first, second in both]
    actual = hc.logits(w | hyper_connections(2, config, connection), TOKENS, config, streams=2)
    assert_near(actual, ops.head(w, x, config)[None], 1e-12)


def test_mhc_is_pre_ln_whatever_its_streams_exchange_as_long_as_each_adds_the_whole_output():
    w, config = plain()
    own = {}
    for k in range(2 * config.n_layer):
        bias = 2 * random(15, seed=k)
        bias[3:6] = 0
        own |= {f"residual.connections.{k}.bias": bias, f"residual.connections.{k}.phi": 0 * random(15, 3 * config.d_model)}
        own |= {f"residual.connections.{k}.alpha": random(3)}
    assert_is_pre_ln(mhc.logits, own, w, config, streams=3, iterations=2)


def test_sinkhorn_ends_with_the_rows():
    rows = torch.stack(mhc.sinkhorn(list((2 * random(4, 4)).exp()), 3))
    assert_near(rows.sum(1), torch.ones(4), 1e-12)
    assert (rows.sum(0) - 1).abs().max() > 1e-6
    settled = torch.stack(mhc.sinkhorn(list((2 * random(4, 4)).exp()), 500))
    assert_near(settled.sum(0), torch.ones(4), 1e-9)


def attention_residuals(config, queries=True):
    size = (2 * config.n_layer, config.d_model)
    return {"residual.queries": queries * random(*size), "residual.key_norms": 1 + 0.3 * random(*size, seed=6)}


def test_attention_residuals_with_zero_queries_are_pre_ln():
    w, config = plain(n_layer=3)
    own = attention_residuals(config, queries=False)
    assert_is_pre_ln(full_attnres.logits, own, w, config)
    for group_size in (1, 2, 3, 4, 7):
        assert_is_pre_ln(block_attnres.logits, own, w, config, group_size=group_size)


def test_groups_of_one_are_full_attention_residuals_also_without_a_block():
    w, config = plain(n_layer=3)
    w |= attention_residuals(config)
    for skip in (None, 0, 1, 2):
        for rule in ("reference", "renormalise") if skip is not None else ("reference",):
            actual = block_attnres.logits(w, TOKENS, config, group_size=1, skip=skip, rule=rule)
            assert_near(actual, full_attnres.logits(w, TOKENS, config, skip=skip, rule=rule), 1e-12)


def test_a_group_that_holds_everything_leaves_embedding_and_running_sum():
    w, config = plain()
    w |= attention_residuals(config)
    embedding = [w["embedding.weight"][token] for token in TOKENS[0]]
    running = ops.sublayer(w, 0, embedding, config)
    for k in range(1, 5):
        h = [block_attnres.mix(w, k, pair, config.norm_eps) for pair in zip(embedding, running, strict=True)]
        if k < 4:
            running = [total + term for total, term in zip(running, ops.sublayer(w, k, h, config), strict=True)]
    for group_size in (4, 5, 9):
        assert_near(block_attnres.logits(w, TOKENS, config, group_size=group_size), ops.head(w, h, config)[None], 1e-12)


def test_the_first_block_skipped_in_its_group_leaves_the_embedding_as_the_running_sum():
    """By the reference rule the second block then adds to it, and what follows reads one source where there would have been two."""
    w, config = plain()
    w |= attention_residuals(config)
    x = [w["embedding.weight"][token] for token in TOKENS[0]]
    for k in (2, 3):
        x = [vector + term for vector, term in zip(x, ops.sublayer(w, k, x, config), strict=True)]
    assert_near(block_attnres.logits(w, TOKENS, config, group_size=4, skip=0), ops.head(w, x, config)[None], 1e-12)


@pytest.mark.parametrize("group_size", [2, 3, 4, 5])
def test_what_a_skipped_block_reads_and_computes_has_no_effect(group_size):
    w, config = plain(n_layer=3)
    w |= attention_residuals(config)
    for skip in range(3):
        other = {name: weight + 1 if name.startswith(f"blocks.{skip}.") else weight for name, weight in w.items()}
        for rule in ("reference", "renormalise"):
            options = dict(group_size=group_size, skip=skip, rule=rule)
            assert torch.equal(block_attnres.logits(w, TOKENS, config, **options), block_attnres.logits(other, TOKENS, config, **options))


def test_lns_is_pre_ln_with_smaller_gains():
    w, config = plain(n_layer=3)
    scaled = dict(w)
    for b in range(3):
        for kind in ("attention", "feed_forward"):
            scaled[f"blocks.{b}.{kind}.norm.weight"] = w[f"blocks.{b}.{kind}.norm.weight"] / math.sqrt(b + 1)
    assert_near(lns.logits(w, TOKENS, config), pre_ln.logits(scaled, TOKENS, config), 1e-12)


def with_outputs_times(factor, w):
    return {name: factor * weight if name.split(".")[-2] in ("o_proj", "down_proj") else weight for name, weight in w.items()}


def test_sandwich_ln_does_not_see_the_size_of_what_a_sublayer_puts_out():
    w, config = plain()
    w |= {name.replace(".norm.", ".output_norm."): 1 + 0.3 * random(config.d_model) for name in w if ".norm.weight" in name}
    assert_near(sandwich_ln.logits(with_outputs_times(7, w), TOKENS, config), sandwich_ln.logits(w, TOKENS, config), 1e-12)


def test_deepnorm_and_keel_without_outputs_normalise_the_embedding():
    w, config = plain()
    embedding = w["embedding.weight"][TOKENS[0]]
    norms = {f"residual.{kind}.{k}.weight": torch.ones(config.d_model) for kind in ("norms", "outer_norms") for k in range(4)}
    w = with_outputs_times(0, w) | norms
    centred = embedding - embedding.mean(-1, keepdim=True)
    assert_near(deepnorm.logits(w, TOKENS, config), ops.head(w, list(centred), config)[None], 1e-12)
    assert_near(keel.logits(w, TOKENS, config), ops.head(w, list(embedding), config)[None], 1e-12)


def test_deepnorm_and_keel_divide_their_branches_by_alpha():
    """LN(alpha x + F) is LN(x + F / alpha); an alpha of KEEL without bound makes identities of all blocks but the first."""
    w, config = plain()
    norms = {f"residual.{kind}.{k}.weight": 1 + 0.3 * random(config.d_model) for kind in ("norms", "outer_norms") for k in range(4)}
    alpha = math.sqrt(2)
    x, divided = list(w["embedding.weight"][TOKENS[0]]), with_outputs_times(1 / alpha, w)
    for k in range(4):
        terms = zip(x, ops.bare(divided, k, x, config), strict=True)
        x = [ops.layer_norm(vector + term, norms[f"residual.norms.{k}.weight"], config.norm_eps) for vector, term in terms]
    assert_near(deepnorm.logits(w | norms, TOKENS, config), ops.head(w, x, config)[None], 1e-12)

    norms |= {f"residual.outer_norms.{k}.weight": torch.ones(config.d_model) for k in (2, 3)}
    x = list(w["embedding.weight"][TOKENS[0]])
    for k in (0, 1):
        x = [vector + term for vector, term in zip(x, ops.sublayer(w, k, x, config), strict=True)]
    x = [ops.norm(vector, norms["residual.outer_norms.1.weight"], config.norm_eps) for vector in x]
    assert_near(keel.logits(w | norms, TOKENS, config, alpha=1e15), ops.head(w, x, config)[None], 1e-12)


def test_moda_of_one_block_is_pre_ln_and_of_two_is_not():
    w, config = plain(n_layer=1)
    assert_near(moda.logits(w, TOKENS, config), pre_ln.logits(w, TOKENS, config), 1e-12)
    w, config = plain()
    w |= {f"blocks.0.feed_forward.core.depth_{kind}_proj.weight": random(8, 16) for kind in "kv"}
    assert (moda.logits(w, TOKENS, config) - pre_ln.logits(w, TOKENS, config)).abs().max() > 1e-3


def test_rotated_depth_keys_meet_the_query_at_its_own_position(monkeypatch):
    """Nothing but distances is left then: the logits stay when all positions move on by five. Unrotated keys see them move."""
    w, config = plain()
    w |= {f"blocks.0.feed_forward.core.depth_{kind}_proj.weight": random(8, 16) for kind in "kv"}
    before = {rotate: moda.logits(w, TOKENS, config, rotate_depth_keys=rotate) for rotate in (True, False)}
    rotated = ops.rotated
    monkeypatch.setattr(ops, "rotated", lambda x, position: rotated(x, position + 5))
    assert_near(moda.logits(w, TOKENS, config, rotate_depth_keys=True), before[True], 1e-12)
    assert (moda.logits(w, TOKENS, config, rotate_depth_keys=False) - before[False]).abs().max() > 1e-3
