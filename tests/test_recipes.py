"""The paper's recipe against its published figures, and the learning rate of each design."""

from __future__ import annotations

import json

import pytest

from depthbench.errors import UserError
from depthbench.recipes import learning_rate, recipe
from depthbench.resources import resource
from depthbench.shapes import sizes

PAPER = json.loads(resource("conf", "paper.json").read_text(encoding="utf-8"))


def test_the_paper_recipe_is_the_published_one():
    published, schedule, ours = PAPER["optimizer"], PAPER["schedule"], recipe()
    assert ours == recipe("paper")
    assert list(ours.betas) == published["betas"] == [0.9, 0.95]
    for name in ("eps", "weight_decay", "max_grad_norm"):
        assert getattr(ours, name) == published[name]
    assert (ours.warmup_fraction, ours.final_lr_fraction) == (schedule["warmup_fraction"], schedule["final_lr_fraction"]) == (0.1, 0.1)
    assert (ours.init_std, ours.init_cutoff, ours.norm_eps) == (0.02, 3.0, 1e-6)


def test_every_value_is_a_number():
    # YAML reads 1e-8 without a dot as text.
    values = [value for name, value in vars(recipe()).items() if name not in ("name", "betas", "decay_vectors")]
    assert all(isinstance(value, float) for value in [*values, *recipe().betas])
    assert all(isinstance(size.lr, float) for size in sizes().values())


@pytest.mark.parametrize("size", ["200m", "300m", "400m", "500m", "1600m"])
@pytest.mark.parametrize("arch", list(PAPER["learning_rates"]))
def test_published_learning_rates(size, arch):
    assert learning_rate(size, arch) == PAPER["learning_rates"][arch]


def test_an_unlisted_design_or_size_falls_back_to_the_sizes_own():
    assert learning_rate("400m", "my_module.MyDesign") == 2e-3
    assert learning_rate("nano", "lns") == learning_rate("nano", "pre_ln") == sizes()["nano"].lr


def test_unknown_names():
    with pytest.raises(UserError, match="unknown recipe 'papre': did you mean 'paper'"):
        recipe("papre")
    with pytest.raises(UserError, match="unknown recipe 'papre'"):
        learning_rate("nano", "pre_ln", "papre")
    with pytest.raises(UserError, match="unknown size 'nanno'"):
        learning_rate("nanno", "pre_ln")
