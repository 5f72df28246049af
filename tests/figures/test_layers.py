"""Layer heatmaps and profiles: every cell is a recorded value, and what is not finite is seen."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from depthbench.figures import layers, palette


def stats(depth: int = 3, steps: tuple[int, ...] = (1, 10, 20), value=lambda layer, step: 100.0 * layer + step) -> pd.DataFrame:
    rows = [{"step": s, "tokens": s * 1024, "layer": layer, "value": value(layer, s)} for s in steps for layer in range(depth)]
    return pd.DataFrame(rows)


def draw(panels: dict[str, pd.DataFrame], depth: int = 3, **more):
    return layers.heatmap(panels, dict.fromkeys(panels, depth), name="norm", **more)


def test_cells_are_layer_by_step():
    trace = draw({"a": stats()}).data[0]
    assert list(trace.x) == [1, 10, 20]
    assert list(trace.y) == [0, 1, 2]
    np.testing.assert_array_equal(trace.z, [[1, 10, 20], [101, 110, 120], [201, 210, 220]])


def test_axis_types_are_explicit_and_tokens_can_be_the_axis():
    figure = draw({"a": stats()}, x="tokens")
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("linear", "linear")
    assert list(figure.data[0].x) == [1024, 10240, 20480]
    assert figure.layout.xaxis.title.text == "tokens seen"


def test_relative_depth_spans_zero_to_one_by_cell_edges():
    figure = draw({"a": stats(depth=4)}, depth=4, relative=True)
    assert list(figure.data[0].y) == [0, 0.25, 0.5, 0.75, 1.0]
    assert list(figure.layout.yaxis.range) == [0, 1]


def test_what_is_not_finite_has_its_named_colour_and_what_is_missing_is_empty():
    frame = stats()
    frame.loc[(frame["layer"] == 1) & (frame["step"] == 10), "value"] = np.nan
    frame.loc[(frame["layer"] == 2) & (frame["step"] == 20), "value"] = np.inf
    frame = frame[~((frame["layer"] == 0) & (frame["step"] == 1))]  # never recorded
    cells, bad, key = draw({"a": frame}).data
    assert np.isnan(cells.z[0][0]) and np.isnan(cells.z[1][1]) and np.isnan(cells.z[2][2])
    marked = np.argwhere(np.asarray(bad.z) == 1).tolist()
    assert marked == [[1, 1], [2, 2]]
    assert {color for _, color in bad.colorscale} == {palette.NOT_FINITE}
    assert bad.customdata[1][1][0] == "NaN" and bad.customdata[2][2][0] == "inf"
    assert key.marker.color == palette.NOT_FINITE and "not finite" in key.name


def test_colour_limits_are_finite_quantiles_shared_by_the_panels():
    wild = stats(depth=30, steps=tuple(range(1, 101)), value=lambda layer, step: 1.0 + layer)
    wild.loc[0, "value"] = 1e12
    wild.loc[1, "value"] = np.inf
    figure = draw({"a": wild, "b": stats(depth=30, value=lambda layer, step: 5.0)}, depth=30)
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (1.0, 30.0)
    heatmaps = [trace for trace in figure.data if trace.type == "heatmap" and trace.name != "not finite"]
    assert [trace.coloraxis for trace in heatmaps] == ["coloraxis", "coloraxis"]


def test_signed_statistics_are_centred_on_zero():
    figure = draw({"a": stats(value=lambda layer, step: layer - 0.5)})
    assert figure.layout.coloraxis.cmin == -figure.layout.coloraxis.cmax
    positive = draw({"a": stats()})
    assert positive.layout.coloraxis.colorscale != figure.layout.coloraxis.colorscale


def test_log_colours_keep_the_true_values_in_the_hover():
    figure = draw({"a": stats(value=lambda layer, step: 10.0**layer)}, log=True)
    np.testing.assert_allclose(np.asarray(figure.data[0].z)[:, 0], [0, 1, 2])
    np.testing.assert_allclose(np.asarray(figure.data[0].customdata)[:, 0, 0].astype(float), [1, 10, 100])
    bar = figure.layout.coloraxis.colorbar
    assert [float(text) for text in bar.ticktext] == pytest.approx([10.0**v for v in bar.tickvals])


def test_log_is_offered_for_positive_values_only():
    assert layers.can_log(pd.Series([1.0, np.nan, np.inf]))
    assert not layers.can_log(pd.Series([1.0, 0.0]))
    assert not layers.can_log(pd.Series([np.nan]))


@pytest.mark.parametrize("log", [False, True])
def test_limits_of_nothing_or_of_one_value_are_an_interval(log):
    for values in ([], [np.nan, np.inf], [3.0, 3.0], [0.0, 0.0]):
        low, high = layers.limits(pd.Series(values, dtype=float), log=log)
        assert np.isfinite([low, high]).all() and low < high


def test_a_spike_and_a_nan_survive_the_reduction_of_steps():
    frame = stats(steps=tuple(range(1000)), value=lambda layer, step: 1.0)
    frame.loc[(frame["step"] == 503) & (frame["layer"] == 1), "value"] = -40.0
    frame.loc[(frame["step"] == 778) & (frame["layer"] == 2), "value"] = np.nan
    reduced = layers.reduce_steps(frame, limit=50)
    assert reduced["step"].nunique() == 50
    assert {503, 778} <= set(reduced["step"])
    assert len(reduced) == 50 * 3  # whole profiles, recorded values only
    assert layers.reduce_steps(frame, limit=1000) is frame


def test_rows_reduced_by_the_store_show_their_extreme():
    reduced = pd.DataFrame(
        {
            "value": [2.0, 2.0, np.inf, 2.0],
            "value_min": [1.0, -9.0, np.nan, 1.0],
            "value_max": [9.0, 3.0, np.nan, 9.0],
            "n": [4, 4, 1, 4],
            "n_finite": [4, 4, 0, 3],
        }
    )
    np.testing.assert_array_equal(layers.extremes(reduced)["value"], [9.0, -9.0, np.inf, np.nan])


def test_the_panels_are_capped():
    figure = draw({str(i): stats() for i in range(layers.MAX_PANELS + 2)})
    assert len(figure.data) == layers.MAX_PANELS


def test_the_mark_is_drawn_in_its_own_panel():
    figure = draw({"a": stats(), "b": stats()}, mark={"a": 10, "b": 20})
    assert [shape.x0 for shape in figure.layout.shapes] == [10, 20]


def test_at_step_takes_the_nearest_recorded_profile():
    assert list(layers.at_step(stats(), 13)["value"]) == [10, 110, 210]
    assert layers.at_step(stats().iloc[:0], 13).empty


def test_a_profile_is_the_values_over_depth():
    panels = {"deep": layers.at_step(stats(depth=4), 10), "shallow": layers.at_step(stats(depth=2), 10)}
    depths = {"deep": 4, "shallow": 2}
    colors = {"deep": "#111111", "shallow": "#222222"}
    plain = layers.profile(panels, depths, colors, name="norm")
    assert [list(t.x) for t in plain.data] == [[0, 1, 2, 3], [0, 1]]
    assert [list(t.y) for t in plain.data] == [[10, 110, 210, 310], [10, 110]]
    relative = layers.profile(panels, depths, colors, name="norm", relative=True, log=True)
    assert [list(t.x) for t in relative.data] == [[0.25, 0.5, 0.75, 1.0], [0.5, 1.0]]
    assert relative.layout.yaxis.type == "log" and relative.layout.yaxis.title.text == "norm, log scale"


def test_titles_name_the_statistic_where_it_is_taken_and_the_gradient():
    assert layers.title("norm", "block_out", "forward") == "L2 norm of the block output"
    assert layers.title("norm", "block_out", "backward") == "L2 norm of the block output gradient"
    assert layers.title("residual_norm", "block_out", "forward").startswith("residual norm")
    assert layers.title("new", "elsewhere", "forward") == "new of the elsewhere"
