"""Figures of the probes: every cell, bar and point is a recorded value, runs share their limits, and what is not finite is seen."""

from __future__ import annotations

import numpy as np
import pytest

from depthbench.figures import catalogue, palette, probes, scales
from tests.figures.probe_rows import measured

NAN = float("nan")
DRAWINGS = [(probe, drawing) for probe in catalogue.PROBES for drawing in probe.drawings]


def cells(figure, number: int = 0) -> np.ndarray:
    return np.asarray(figure.data[number].z, dtype=float)


def changed(rows, probe: str, metric: str, i: int, value: float, j: int | None = None):
    at = (rows["probe"] == probe) & (rows["metric"] == metric) & (rows["i"] == i) & (True if j is None else rows["j"] == j)
    assert at.any()
    return rows.assign(value=rows["value"].mask(at, value))


# ---- maps


def test_the_angular_map_is_mirrored_around_a_diagonal_of_zeros():
    figure = probes.angular({"": measured(4)})
    expected = np.abs(np.subtract.outer(np.arange(5), np.arange(5))) / 5
    np.testing.assert_allclose(cells(figure), expected, rtol=1e-6)
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1], "the first state stands at the top"
    assert (figure.layout.coloraxis.cmin, figure.layout.yaxis.scaleanchor) == (0, "x")


def test_the_causal_map_shows_later_blocks_only_and_frames_the_late_ones():
    figure = probes.causal({"": measured(8)})
    shown = cells(figure)
    assert np.isnan(shown[np.tril_indices(8)]).all()
    np.testing.assert_allclose(shown[2], [NAN, NAN, NAN, 0.1, 0.2, 0.3, 0.4, 0.5], rtol=1e-6)
    (frame,) = figure.layout.shapes
    assert (frame.x0, frame.x1, frame.y0, frame.y1) == (1.5, 7.5, 1.5, 7.5)
    assert figure.layout.xaxis.title.text == "affected block l" and figure.layout.yaxis.title.text == "skipped block s"


def test_skip_rules_are_named_and_shown_side_by_side_on_one_scale():
    rows = measured(4, slots="sources", rules=("reference", "renormalise"))
    figure = probes.causal({"run": rows})
    assert [a.text for a in figure.layout.annotations] == ["run · skip rule: reference", "run · skip rule: renormalise"]
    assert [trace.coloraxis for trace in figure.data] == ["coloraxis", "coloraxis"]
    np.testing.assert_allclose(cells(figure, 1), 2 * cells(figure, 0), rtol=1e-6)
    assert [trace.name for trace in probes.pruning({"": rows}).data] == ["skip rule: reference", "skip rule: renormalise"]
    assert "skip rule: identity" in probes.pruning({"": measured(4)}).layout.xaxis.title.text
    assert [a.text for a in probes.causal({"": measured(4)}).layout.annotations] == ["skip rule: identity"]


def test_four_runs_by_two_rules_are_all_drawn():
    runs = {name: measured(3, rules=("reference", "renormalise")) for name in "abcd"}
    assert len(probes.causal(runs).data) == 8


def test_a_cell_that_is_not_finite_has_its_named_colour():
    rows = changed(measured(4), "permutation", "score", 1, NAN, 2)
    shown, bad, key = probes.permutation({"": rows}).data
    assert np.argwhere(np.asarray(bad.z) == 1).tolist() == [[1, 2], [2, 1]]
    assert np.isnan(shown.z[1][2]) and np.isnan(shown.z[1][1]) and {color for _, color in bad.colorscale} == {palette.NOT_FINITE}
    assert key.marker.color == palette.NOT_FINITE and "not finite" in key.name


def test_path_weights_that_span_decades_have_a_log_colour_and_their_values_in_the_hover():
    rows = measured(4)
    rows["value"] = rows["value"].mask(rows["probe"] == "paths", 10.0 ** -(rows["j"] - rows["i"]))
    figure = probes.paths({"": rows})
    assert cells(figure)[0].tolist() == [0, -1, -2, -3, -4, -5, -6, -7, -8]
    assert figure.data[0].customdata[0][3] == np.float32(1e-3)
    assert "log scale" in figure.layout.coloraxis.colorbar.title.text
    signed = probes.paths({"": changed(measured(4), "paths", "weight", 0, -1.0)})
    assert signed.layout.coloraxis.cmin == -signed.layout.coloraxis.cmax == -1


def test_relative_depth_lays_runs_of_different_depths_on_one_axis():
    figure = probes.angular({"deep": measured(9), "shallow": measured(4)}, relative=True)
    assert [len(trace.x) for trace in figure.data] == [11, 6]  # edges of the cells
    assert all((trace.x[0], trace.x[-1]) == (0, 1) for trace in figure.data)
    lines = probes.norms({"deep": measured(8), "shallow": measured(4)}, relative=True).data
    assert list(lines[1].x) == [0, 0.25, 0.5, 0.75, 1.0]
    assert list(lines[3].x) == [0, 0.25, 0.5, 0.75], "a cosine with the next state lies at its own boundary"
    assert list(probes.jacobian({"": measured(4)}, relative=True).data[0].x) == [0.25, 0.5, 0.75, 1.0], "a block lies at its end"


# ---- transport and depth weights


def test_the_spectrum_is_the_mean_over_pairs_that_far_apart():
    spectrum = probes.spectrum(measured(4, slots="streams"))
    first = spectrum[spectrum["singular_value"] == 1]
    assert first["distance"].tolist() == [1, 2, 3, 4] and first["n"].tolist() == [4, 3, 2, 1]
    np.testing.assert_allclose(first["value"], [1.15, 1.1, 1.05, 1.0])
    np.testing.assert_allclose(first["value_max"] - first["value_min"], [0.3, 0.2, 0.1, 0.0], atol=1e-12)
    figure = probes.transport_spectrum({"": measured(4, slots="streams")})
    assert [trace.name for trace in figure.data if trace.name] == ["singular value 1", "singular value 2"]
    rows = measured(4, slots="streams")
    rows["value"] = rows["value"].mask(rows["metric"] == "singular_value_1", 10.0 ** (rows["j"] - rows["i"]))
    figure = probes.transport_spectrum({"": rows})
    assert list(figure.data[1].y) == [1, 2, 3, 4] and "log scale" in figure.layout.yaxis.title.text


def test_depth_weights_end_the_dead_segment_with_a_line():
    figure = probes.depth_weights({"": measured(4, slots="sources")})
    assert cells(figure).shape == (9, 9) and cells(figure)[0, 0] == 1
    assert [shape.x0 for shape in figure.layout.shapes] == [1.5], "after the two sublayers of the first block"


def test_the_running_sum_has_the_line_below_which_it_is_unread():
    rows = measured(4, slots="sources")
    rows["value"] = rows["value"].mask((rows["metric"] == "running_weight") & (rows["i"] < 4), 0.001)
    figure = probes.running_weight({"": rows})
    (line,) = figure.layout.shapes
    assert line.y0 == line.y1 == np.log10(0.01) and figure.data[0].y[0] == np.log10(0.001)
    assert figure.data[0].customdata[0].tolist() == [1, 0.001]


# ---- bars and lines


def test_pruning_is_bars_for_one_run_and_lines_for_several():
    (bars,) = probes.pruning({"": measured(4)}).data
    assert bars.type == "bar"
    np.testing.assert_allclose(bars.y, [-0.1, 0, 0.1, 0.2], atol=1e-12)
    assert [trace.type for trace in probes.pruning({"a": measured(4), "b": measured(3)}).data] == ["scatter", "scatter"]


def test_one_bar_that_towers_over_the_others_leaves_them_visible():
    (bars,) = (figure := probes.pruning({"": changed(measured(12), "pruning", "delta", 0, 90.0)})).data
    assert "symmetric log scale" in figure.layout.yaxis.title.text
    assert min(bars.y[2:]) > 0.05 * max(bars.y) and bars.customdata[0].tolist() == [0, 90.0]
    assert "0" in figure.layout.yaxis.ticktext and "10" in figure.layout.yaxis.ticktext


def test_useful_blocks_stand_out_above_the_line():
    (bars,) = (figure := probes.usefulness({"": measured(4)})).data
    np.testing.assert_allclose(np.asarray(bars.y) + bars.base, [1.0, 1.06, 1.12, 1.18])
    assert bars.marker.opacity.tolist() == [0.4, 0.4, 1, 1]
    assert 1.1 in [shape.y0 for shape in figure.layout.shapes]
    assert [a.text for a in figure.layout.annotations] == ["useful above 1.1"]


def test_estimates_have_error_bars_and_exact_values_none():
    rows = measured(4)
    np.testing.assert_allclose(probes.jacobian({"": rows}).data[0].error_y.array, [0.01] * 4)
    assert probes.jacobian({"": rows[rows["metric"] != "stderr"]}).data[0].error_y.array is None


def test_the_logit_lens_has_a_row_for_each_of_its_three_metrics():
    figure = probes.logit_lens({"a": measured(4), "b": measured(2)}, colors={"a": "#111111", "b": "#222222"})
    assert [trace.line.color for trace in figure.data] == ["#111111", "#222222"] * 3
    assert list(figure.data[0].y) == [7.25, 6.25, 5.25, 4.25, 3.25] and list(figure.data[4].y) == [0, 0.25, 0.5, 0.75, 1]
    assert [trace.showlegend for trace in figure.data] == [True, True, False, False, False, False]


def test_a_point_that_is_not_finite_is_a_gap_and_a_cross():
    line, cross, *_ = probes.collapse({"": changed(measured(4), "collapse", "stable_rank", 2, float("inf"))}).data
    assert np.isnan(line.y[2]) and line.connectgaps is False
    assert (cross.marker.color, list(cross.x), list(cross.y)) == (palette.NOT_FINITE, [2], [1.0])


def test_a_figure_with_nothing_to_show_is_refused_and_a_run_without_it_left_out():
    nothing = measured(2).iloc[:0]
    for _, drawing in DRAWINGS:
        full = measured(2, slots="sources" if drawing.name in ("depth_weights", "running_weight") else "streams")
        with pytest.raises(ValueError, match="anything to show"):
            drawing.draw({"": nothing})
        shown = drawing.draw({"a": full, "b": nothing})
        assert shown.data and not any(trace.name == "b" for trace in shown.data)


def test_a_run_of_values_that_are_all_lost_can_still_be_drawn():
    rows = measured(3, slots="streams").assign(value=NAN)
    for _, drawing in DRAWINGS:
        if drawing.name not in ("depth_weights", "running_weight", "transport_spectrum"):
            assert drawing.draw({"": rows}).data


def test_the_smallest_network_can_be_drawn():
    rows = measured(1)
    assert cells(probes.angular({"": rows})).tolist() == [[0, 0.5], [0.5, 0]]
    with pytest.raises(ValueError):
        probes.causal({"": rows})  # one block has no later one


def test_the_table_of_a_figure_is_exactly_what_it_shows():
    rows = measured(4)
    tables = {drawing.name: probe.table(drawing, rows) for probe, drawing in DRAWINGS}
    assert tables["angular"].columns.tolist() == ["metric", "i", "j", "value", "n_tokens"]
    assert tables["pruning"].columns.tolist() == ["metric", "i", "value", "n_tokens", "rule"]
    assert len(tables["angular"]) == 10 and set(tables["logit_lens"]["metric"]) == {"loss", "kl", "top5_overlap"}
    assert tables["transport_rank"].empty and tables["depth_weights"].empty, "not defined is no row to show"


# ---- scales


def test_a_symmetric_log_scale_is_linear_near_its_origin_and_has_a_place_for_all():
    scale = scales.Scale("symlog", threshold=0.1, origin=1.0)
    np.testing.assert_allclose(scale.place(np.array([1.0, 1.1, 0.9, 2.0])), [0, np.log10(2), -np.log10(2), np.log10(11)])
    ticks = scale.ticks(0.0, scale.place(np.array(12.0)).item())
    assert ticks["ticktext"] == ["1", "1.1", "2", "11"]
    np.testing.assert_allclose(ticks["tickvals"], scale.place(np.array([1, 1.1, 2, 11])))


def test_the_scale_fits_the_values():
    assert scales.fitting([1, 2, 3]).kind == "linear"
    assert scales.fitting([1e-6, 1, 1]).kind == "linear", "one small value among large ones is no reason"
    assert scales.fitting([1e-6, 1e-3, 1, NAN]).kind == "log"
    assert scales.fitting([-1e-3, 2e-3, 1, -1e-3]).kind == "symlog"
    assert scales.fitting([0.001] * 9 + [1], origin=0).kind == "symlog", "bars stand on their origin"
    assert scales.fitting([]).kind == scales.fitting([0, 0]).kind == scales.fitting([NAN]).kind == "linear"


def test_a_line_does_not_pass_where_nothing_was_measured():
    rows = measured(4, slots="sources")
    (line,) = probes.running_weight({"": rows[~((rows["metric"] == "running_weight") & (rows["i"] == 4))]}).data
    assert list(line.x) == [1, 2, 3, 4, 5, 6, 7] and np.isnan(line.y[3]) and np.isfinite(line.y[[2, 4]]).all()


@pytest.mark.parametrize("kind", ["linear", "log", "symlog"])
def test_limits_are_an_interval_whatever_the_values(kind):
    for values in ([], [NAN, np.inf], [3.0, 3.0], [0.0, 0.0], [-1.0, 2.0]):
        low, high = scales.Scale(kind).limits(values)
        assert np.isfinite([low, high]).all() and low < high
