"""Every page over no runs, one run, several, a live one and an unreadable one."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from pathlib import Path

import duckdb
import pandas as pd
import pytest

from tests.app.conftest import STEPS, figure, scalar, write

PAGES = ["views/runs.py", "views/scaling.py", "views/layers.py"]


def said(app) -> str:
    """All messages of a page."""
    return "\n".join(element.value for kind in (app.info, app.warning, app.error, app.caption) for element in kind)


WIDGETS = ("selectbox", "multiselect", "button_group", "select_slider", "toggle", "text_input")


def widget(app, key: str):
    """The control of a key, whatever its kind."""
    return next(
        w
        for kind in ("selectbox", "multiselect", "button_group", "select_slider", "toggle", "text_input")
        for w in app.get(kind)
        if w.key == key
    )


def unreadable(root: Path) -> None:
    (root / "broken").mkdir()
    (root / "broken" / "metrics.duckdb").write_bytes(b"no database")


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_folder_says_how_to_make_a_run(open_app, tmp_path, page):
    app = open_app(tmp_path, page)
    assert not app.exception
    assert f"no runs in `{tmp_path}`" in app.info[0].value
    assert app.code[0].value == f"depthbench fit --arch pre_ln --ratio 32 --runs {tmp_path}"


@pytest.mark.parametrize("page", PAGES)
def test_a_missing_folder_says_so(open_app, tmp_path, page):
    app = open_app(tmp_path / "nowhere", page)
    assert not app.exception
    assert "does not exist" in app.info[0].value


def test_a_folder_without_rights_is_a_message(open_app, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "/locked/runs")

    monkeypatch.setattr("depthbench.store.reader.Store.runs", refuse)
    app = open_app(tmp_path)
    assert not app.exception
    assert app.error[0].value == "/locked/runs cannot be read: Permission denied"


def test_the_first_run_appears_on_looking_again(open_app, tmp_path):
    app = open_app(tmp_path)
    write(tmp_path)
    app.button[0].click().run()
    assert not app.exception
    assert len(app.dataframe[0].value) == 1


@pytest.mark.parametrize("page", PAGES)
def test_one_run_is_drawn_on_every_page(open_app, tmp_path, page):
    write(tmp_path)
    app = open_app(tmp_path, page)
    assert not app.exception
    assert figure(app)["data"]


@pytest.mark.parametrize("page", PAGES)
def test_an_unreadable_run_is_a_message_beside_the_others(open_app, tmp_path, page):
    write(tmp_path)
    unreadable(tmp_path)
    app = open_app(tmp_path, page)
    assert not app.exception
    assert figure(app)["data"]
    if page == "views/runs.py":
        assert "broken" in app.warning[0].value
        assert "broken" in set(app.dataframe[0].value["run_id"])
        widget(app, "archs").select("pre_ln").run()
        assert list(app.dataframe[0].value["arch"]) == ["pre_ln"]


@pytest.mark.parametrize("page", PAGES)
def test_where_nothing_can_be_read_the_reason_is_shown(open_app, tmp_path, page):
    unreadable(tmp_path)
    app = open_app(tmp_path, page)
    assert not app.exception
    assert "broken" in app.warning[0].value


def test_a_run_of_a_newer_version_is_a_message(open_app, tmp_path):
    write(tmp_path)
    write(tmp_path, seed=7)
    newer = next(tmp_path.glob("*-s7-*/metrics.duckdb"))
    with duckdb.connect(newer) as database:
        database.execute("UPDATE run SET schema_version = 999")
    app = open_app(tmp_path)
    assert not app.exception
    assert "newer depthbench" in app.warning[0].value
    assert len(app.dataframe[0].value) == 2


# ---- Runs


def test_failed_runs_are_hidden_until_asked_for(open_app, several):
    assert "failed" not in {s for (s,) in open_app(several).dataframe[0].value["status"]}
    table = open_app(several, status=["failed"]).dataframe[0].value
    assert list(table["arch"]) == ["keel"]


def test_a_run_stopped_by_max_steps_says_so(open_app, tmp_path):
    write(tmp_path, steps=2, tokens_planned=1_750 * 1024)
    table = open_app(tmp_path).dataframe[0].value
    assert [s for (s,) in table["status"]] == ["stopped early"]
    assert list(table["steps"]) == ["2 of 1,750"]


def test_a_model_over_its_budget_is_marked(open_app, tmp_path):
    write(tmp_path)
    write(tmp_path, arch="hc", params_total=2_142_000)
    table = open_app(tmp_path).dataframe[0].value.set_index("arch")
    assert dict(table["over_budget"]) == {"pre_ln": "", "hc": "7.1 % over"}


def test_hidden_runs_are_counted(open_app, several):
    assert "Hidden by status: 1 failed." in said(open_app(several))
    assert "Hidden" not in said(open_app(several, status=["failed", "finished"]))
    assert "Hidden" not in said(open_app(several, archs="hc"))  # the failed one is of another design


def test_runs_drawn_are_counted_without_those_that_have_no_data(open_app, tmp_path):
    for seed in range(8):
        write(tmp_path, seed=seed)
    write(tmp_path, seed=50, steps=0, status="interrupted")
    app = open_app(tmp_path)
    drawn = {line["legendgroup"] for line in figure(app)["data"]}
    assert len(drawn) == 6 and not any("-s50-" in run for run in drawn)
    assert "The newest 6 that recorded anything are drawn" in said(app)
    write(tmp_path, seed=51, steps=5)  # too short for a validation
    assert "5 of the newest 6 that recorded anything are drawn" in said(open_app(tmp_path, curve="val/loss"))
    ids = [f"pre_ln-nano-L4-d128-lr0.004-s{seed}-0123abcd" for seed in (0, 50)]
    assert "1 of 2 ticked runs are drawn" in said(open_app(tmp_path, selected=ids))


def test_the_table_holds_the_runs_values(open_app, several):
    table = open_app(several).dataframe[0].value.set_index("run_id")
    assert len(table) == 8
    row = table.loc["hc-nano-L8-d96-lr0.004-s42-0123abcd"]
    assert (row["ratio"], row["shape"], row["progress"]) == (12.0, "8 × 96", 100.0)
    assert row["val_loss_best"] == pytest.approx(2.92)


def test_filters_narrow_the_table_together(open_app, several):
    app = open_app(several)
    widget(app, "archs").select("pre_ln").run()
    widget(app, "seeds").select("42").run()
    widget(app, "search").set_value("L4 lr0.001").run()
    assert list(app.dataframe[0].value["run_id"]) == ["pre_ln-nano-L4-d128-lr0.001-s42-0123abcd"]
    assert app.query_params == {"archs": "pre_ln", "seeds": "42", "search": "L4 lr0.001"}


def test_filters_that_let_nothing_through_say_so(open_app, several):
    app = open_app(several, search="nothing of this name")
    assert not app.exception
    assert "No run passes the filters" in said(app)


def test_the_ticked_runs_of_the_url_are_drawn_and_no_others(open_app, several):
    ticked = ["hc-nano-L4-d128-lr0.004-s42-0123abcd", "pre_ln-nano-L8-d96-lr0.004-s42-0123abcd"]
    app = open_app(several, selected=ticked, curve="val/loss", x="tokens")
    lines = figure(app)["data"]
    assert {line["legendgroup"] for line in lines} == set(ticked)
    hc = next(line for line in lines if line["legendgroup"] == ticked[0])
    assert hc["x"] == [s * 1024 for s in (10, 20, 30, 40)]
    assert hc["y"] == pytest.approx([3.71, 3.46, 3.21, 2.96])
    assert app.query_params["selected"] == ticked


def test_any_recorded_scalar_can_be_the_curve(open_app, several):
    app = open_app(several)
    widget(app, "curve").select("train/grad_norm").run()
    assert figure(app)["layout"]["yaxis"]["title"]["text"] == "gradient norm before clipping"


def test_log_axes(open_app, several):
    layout = figure(open_app(several, logx="1", logy="1"))["layout"]
    assert (layout["xaxis"]["type"], layout["yaxis"]["type"]) == ("log", "log")


def test_more_ticked_runs_than_can_be_drawn_are_capped_with_a_message(open_app, several, tmp_path):
    run = next(several.glob("hc-*"))
    for number in range(14):
        shutil.copytree(run, tmp_path / f"copy-{number:02d}")
    ids = sorted(folder.name for folder in tmp_path.iterdir())
    app = open_app(tmp_path, selected=ids)
    assert "The first 12 of 14 ticked runs are drawn" in said(app)
    assert len({line["legendgroup"] for line in figure(app)["data"]}) == 12


# ---- downloads


@pytest.fixture
def downloads(monkeypatch) -> dict[str, pd.DataFrame]:
    """File name -> what a download button offers."""
    offered = {}

    def button(label, data, *, file_name, **options):
        offered[file_name] = pd.read_csv(io.BytesIO(data))

    monkeypatch.setattr("streamlit.download_button", button)
    return offered


def test_a_download_holds_exactly_the_table_and_the_curves(open_app, several, downloads):
    app = open_app(several, archs="hc", curve="train/loss", smooth="0.9")
    table, rows = app.dataframe[0].value, downloads["depthbench-runs.csv"]
    assert list(rows["run_id"]) == list(table["run_id"])
    assert set(rows["status"]) == {"finished"}
    assert list(rows.columns) == list(table.columns)
    raw, smoothed = figure(app)["data"][:2]
    run = downloads["depthbench-curves.csv"].query("run_id == @smoothed['legendgroup']")
    assert run["value"].tolist() == pytest.approx(raw["y"])
    assert run["smoothed"].tolist() == pytest.approx(smoothed["y"])


def test_a_download_holds_exactly_the_points_and_the_paper(open_app, several, downloads):
    app = open_app(several, "views/scaling.py", view="difference and paper")
    rows = downloads["depthbench-scaling.csv"]
    assert rows.query("source == 'runs' and arch == 'hc'")["delta"].tolist() == pytest.approx(lines(app)["hc"]["y"][::-1])
    assert len(rows.query("source != 'runs'")) == 54


def test_a_download_holds_exactly_the_heatmap(open_app, tmp_path, downloads):
    write(tmp_path)
    app = open_app(tmp_path, "views/layers.py")
    grid = downloads["depthbench-layers.csv"].pivot(index="layer", columns="step", values="value")
    assert grid.to_numpy().tolist() == figure(app)["data"][0]["z"]


# ---- a live run


def test_a_live_run_is_followed_and_its_end_is_noticed(open_app, tmp_path):
    writer = write(tmp_path, status=None, steps=20)
    app = open_app(tmp_path)
    assert not app.exception
    assert app.dataframe[0].value["progress"].tolist() == [50.0]
    assert widget(app, "refresh").value == "5 s"
    assert max(figure(app)["data"][0]["x"]) == 20

    writer.add("scalars", [scalar("train/loss", 21, 2.5)])
    writer.drain()
    app.run()
    assert max(figure(app)["data"][0]["x"]) == 21  # the cache followed the data

    writer.seal("finished")
    app.run()
    assert [s for (s,) in app.dataframe[0].value["status"]] == ["stopped early"]
    assert not [w for w in app.get("button_group") if w.key == "refresh"]


@pytest.mark.parametrize("page", PAGES)
def test_a_run_without_any_row_yet_is_no_error(open_app, tmp_path, page):
    writer = write(tmp_path, status=None, steps=0)
    app = open_app(tmp_path, page)
    writer.close()
    assert not app.exception
    assert app.info


# ---- Scaling


def lines(app) -> dict[str, dict]:
    return {trace["name"]: trace for trace in figure(app)["data"]}


def test_one_line_per_design_with_means_over_seeds_at_the_best_rate(open_app, several):
    drawn = lines(open_app(several, "views/scaling.py"))
    assert set(drawn) == {"hc", "pre_ln"}
    assert drawn["pre_ln"]["x"] == [4.0, 12.0, 32.0]
    assert drawn["pre_ln"]["y"] == pytest.approx([3.16, 3.08, (3.04 + 3.24) / 2])
    assert drawn["hc"]["y"] == pytest.approx([2.84, 2.92, 2.96])
    assert drawn["pre_ln"]["error_y"]["array"][2] == pytest.approx(0.2 / 2**0.5)


def test_one_learning_rate_can_be_asked_for(open_app, several):
    drawn = lines(open_app(several, "views/scaling.py", lr="0.001"))
    assert set(drawn) == {"pre_ln"}
    assert drawn["pre_ln"]["y"] == pytest.approx([3.5])


def test_sizes_budgets_corpora_and_recipes_are_never_mixed(open_app, tmp_path):
    write(tmp_path, loss=3.0)
    write(tmp_path, loss=9.0, size="micro", seed=1)
    write(tmp_path, loss=8.0, budget="backbone", seed=2)
    write(tmp_path, loss=7.0, corpus="text", seed=3)
    write(tmp_path, loss=6.0, tokens_planned=20 * 1024, seed=4)
    choices = {"size": "nano", "budget": "total", "corpus": "embedded", "recipe": "40.96k tokens"}
    assert lines(open_app(tmp_path, "views/scaling.py", **choices))["pre_ln"]["y"] == [3.0]
    assert lines(open_app(tmp_path, "views/scaling.py", **choices | {"recipe": "20.48k tokens"}))["pre_ln"]["y"] == [6.0]
    assert lines(open_app(tmp_path, "views/scaling.py", **choices | {"corpus": "text"}))["pre_ln"]["y"] == [7.0]
    assert lines(open_app(tmp_path, "views/scaling.py", **choices | {"budget": "backbone"}))["pre_ln"]["y"] == [8.0]
    assert lines(open_app(tmp_path, "views/scaling.py", size="micro"))["pre_ln"]["y"] == [9.0]


def test_the_paper_is_overlaid_as_differences_only(open_app, several):
    app = open_app(several, "views/scaling.py", view="difference and paper")
    drawn = lines(app)
    assert drawn["pre_ln"]["y"] == pytest.approx([3.16 - 3.14, 3.08 - 3.14, 0.0])
    theirs = {name: line for name, line in drawn.items() if name.endswith("paper 400M")}
    assert len(theirs) == 10
    assert all(0.0 in line["y"] and max(map(abs, line["y"])) < 0.06 for line in theirs.values())
    assert app.query_params["base"] == "32.0"


def test_unfinished_runs_are_no_points_and_are_mentioned(open_app, tmp_path):
    write(tmp_path, loss=3.0)
    write(tmp_path, arch="hc", steps=20)  # finished, but stopped before its planned tokens
    write(tmp_path, arch="lns", status="interrupted", steps=20)
    app = open_app(tmp_path, "views/scaling.py")
    assert set(lines(app)) == {"pre_ln"}
    assert "Only runs that trained all planned tokens are drawn: 1 stopped early and 1 not finished." in said(app)


def test_where_every_run_stopped_early_scaling_says_so(open_app, tmp_path):
    write(tmp_path, steps=2)
    app = open_app(tmp_path, "views/scaling.py")
    assert "1 stopped early" in app.info[0].value


def suggested(app) -> list[str]:
    (command,) = re.findall(r"`(depthbench fit .*?)` adds one", said(app))
    return shlex.split(command)[2:]


def test_the_suggested_command_repeats_the_lone_point_at_another_ratio(open_app, tmp_path):
    runs = tmp_path / "my runs"
    write(
        runs, seed=7, lr=1e-3, corpus="/my texts/all", batch_tokens=2048, seq_len=128, tokens_planned=STEPS * 1024, precision="bf16-mixed"
    )
    command = suggested(open_app(runs, "views/scaling.py"))
    pairs = dict(zip(command[::2], command[1::2], strict=True))
    assert pairs == {
        "--arch": "pre_ln",
        "--size": "nano",
        "--budget": "total",
        "--ratio": "4",
        "--corpus": "/my texts/all",
        "--tokens": "40960",
        "--seed": "7",
        "--trainer.precision": "bf16-mixed",
        "--seq-len": "128",
        "--batch-tokens": "2048",
        "--lr": "0.001",
        "--runs": str(runs),
    }


def test_the_suggested_command_is_one_that_fit_parses_and_names_what_no_column_says(open_app, tmp_path):
    from depthbench.training.cli import parse

    write(tmp_path, config=json.dumps({"command": {"count_extras": True, "tokenizer": "own/tokenizer.json"}}))
    asked = parse(suggested(open_app(tmp_path, "views/scaling.py"))).experiment
    assert (asked.tokens, asked.seed, asked.ratio, asked.count_extras, asked.tokenizer) == (40_960, 42, 4.0, True, "own/tokenizer.json")
    assert (asked.lr, asked.batch_tokens, asked.seq_len) == (None, None, None)  # the size's own


def test_variants_of_a_design_are_told_apart_and_the_suggestion_keeps_the_options(open_app, tmp_path):
    from depthbench.training.cli import parse

    options, config = '{"norm_then_sum": true, "streams": 2}', '{"command": {"recipe": "reference"}}'
    write(tmp_path, arch="hc", options=options, recipe="reference", config=config)
    assert list(open_app(tmp_path).dataframe[0].value["arch"]) == ["hc norm_then_sum=true streams=2"]
    asked = parse(suggested(open_app(tmp_path, "views/scaling.py"))).experiment
    assert (asked.arch, asked.options, asked.recipe) == ("hc", {"norm_then_sum": True, "streams": 2}, "reference")


# ---- Layers


def test_the_heatmap_and_profile_hold_the_recorded_statistic(open_app, tmp_path):
    write(tmp_path, n_layer=4)
    app = open_app(tmp_path, "views/layers.py", step="20")
    heatmap, profile = figure(app, 0)["data"][0], figure(app, 1)["data"][0]
    assert heatmap["x"] == [10, 20, 30, 40]
    assert heatmap["z"] == [[s + layer for s in (10, 20, 30, 40)] for layer in range(4)]
    assert profile["y"] == [20, 21, 22, 23]


def test_values_that_are_not_finite_are_marked(open_app, several):
    app = open_app(several, "views/layers.py", run="hc-nano-L8-d96-lr0.004-s42-0123abcd")
    assert "not finite" in {trace.get("name") for trace in figure(app)["data"]}


def test_several_runs_share_the_colour_limits_and_overlay_by_relative_depth(open_app, several):
    runs = ["hc-nano-L4-d128-lr0.004-s42-0123abcd", "hc-nano-L16-d64-lr0.004-s42-0123abcd"]
    app = open_app(several, "views/layers.py", run=runs, relative="1", log="1")
    assert not app.exception
    maps = [trace for trace in figure(app)["data"] if trace["type"] == "heatmap"]
    assert [len(trace["z"]) for trace in maps] == [16, 4]  # newest first
    assert {trace["coloraxis"] for trace in maps} == {"coloraxis"}
    assert [trace["x"][-1] for trace in figure(app, 1)["data"]] == [1.0, 1.0]


def test_direction_and_metric_choose_the_statistic(open_app, tmp_path):
    write(tmp_path)
    app = open_app(tmp_path, "views/layers.py", metric="mean", direction="backward")
    assert figure(app, 1)["data"][0]["y"] == pytest.approx([-0.1, 0.0, 0.1, 0.2])
    assert "gradient" in figure(app, 1)["layout"]["yaxis"]["title"]["text"]
    assert widget(app, "log").disabled  # negative values have no logarithm


def test_an_untouched_slider_follows_a_live_run(open_app, tmp_path):
    from tests.app.conftest import statistic

    writer = write(tmp_path, status=None, steps=20)
    app = open_app(tmp_path, "views/layers.py")
    assert widget(app, "step").value == 20
    writer.add("layer_stats", [statistic("norm", 30, layer, 1.0) for layer in range(4)])
    writer.drain()
    app.run()
    assert widget(app, "step").value == 30
    widget(app, "step").set_value(10).run()
    writer.add("layer_stats", [statistic("norm", 40, layer, 1.0) for layer in range(4)])
    writer.drain()
    app.run()
    writer.close()
    assert widget(app, "step").value == 10  # moved by hand: it stays


def test_a_run_without_layer_statistics_is_named(open_app, tmp_path):
    write(tmp_path)
    write(tmp_path, arch="hc", steps=5)
    ids = sorted(folder.name for folder in tmp_path.iterdir())
    app = open_app(tmp_path, "views/layers.py", run=ids)
    assert "Without this statistic: hc" in said(app)


# ---- what the URL and the session keep


def test_no_two_pages_share_a_control(open_app, several):
    # A key is a query parameter and lives as long as the session: a second page's control of the same key would inherit its value.
    used = [{w.key for kind in WIDGETS for w in open_app(several, page).get(kind)} for page in PAGES]
    assert all(used) and sum(map(len, used)) == len(set.union(*used))


def test_a_link_restores_each_page(open_app, several):
    run = "hc-nano-L4-d128-lr0.004-s42-0123abcd"
    views = {
        "views/runs.py": {"selected": run, "curve": "val/loss", "x": "tokens", "logx": "1", "smooth": "0.9", "archs": "hc"},
        "views/scaling.py": {"loss": "last", "lr": "0.004", "view": "difference from base", "base": "12.0"},
        "views/layers.py": {"run": run, "metric": "norm", "step": "20", "over": "tokens", "relative": "1", "log": "1"},
    }
    for page, query in views.items():
        app = open_app(several, page, **query)
        assert not app.exception
        assert query.items() <= app.query_params.items()


def test_a_link_with_names_that_are_gone_falls_back(open_app, several):
    app = open_app(several, "views/layers.py", run="gone", metric="gone", step="gone", over="gone")
    assert not app.exception
    assert widget(app, "metric").value == "norm"
    app = open_app(several, "views/scaling.py", size="gone", lr="gone", view="gone")
    assert not app.exception
    assert widget(app, "size").value == "nano"
    assert "view" not in app.query_params


def test_nothing_chosen_is_a_choice_that_the_link_keeps(open_app, several):
    app = open_app(several)
    widget(app, "status").set_value([]).run()
    assert app.query_params["status"] == "-"
    assert len(open_app(several, status="-").dataframe) == 0 or open_app(several, status="-").dataframe[0].value.empty


def test_choices_survive_going_to_another_page_and_back(open_app, several):
    app = open_app(several, archs="hc", x="tokens")
    app.switch_page("views/scaling.py")
    app.query_params = {}
    app.run()
    widget(app, "loss").set_value("last").run()
    app.switch_page("views/runs.py")
    app.query_params = {}
    app.run()
    assert set(app.dataframe[0].value["arch"]) == {"hc"}
    assert app.query_params == {"archs": "hc", "x": "tokens"}
