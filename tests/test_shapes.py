"""The solver against every row of the paper's tables and a brute-force search; counts and costs by hand."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import pytest

from depthbench.errors import UserError
from depthbench.resources import resource
from depthbench.shapes import (
    Shape,
    flops_per_token_train,
    kv_cache_bytes,
    over_budget,
    prefill_flops,
    size_named,
    sizes,
    solve_shape,
)

PAPER = json.loads(resource("conf", "paper.json").read_text(encoding="utf-8"))
PAPER_SIZES = ("200m", "300m", "400m", "500m", "1600m")


def paper_rows() -> list[tuple[str, str, dict]]:
    """(size, kind of budget, row) of every published shape."""
    tables = PAPER["shapes"]
    return [
        *(("400m", "total", row) for row in tables["400m_total"]),
        *((size, "backbone", row) for row in tables["300m_backbone"] for size in ("300m", "400m")),
        *((row["size"], "total", row) for row in tables["ladder"]),
        *(("1600m", "total", row) for row in tables["1600m"]["rows"]),
    ]


@pytest.mark.parametrize(
    ("size", "budget", "row"), paper_rows(), ids=lambda value: value if isinstance(value, str) else str(value["n_layer"])
)
def test_every_published_shape_comes_out_of_size_budget_and_ratio(size, budget, row):
    shape = solve_shape(size, row["ratio"], budget)
    assert {key: getattr(shape, key) for key in ("n_layer", "d_model", "d_ff", "head_dim")} == {
        key: row[key] for key in ("n_layer", "d_model", "d_ff", "head_dim")
    }
    assert round(shape.ratio, 2) == row["ratio"]
    # The published millions are rounded, now and then up where nearest is down: 26 x 1120 counts 504.53 and is printed as 504.
    assert abs(shape.params_backbone / 1e6 - row["backbone_m"]) < 0.55
    assert abs(shape.params_total / 1e6 - row["total_m"]) < 0.55


def test_the_shipped_tables_are_complete():
    assert len(PAPER["shapes"]["400m_total"]) == 7 and len(PAPER["shapes"]["300m_backbone"]) == 6
    assert len(PAPER["shapes"]["ladder"]) == 12 and len(PAPER["shapes"]["1600m"]["rows"]) == 3


@pytest.mark.parametrize(
    ("size", "ratio", "budget", "expected"),
    [
        ("400m", 76, "total", (16, 1216, 76, 3248)),
        ("400m", 9.14, "total", (70, 640, 40, 1712)),
        ("300m", 6.48, "backbone", (84, 544, 34, 1456)),
        ("200m", 74.67, "total", (12, 896, 56, 2400)),
        ("500m", 43.08, "total", (26, 1120, 70, 2992)),
        ("1600m", 27.85, "total", (54, 1504, 94, 4512)),
    ],
)
def test_published_shapes_written_out(size, ratio, budget, expected):
    shape = solve_shape(size, ratio, budget)
    assert (shape.n_layer, shape.d_model, shape.head_dim, shape.d_ff) == expected


def test_budgets():
    assert size_named("300m").budgets["backbone"] == size_named("400m").budgets["backbone"] == 302_432_256
    assert size_named("400m").budgets["total"] == 405_406_720
    assert size_named("300m").budgets["total"] == 293_052_032
    assert size_named("nano").budgets["total"] == 2_000_000
    assert size_named("pico").budgets["total"] == 340_000


@pytest.mark.parametrize("name", PAPER_SIZES)
def test_paper_sizes_hold_the_papers_recipe(name):
    size = size_named(name)
    table = {"1600m": PAPER["shapes"]["1600m"]["rows"]}.get(name) or [row for row in PAPER["shapes"]["ladder"] if row["size"] == name]
    base = next(row for row in table if row.get("base"))
    assert size.base == (base["n_layer"], base["d_model"]) and size.ratio == base["ratio"]
    assert {row["ratio"] for row in table} <= set(size.ratios)
    assert (size.vocab_size, size.seq_len, size.n_head) == (PAPER["vocab_size"], PAPER["sequence_length"], PAPER["shape_rule"]["heads"])
    assert size.n_kv_head == (8 if name == "1600m" else 16)
    assert size.batch_tokens == PAPER["global_batch_sequences"] * PAPER["sequence_length"]
    assert size.tokens == PAPER["budgets_tokens"][name]
    assert size.lr == PAPER["learning_rates"]["pre_ln"]
    assert (size.corpus, size.tokenizer) == ("fineweb-edu", "olmo")


@pytest.mark.parametrize("name", list(sizes()))
@pytest.mark.parametrize("budget", ["total", "backbone"])
def test_every_ladder_is_reachable_and_falls(name, budget):
    size = size_named(name)
    shapes = [solve_shape(size, ratio, budget) for ratio in size.ladder(budget)]
    assert [shape.n_layer for shape in shapes] == sorted({shape.n_layer for shape in shapes})
    for shape in shapes:
        assert abs(shape.params(budget) / size.budgets[budget] - 1) <= size.tolerance
        assert shape.d_model == shape.n_head * shape.head_dim and shape.head_dim % 2 == 0
        assert shape.vocab_size == size.vocab_size and shape.n_head % shape.n_kv_head == 0


@pytest.mark.parametrize("name", list(sizes()))
def test_batches_divide(name):
    size = size_named(name)
    assert size.batch_tokens % (size.micro_batch * size.seq_len) == 0
    assert size.val_tokens % size.seq_len == 0
    assert size.ratio in size.ratios


def test_small_sizes_come_out_as_documented():
    layers = [solve_shape("nano", ratio).n_layer for ratio in (64, 32, 16, 8, 4)]
    assert layers[:4] == [3, 5, 8, 13] and layers[4] in (20, 21)
    pico = [solve_shape("pico", ratio) for ratio in (18, 5.8, 1.8)]
    assert [(shape.n_layer, shape.d_model) for shape in pico] == [(4, 72), (9, 52), (20, 36)]
    assert solve_shape() == solve_shape("nano", 32)


TARGETS = {
    ("nano", "total"): 2_000_000,
    ("nano", "backbone"): 1_412_080,
    ("pico", "total"): 340_000,
    ("400m", "total"): 405_406_720,
    ("400m", "backbone"): 302_432_256,
    ("1600m", "total"): 1_615_349_760,
}


def brute_force(size, ratio, budget, tolerance, extra):
    """(n_layer, d_model) by looking at every shape, from the rules alone; None where the nearest is too far away."""
    target = TARGETS[size, budget]
    heads, kv_heads, vocabulary = {"nano": (2, 2, 2048), "pico": (2, 2, 512), "400m": (16, 16, 50280), "1600m": (16, 8, 50280)}[size]
    found = []
    for head_dim in range(2, 1000, 2):
        d = heads * head_dim
        ff = 3 * d if size == "1600m" else math.ceil(8 * d / 3 / 16) * 16
        per_layer = 2 * d * heads * head_dim + 2 * d * kv_heads * head_dim + 3 * d * ff + 2 * d
        outside = 2 * vocabulary * d + d if budget == "total" else 0
        n_layer = max(1, math.floor((target * (1 - tolerance) - outside) / (per_layer + extra(1, d))))
        while n_layer * per_layer + outside + extra(n_layer, d) <= target * (1 + tolerance):
            count = n_layer * per_layer + outside + extra(n_layer, d)
            if count >= target * (1 - tolerance):
                found.append((round(abs(math.log(d / n_layer / ratio)), 4), abs(count - target), d, n_layer))
            n_layer += 1
    _, _, d, n_layer = min(found)
    return (n_layer, d) if abs(d / n_layer / ratio - 1) <= 0.15 else None


def nothing(n_layer, d):
    return 0


def hyper_connections(n_layer, d):
    return 2 * n_layer * (24 * (4 * d + 1) + 3)


@pytest.mark.parametrize("extra", [nothing, hyper_connections])
@pytest.mark.parametrize("tolerance", [0.035, 0.06])
@pytest.mark.parametrize(("size", "budget"), TARGETS)
def test_the_solver_finds_what_brute_force_finds(size, budget, tolerance, extra):
    rng = random.Random(f"{size}{budget}{tolerance}{extra.__name__}")
    # Down to thousands of thin layers, where many shapes tie in the rounded distance and the budget decides.
    for ratio in [math.exp(rng.uniform(math.log(0.0005), math.log(400))) for _ in range(6)] + [rng.uniform(4, 80) for _ in range(4)]:
        params_extra = None if extra is nothing else (lambda shape: extra(shape.n_layer, shape.d_model))
        try:
            shape = solve_shape(size, ratio, budget, tolerance, params_extra)
            solved = shape.n_layer, shape.d_model
        except UserError:
            solved = None
        assert solved == brute_force(size, ratio, budget, tolerance, extra), ratio


def test_ties_are_broken_by_the_budget():
    # At a ratio of 4 / 7500 the neighbours 7500 ± 1 are nearer than the fourth decimal can tell.
    shape = solve_shape("nano", 4 / 7500.4)
    target = 2_000_000
    neighbours = [size_named("nano").shape(n_layer, 4) for n_layer in (shape.n_layer - 1, shape.n_layer, shape.n_layer + 1)]

    def distance(candidate):
        return round(abs(math.log(candidate.ratio / (4 / 7500.4))), 4), abs(candidate.params_total - target)

    assert min(neighbours, key=distance) == shape and shape.n_layer != 7500


def test_solving_with_a_designs_own_parameters():
    def extra(shape: Shape) -> int:
        return round(0.16 * shape.params_backbone)

    plain = solve_shape("400m", 28)
    counted = solve_shape("400m", 28, params_extra=extra)
    assert over_budget(plain, "400m", extra(plain)) and not over_budget(plain, "400m")
    assert abs((counted.params_total + extra(counted)) / 405_406_720 - 1) <= 0.035 and not over_budget(counted, "400m", extra(counted))


@pytest.mark.parametrize("ratio", [0, -3, math.nan, math.inf, "wide", "", [32]])
def test_a_ratio_that_is_not_a_positive_number_is_refused(ratio):
    with pytest.raises(UserError, match="^ratio must be a positive number, not "):
        solve_shape("nano", ratio)


@pytest.mark.parametrize("ratio", [1000, 1e300, 1e-5, 5e-324])
def test_a_ratio_out_of_reach_names_the_nearest(ratio):
    with pytest.raises(
        UserError, match=r"no nano shape within 3.5 % of 2,000,000 parameters .* nearest reachable is [\d.e-]+ \(\d+ x \d+\)"
    ) as error:
        solve_shape("nano", ratio)
    assert "\n" not in str(error.value)
    nearest = float(str(error.value).split("nearest reachable is ")[1].split()[0])
    assert solve_shape("nano", nearest).ratio == pytest.approx(nearest, rel=1e-3)


def test_fifteen_percent_is_the_limit():
    widest = solve_shape("nano", 276)
    assert widest.n_layer == 1
    assert solve_shape("nano", widest.ratio / 0.851) == widest
    with pytest.raises(UserError, match="nearest reachable is 276 "):
        solve_shape("nano", widest.ratio / 0.849)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "nanno"}, "unknown size 'nanno': did you mean 'nano'?"),
        ({"budget": "backbon"}, "unknown budget 'backbon': did you mean 'backbone'?"),
        ({"tolerance": 0}, "tolerance must be a positive number, not 0"),
        ({"tolerance": 3.5}, "tolerance must be a fraction below 1, not 3.5"),
        ({"tolerance": 1e-9}, "there is no nano shape within 1e-07 % of 2,000,000 parameters"),
    ],
)
def test_other_mistakes_are_one_line(arguments, message):
    with pytest.raises(UserError) as error:
        solve_shape(**arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


TWO_LAYERS = Shape(n_layer=2, d_model=8, n_head=4, n_kv_head=2, head_dim=2, d_ff=16, vocab_size=10)


def test_counts_by_hand():
    # Per layer: queries and output 2 x 8 x 8, keys and values 2 x 8 x 4, feed-forward 3 x 8 x 16, norms 2 x 8.
    assert TWO_LAYERS.params_matrices == 2 * (128 + 64 + 384)
    assert TWO_LAYERS.params_backbone == 2 * (128 + 64 + 384 + 16)
    assert TWO_LAYERS.params_total == TWO_LAYERS.params_backbone + 8 + 2 * 10 * 8
    assert TWO_LAYERS.ratio == 4.0


def test_costs_by_hand():
    # Three tokens: positions see 1 + 2 + 3 keys; scores and values each 2 FLOPs per key, head and head width.
    attention = 2 * (1 + 2 + 3) * 2 * 8 * 2
    assert prefill_flops(TWO_LAYERS, 3) == 2 * 3 * TWO_LAYERS.params_matrices + attention
    assert 3 * flops_per_token_train(TWO_LAYERS, 3) == 3 * (prefill_flops(TWO_LAYERS, 3) + 2 * 3 * 80)
    assert kv_cache_bytes(TWO_LAYERS, 3) == 2 * 2 * (2 * 2) * 3 * 2
    assert kv_cache_bytes(TWO_LAYERS, 3, bytes_per_value=4) == 2 * kv_cache_bytes(TWO_LAYERS, 3)


@pytest.mark.parametrize("ratio", ["76.0", "9.14"])
def test_prefill_is_the_papers_with_the_head_left_out(ratio):
    shape = solve_shape("400m", float(ratio))
    published = PAPER["cost_T4096"]["prefill_tflops_per_sequence"][ratio] * 1e12
    flops = prefill_flops(shape, 4096)
    assert abs(flops / published - 1) < 0.02
    assert abs((flops + 2 * 4096 * shape.params_embedding) / published - 1) > 0.02


def test_the_kv_cache_more_than_doubles_from_wide_to_deep():
    assert kv_cache_bytes(solve_shape("400m", 9.14), 4096) > 2 * kv_cache_bytes(solve_shape("400m", 76), 4096)


def test_model_kwargs():
    kwargs = solve_shape("1600m", 73.14).model_kwargs()
    assert kwargs == {"n_layer": 28, "d_model": 2048, "n_head": 16, "n_kv_head": 8, "d_ff": 6144, "vocab_size": 50280}


def test_neither_shapes_nor_recipes_nor_the_verb_import_torch():
    code = "import sys, depthbench.shapes as s, depthbench.recipes, depthbench.verbs.shapes; s.solve_shape(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
