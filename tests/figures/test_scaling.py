"""Loss against aspect ratio: means, best learning rates, differences."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from depthbench.figures import palette, scaling


def run(arch="pre_ln", n_layer=4, d_model=128, lr=1e-3, seed=0, loss=3.0, **more) -> dict:
    return {
        "run_id": f"{arch}-{n_layer}-{lr}-{seed}",
        "arch": arch,
        "n_layer": n_layer,
        "d_model": d_model,
        "ratio": d_model / n_layer,
        "size": "nano",
        "budget": "total",
        "params_total": 2_000_000,
        "params_backbone": 1_400_000,
        "budget_params": 2_000_000,
        "lr": lr,
        "seed": seed,
        "status": "finished",
        "created_at": pd.Timestamp("2026-01-01"),
        "val_loss_best": loss,
        "val_loss": loss + 0.1,
        "tokens_planned": 1_000_000,
        "tokens_done": 1_000_000,
        "batch_tokens": 1024,
        "seq_len": 256,
        "precision": "32-true",
        "tokenizer": "bpe-2048",
        "corpus_fingerprint": "0123456789abcdef",
    } | more


def test_a_point_is_the_mean_over_seeds_with_their_sample_deviation():
    row = scaling.points(pd.DataFrame([run(seed=0, loss=3.0), run(seed=1, loss=3.2), run(seed=2, loss=3.4)])).iloc[0]
    assert row["loss"] == pytest.approx(3.2)
    assert row["sd"] == pytest.approx(0.2)
    assert (row["n"], row["n_runs"], row["seeds"]) == (3, 3, "0, 1, 2")
    assert row["runs"] == "pre_ln-4-0.001-0, pre_ln-4-0.001-1, pre_ln-4-0.001-2"


def test_options_of_a_design_are_a_line_of_their_own():
    frame = pd.DataFrame([run("hc", options="{}"), run("hc", options='{"streams": 2}', loss=2.9), run("hc", n_layer=8, options=None)])
    points = scaling.points(frame)
    assert list(points["arch"]) == ["hc", "hc", "hc streams=2"] and list(points["n_layer"]) == [4, 8, 4]
    traces = {trace.name: trace for trace in scaling.figure(points).data}
    assert traces["hc"].line.color == traces["hc streams=2"].line.color == palette.color("hc")
    assert traces["hc"].marker.symbol != traces["hc streams=2"].marker.symbol


def test_another_recipe_is_not_compared_with():
    both = scaling.recipes(pd.DataFrame([run(recipe="paper"), run(recipe="reference")]))
    assert list(both) == ["recipe paper", "recipe reference"]


def test_each_point_takes_its_best_learning_rate_by_the_mean_over_seeds():
    frame = pd.DataFrame(
        [
            run(lr=1e-3, seed=0, loss=3.0),
            run(lr=1e-3, seed=1, loss=3.2),
            run(lr=2e-3, seed=0, loss=2.9),  # the single best run, but the worse mean
            run(lr=2e-3, seed=1, loss=3.6),
            run(n_layer=8, lr=2e-3, loss=2.5),
        ]
    )
    points = scaling.points(frame)
    assert list(points["lr"]) == [1e-3, 2e-3]
    assert list(points["n_lr"]) == [2, 1]
    assert points["loss"].iloc[0] == pytest.approx(3.1)
    assert scaling.points(frame, lr=2e-3)["loss"].iloc[0] == pytest.approx(3.25)


def test_best_and_last_loss_are_different_columns():
    frame = pd.DataFrame([run(loss=3.0)])
    assert scaling.points(frame, loss="best")["loss"].iloc[0] == pytest.approx(3.0)
    assert scaling.points(frame, loss="last")["loss"].iloc[0] == pytest.approx(3.1)


def test_losses_that_are_not_finite_do_not_enter_the_mean_and_are_counted():
    frame = pd.DataFrame([run(seed=0, loss=3.0), run(seed=1, loss=np.nan), run(seed=2, loss=np.inf), run(n_layer=8, loss=np.nan)])
    points = scaling.points(frame)
    assert len(points) == 1  # eight layers have no finite loss at all
    assert (points["loss"].iloc[0], points["n"].iloc[0], points["n_runs"].iloc[0]) == (3.0, 1, 3)
    assert np.isnan(points["sd"].iloc[0])


def test_of_a_repeated_run_the_newest_counts():
    frame = pd.DataFrame([run(loss=2.0, created_at=pd.Timestamp("2026-01-03")), run(loss=9.0, created_at=pd.Timestamp("2026-01-02"))])
    points = scaling.points(frame)
    assert (points["loss"].iloc[0], points["n"].iloc[0]) == (2.0, 1)


def test_no_runs_make_no_points():
    assert scaling.points(pd.DataFrame([run()]).iloc[:0]).empty


def test_a_run_is_complete_when_it_saw_its_planned_tokens():
    frame = pd.DataFrame([run(), run(status="running"), run(tokens_done=20_000), run(tokens_done=None), run(status="diverged")])
    assert list(scaling.complete(frame)) == [True, False, False, False, False]


def test_recipes_differ_exactly_where_the_recipe_does():
    frame = pd.DataFrame([run(), run(seed=1), run(tokens_planned=2_000_000), run(seq_len=128)])
    texts = list(scaling.recipes(frame))
    assert texts[0] == texts[1] == "1M tokens · length 256"
    assert texts[2:] == ["2M tokens · length 256", "1M tokens · length 128"]
    assert list(scaling.recipes(frame.iloc[:2])) == ["1M tokens"] * 2
    assert list(scaling.recipes(pd.DataFrame([run(), run(tokens_planned=1_000_001)]))) == ["1M tokens", "1.000001M tokens"]
    assert list(scaling.recipes(pd.DataFrame([run(), run(batch_tokens=2048)]))) == ["batch 1024", "batch 2048"]


def test_a_run_stopped_early_is_told_from_one_that_did_not_end():
    frame = pd.DataFrame([run(), run(tokens_done=2_000), run(status="running", tokens_done=2_000)])
    assert list(scaling.stopped_early(frame)) == [False, True, False]


def test_a_model_over_its_budget_is_marked_in_the_hover():
    points = scaling.points(pd.DataFrame([run(), run(n_layer=8, params_total=2_142_000)]))
    (line,) = scaling.figure(points).data
    assert "%{customdata[8]}" in line.hovertemplate
    assert [row[8] for row in line.customdata] == [" · 7.1 % over the budget", ""]


def test_deltas_are_taken_from_each_designs_own_base_shape():
    frame = pd.DataFrame(
        {"arch": ["a", "a", "b", "b", "c"], "ratio": [32.0, 8.0, 30.0, 8.0, 8.0], "loss": [3.0, 2.9, 4.0, 4.2, 1.0]}, index=[5, 1, 2, 3, 4]
    )
    got = scaling.deltas(frame, 32.0)
    assert list(got["arch"]) == ["a", "a", "b", "b"]  # c has no shape within 15 % of ratio 32
    np.testing.assert_allclose(got["delta"], [0.0, -0.1, 0.0, 0.2], atol=1e-12)
    assert scaling.deltas(frame, 1000.0).empty
    assert "delta" in scaling.deltas(frame, 1000.0)


def test_the_reference_is_figure_2_without_what_was_not_published():
    paper = scaling.paper_points()
    assert len(paper) == 10 * 5 + 2 * 2  # ten designs at five shapes, and two of them at two deeper ones
    assert scaling.paper_base_ratio() == 42.67
    delta = scaling.deltas(paper, scaling.paper_base_ratio()).set_index(["arch", "n_layer"])["delta"]
    assert delta["pre_ln", 24] == 0
    assert delta["pre_ln", 32] == pytest.approx(2.782 - 2.765)
    assert delta["full_attnres", 70] == pytest.approx(2.702 - 2.726)


def test_the_figure_draws_one_line_per_design_with_bars_where_there_are_seeds():
    frame = pd.DataFrame(
        [run(loss=3.0), run(seed=1, loss=3.2), run(n_layer=16, loss=2.8), run("hc", loss=2.9), run("hc", n_layer=16, loss=2.7)]
    )
    figure = scaling.figure(scaling.points(frame))
    hc, pre_ln = figure.data
    assert (hc.name, pre_ln.name) == ("hc", "pre_ln")
    assert (hc.line.color, pre_ln.marker.symbol) == (palette.color("hc"), palette.symbol("pre_ln"))
    assert list(pre_ln.x) == [8.0, 32.0]
    np.testing.assert_allclose(pre_ln.y, [2.8, 3.1])
    assert np.isnan(pre_ln.error_y.array[0]) and pre_ln.error_y.array[1] == pytest.approx(np.std([3.0, 3.2], ddof=1))
    assert hc.error_y.array is None
    assert figure.layout.xaxis.type == "log" and "to the right" in figure.layout.xaxis.title.text
    assert "nats per token" in figure.layout.yaxis.title.text
    assert {8, 16, 32} <= set(figure.layout.xaxis.tickvals)
    low, high = 10 ** np.array(figure.layout.xaxis.range)
    assert low < 8 and high > 32


def test_a_single_point_has_ticks_around_it_and_no_points_are_an_empty_figure():
    points = scaling.points(pd.DataFrame([run(d_model=23)]))
    axis = scaling.figure(points).layout.xaxis
    low, high = 10 ** np.array(axis.range)
    assert sum(low <= tick <= high for tick in axis.tickvals) == 4
    assert not scaling.figure(points.iloc[:0]).data


def test_a_single_point_is_shown_within_tenths_of_a_nat_and_with_its_bar():
    alone = scaling.figure(scaling.points(pd.DataFrame([run(loss=3.0)])))
    np.testing.assert_allclose(alone.layout.yaxis.range, [2.9, 3.1])
    spread = scaling.figure(scaling.points(pd.DataFrame([run(loss=3.0), run(seed=1, loss=4.0)])))
    low, high = spread.layout.yaxis.range
    assert low < 3.5 - 0.5**0.5 and high > 3.5 + 0.5**0.5


def test_the_overlay_shows_differences_only():
    points = scaling.points(pd.DataFrame([run(loss=3.0), run(n_layer=16, loss=2.8)]))
    reference = scaling.deltas(scaling.paper_points(), scaling.paper_base_ratio())
    with pytest.raises(ValueError, match="differences"):
        scaling.figure(points, paper=reference)
    with pytest.raises(ValueError, match="differences"):
        scaling.figure(scaling.deltas(points, 32.0), paper=scaling.paper_points())
    figure = scaling.figure(scaling.deltas(points, 32.0), paper=reference)
    ours, *theirs = figure.data
    np.testing.assert_allclose(ours.y, [-0.2, 0.0], atol=1e-12)
    assert {trace.line.dash for trace in theirs} == {"dash"}
    assert max(abs(y) for trace in theirs for y in trace.y) < 0.06  # no absolute loss of another size gets onto the axis
    assert "minus that of the base shape" in figure.layout.yaxis.title.text
