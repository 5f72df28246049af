"""From an experiment to a plan: counts, the run id, and refusals."""

from dataclasses import replace

import pytest

from depthbench.errors import UserError
from depthbench.training.plan import Experiment, batching, resolve, run_row


@pytest.fixture
def asked(tiny_corpus):
    return Experiment(size="pico", corpus=str(tiny_corpus), tokens=100_000)


def test_three_counts_stay_apart(asked):
    plan = resolve(replace(asked, micro_batch=4))
    assert (plan.batch_tokens, plan.sequences_per_step, plan.micro_batch, plan.accumulation) == (2048, 16, 4, 4)
    assert (plan.steps, plan.tokens) == (48, 48 * 2048)  # 100,000 tokens hold 48 whole steps


def test_max_steps_only_stops_early(asked):
    assert resolve(asked, max_steps=5).last_step == 5
    assert resolve(asked, max_steps=5).steps == resolve(asked).steps
    assert resolve(asked, max_steps=10_000).last_step == 48
    assert resolve(asked, max_steps=-1).last_step == 48


@pytest.mark.parametrize("change", [{"ratio": 3.7}, {"seed": 7}, {"lr": 1e-3}, {"tokens": 50_000}, {"batch_tokens": 4096}])
def test_what_decides_the_result_decides_the_id(asked, change):
    assert resolve(replace(asked, **change)).run_id != resolve(asked).run_id


def test_max_steps_and_precision_decide_too(asked):
    assert len({resolve(asked).run_id, resolve(asked, max_steps=5).run_id, resolve(asked, precision="bf16-mixed").run_id}) == 3


@pytest.mark.parametrize(
    "change", [{"workers": 2}, {"compile": True}, {"micro_batch": 2}, {"runs": "/elsewhere"}, {"layer_stats_every": 3}]
)
def test_how_it_is_run_does_not(asked, change):
    assert resolve(replace(asked, **change)).run_id == resolve(asked).run_id


def test_options_that_differ_from_the_designs_defaults_decide_and_its_defaults_do_not(asked):
    keel = replace(asked, arch="keel")
    options = ({}, {"alpha": None}, {"alpha": 3}, {"alpha": 3.0}, {"alpha": "3"})
    ids = [resolve(replace(keel, options=given)).run_id for given in options]
    assert ids[0] == ids[1] and ids[2] == ids[3] == ids[4] and ids[0] != ids[2]


def test_the_row_and_the_plan_hold_the_options(asked):
    plan = resolve(replace(asked, arch="keel", options={"alpha": "3"}))
    assert plan.options == {"alpha": 3.0}
    assert (run_row(plan)["options"], run_row(plan)["recipe"]) == ('{"alpha": 3.0}', "paper")
    assert run_row(resolve(replace(asked, arch="keel")))["options"] == "{}"


def test_the_reference_recipe_sets_options_and_a_users_own_win(asked):
    reference = replace(asked, arch="full_attnres", recipe="reference")
    assert resolve(reference).options == {"mix_eps": 1e-5}
    assert resolve(replace(reference, options={"mix_eps": 1e-7})).options == {"mix_eps": 1e-7}
    assert resolve(replace(asked, arch="full_attnres")).options == {"mix_eps": None}
    assert resolve(reference).recipe.decay_vectors and not resolve(asked).recipe.decay_vectors


def test_a_designs_own_flops_count(asked):
    plain, ours = resolve(asked), resolve(replace(asked, arch="hc"))
    assert ours.flops_per_token - plain.flops_per_token == pytest.approx(3 * ours.flops_extra / 128) and ours.flops_extra > 0


def test_the_id_reads_as_what_it_is(asked):
    assert resolve(asked).run_id.startswith("pre_ln-pico-L9-d52-lr4e-3-s42-")


def test_the_run_row_describes_the_model_that_is_built(asked):
    from depthbench.training.fit import build

    plan = resolve(replace(asked, ratio=3.7))
    row = run_row(plan)
    model = build(plan)
    assert row["params_total"] == sum(p.numel() for p in model.parameters())
    assert row["ratio"] == row["d_model"] / row["n_layer"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arch": "pre_nl"}, "did you mean 'pre_ln'"),
        ({"size": "nanno"}, "did you mean 'nano'"),
        ({"recipe": "papr"}, "did you mean 'paper'"),
        ({"budget": "totl"}, "did you mean 'total'"),
        ({"options": {"alpha": 2}}, "unknown option 'alpha': PreLN takes none"),
        ({"arch": "keel", "options": {"alfa": 2}}, "unknown option 'alfa': did you mean 'alpha'"),
        ({"arch": "keel", "options": {"alpha": "deep"}}, "alpha cannot be 'deep': give a number or null"),
        ({"arch": "hc", "options": {"streams": 0}}, "streams is 0"),
        ({"arch": "hc", "options": {"streams": 2.5}}, "streams cannot be 2.5: give a whole number"),
        ({"arch": "hc", "options": {"dynamic": 1}}, "dynamic cannot be 1: give true or false"),
        ({"ratio": 0.0}, "ratio must be a positive number"),
        ({"ratio": float("nan")}, "ratio must be a positive number"),
        ({"ratio": 900.0}, "nearest reachable"),
        ({"tokens": 0}, "--tokens must be a positive number"),
        ({"tokens": 100}, "less than one step of 2048 tokens"),
        ({"lr": -1.0}, "--lr must be a positive number"),
        ({"lr": float("inf")}, "--lr must be a positive number"),
        ({"batch_tokens": 1000}, "not a multiple of the sequence length 128: use 896"),
        ({"micro_batch": 5}, "does not divide the 16 sequences"),
        ({"seed": -1}, "--seed cannot be negative"),
        ({"workers": -1}, "--workers cannot be negative"),
        ({"layer_stats_every": -5}, "--layer-stats-every cannot be negative"),
        ({"validations": 0}, "--validations must be a positive number"),
        ({"seq_len": 64, "batch_tokens": 2048}, "64"),
        ({"size": "nano", "seq_len": 128}, "2048"),
    ],
)
def test_refusals_are_one_line(asked, change, says):
    with pytest.raises(UserError) as error:
        resolve(replace(asked, **change))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("steps", [0, -2])
def test_max_steps_that_train_nothing(asked, steps):
    with pytest.raises(UserError, match="trains nothing"):
        resolve(asked, max_steps=steps)


def test_max_steps_beyond_the_plan_name_the_same_run(asked):
    assert resolve(asked, max_steps=48).run_id == resolve(asked, max_steps=1000).run_id == resolve(asked).run_id


def test_all_shapes_validate_on_the_same_tokens(asked):
    from depthbench.training.fit import data_module

    wide, deep = (data_module(resolve(replace(asked, ratio=ratio))).val_dataset() for ratio in (18, 1.8))
    assert len(wide) == len(deep) and all(wide[i].equal(deep[i]) for i in range(len(wide)))


def test_a_corpus_that_is_not_there_names_the_command(asked):
    with pytest.raises(UserError, match="depthbench data prepare"):
        resolve(replace(asked, corpus="/no/such/corpus"))


def test_the_batch_is_shared_by_all_processes():
    assert batching(2048, 128, None, at_most=16, world_size=1) == (16, 16)
    assert batching(2048, 128, None, at_most=16, world_size=4) == (16, 4)
    assert batching(2048, 128, None, at_most=5, world_size=1) == (16, 4)
    with pytest.raises(UserError, match="cannot be shared by 3 processes"):
        batching(2048, 128, None, at_most=16, world_size=3)
