"""Loss curves: what is drawn is what was recorded."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from depthbench.figures import curves, palette


def scalars(run_id: str, values: list[float], name: str = "train/loss") -> pd.DataFrame:
    steps = np.arange(1, len(values) + 1)
    return pd.DataFrame({"run_id": run_id, "name": name, "step": steps, "tokens": steps * 1024, "wall_s": steps * 0.5, "value": values})


def runs(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame([{"size": "nano", "lr": 1e-3, "seed": 0} | row for row in rows])


TWO = runs({"run_id": "a", "arch": "pre_ln", "ratio": 32.0}, {"run_id": "b", "arch": "hc", "ratio": 8.0})


@pytest.mark.parametrize(("x", "expected"), [("step", [1, 2, 3]), ("tokens", [1024, 2048, 3072]), ("wall_s", [0.5, 1.0, 1.5])])
def test_a_line_holds_the_recorded_values_over_the_chosen_axis(x, expected):
    figure = curves.figure(pd.concat([scalars("a", [5, 4, 3]), scalars("b", [6, 5, 4])]), TWO, x=x)
    assert [list(trace.x) for trace in figure.data] == [expected, expected]
    assert [list(trace.y) for trace in figure.data] == [[5, 4, 3], [6, 5, 4]]
    assert [trace.line.color for trace in figure.data] == [palette.color("pre_ln"), palette.color("hc")]
    assert figure.layout.xaxis.title.text == curves.X_AXES[x]


def test_lines_follow_steps_even_if_rows_do_not():
    figure = curves.figure(scalars("a", [5, 4, 3]).iloc[::-1], TWO)
    assert list(figure.data[0].x) == [1, 2, 3]
    assert list(figure.data[0].y) == [5, 4, 3]


def test_log_axes_are_said_in_the_titles():
    figure = curves.figure(scalars("a", [5, 4]), TWO, log_x=True, log_y=True)
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert figure.layout.xaxis.title.text == "optimizer step, log scale"
    assert figure.layout.yaxis.title.text == "training loss (nats per token), log scale"


def test_validation_is_dotted_beside_training_and_solid_alone():
    val = scalars("a", [5, 4], "val/loss")
    both = curves.figure(pd.concat([scalars("a", [5, 4, 3]), val]), TWO)
    assert [trace.line.dash for trace in both.data] == ["solid", "dot"]
    assert [trace.showlegend for trace in both.data] == [True, False]  # one entry a run, which toggles both
    assert len({trace.legendgroup for trace in both.data}) == 1
    assert both.layout.yaxis.title.text == "loss (nats per token), validation dotted"
    assert curves.figure(val, TWO).data[0].line.dash == "solid"


def test_a_gap_stays_a_gap():
    figure = curves.figure(scalars("a", [5, np.nan, 3]), TWO, smoothing=0.5)
    raw, smoothed = figure.data
    assert np.isnan(raw.y[1]) and np.isnan(smoothed.y[1])
    assert not smoothed.connectgaps


def test_smoothing_is_the_bias_corrected_moving_average_of_finite_values():
    w = 0.5
    values = [4.0, np.nan, 2.0, np.inf, 1.0]
    got = curves.smooth(scalars("a", values), w)["smoothed"].to_numpy()
    expected = [4.0, np.nan, (2 + w * 4) / (1 + w), np.nan, (1 + w * 2 + w**2 * 4) / (1 + w + w**2)]
    np.testing.assert_allclose(got, expected)


def test_smoothing_does_not_leak_between_runs_and_keeps_the_spike_in_sight():
    frame = pd.concat([scalars("a", [1.0, 1.0, 50.0, 1.0]), scalars("b", [7.0, 7.0])], ignore_index=True)
    figure = curves.figure(frame, TWO, smoothing=0.9)
    raw_a, smooth_a, _, smooth_b = figure.data
    assert max(raw_a.y) == 50 and max(smooth_a.y) < 30
    assert list(smooth_b.y) == [7.0, 7.0]


def test_validation_is_never_smoothed():
    figure = curves.figure(scalars("a", [5.0, 4.0, 3.0], "val/loss"), TWO, smoothing=0.9)
    assert [list(trace.y) for trace in figure.data] == [[5.0, 4.0, 3.0]]


def test_points_reduced_by_the_store_have_a_band_that_shows_the_spike():
    reduced = scalars("a", [2.0, 3.0, 2.0]).assign(value_min=[1.0, 1.0, 1.0], value_max=[3.0, 90.0, 3.0], n=5, n_finite=5)
    band, line = curves.figure(reduced, TWO).data
    assert list(line.y) == [2.0, 3.0, 2.0]
    assert list(band.x) == [1, 2, 3, 3, 2, 1]
    assert list(band.y) == [3.0, 90.0, 3.0, 1.0, 1.0, 1.0]
    assert len(curves.figure(reduced.assign(n=1), TWO).data) == 1


def test_labels_say_only_what_differs():
    assert curves.labels(TWO) == {"a": "pre_ln · ratio 32", "b": "hc · ratio 8"}
    seeds = runs({"run_id": "a", "arch": "hc", "ratio": 8.0}, {"run_id": "b", "arch": "hc", "ratio": 8.0, "seed": 1})
    assert curves.labels(seeds) == {"a": "hc · seed 0", "b": "hc · seed 1"}


def test_labels_are_unique_even_for_equal_runs():
    twins = runs({"run_id": "hc-11112222", "arch": "hc", "ratio": 8.0}, {"run_id": "hc-33334444", "arch": "hc", "ratio": 8.0})
    assert curves.labels(twins) == {"hc-11112222": "hc · 11112222", "hc-33334444": "hc · 33334444"}


def test_a_design_with_several_runs_is_shaded():
    several = runs(*[{"run_id": str(i), "arch": "hc", "ratio": float(2**i)} for i in range(3)])
    assert [style["color"] for style in curves.styles(several).values()] == palette.shades("hc", 3)


def test_many_seeds_of_one_design_are_drawn_differently():
    seeds = runs(*[{"run_id": str(i), "arch": "pre_ln", "ratio": 32.0, "seed": i} for i in range(12)])
    figure = curves.figure(pd.concat([scalars(str(i), [3, 2, 1]) for i in range(12)]), seeds)
    assert len({(trace.line.color, trace.line.dash) for trace in figure.data}) == 12
    both = curves.figure(pd.concat([scalars(str(i), [3, 2], name) for i in range(12) for name in ("train/loss", "val/loss")]), seeds)
    dotted = [trace for trace in both.data if trace.line.dash == "dot"]
    assert len({(trace.line.color, trace.marker.symbol) for trace in dotted}) == 12  # dots are taken: markers tell them apart


def test_lines_beyond_the_cap_are_left_out_and_the_figure_says_so():
    n = curves.MAX_TRACES + 6
    many = runs(*[{"run_id": f"r{i}", "arch": "hc", "ratio": 4.0 + i} for i in range(n)])
    figure = curves.figure(pd.concat([scalars(f"r{i}", [3, 2, 1]) for i in range(n)]), many)
    assert len(figure.data) == curves.MAX_TRACES
    assert figure.layout.annotations[0].text == f"{curves.MAX_TRACES} of {n} lines drawn"
