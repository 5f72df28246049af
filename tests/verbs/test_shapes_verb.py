"""`depthbench shapes`: the rows of its table and JSON, marks, and one line for every mistake."""

from __future__ import annotations

import json

import pytest

from depthbench import residuals
from depthbench.cli import dispatch
from depthbench.errors import UserError
from depthbench.residuals.pre_ln import PreLN


def call(capsys, *arguments: str) -> tuple[str, str]:
    """(standard output, standard error) of the verb, which must end with exit code 0."""
    assert dispatch(["shapes", *arguments]) == 0
    return capsys.readouterr()


def rows(capsys, *arguments: str) -> list[dict]:
    return json.loads(call(capsys, *arguments, "--json")[0])


class Heavy(PreLN):
    """Adds a sixth of the backbone, and as many multiply-adds per token.

    share: what it adds is one of so many parts of the backbone
    """

    def __init__(self, config, *, share: int = 6):
        super().__init__(config)
        if share < 1:
            raise UserError(f"share is {share}: give a whole number of at least 1")

    @classmethod
    def params_extra(cls, shape, *, share=6):
        return shape.params_backbone // share

    @classmethod
    def flops_extra(cls, shape, seq_len, *, share=6):
        return 2 * seq_len * (shape.params_backbone // share)


@pytest.fixture
def heavy(monkeypatch):
    """A registry with one more design."""
    get = residuals.get
    monkeypatch.setattr(residuals, "get", lambda name: Heavy if name == "heavy" else get(name))
    monkeypatch.setattr(residuals, "names", lambda: ["pre_ln", "heavy"])


def test_json_rows(capsys):
    (row,) = rows(capsys, "--ratio", "32")
    assert {
        key: row[key] for key in ("size", "n_layer", "d_model", "n_head", "head_dim", "d_ff", "ratio", "params_total", "params_backbone")
    } == {
        "size": "nano",
        "n_layer": 5,
        "d_model": 152,
        "n_head": 2,
        "head_dim": 76,
        "d_ff": 416,
        "ratio": 30.4,
        "params_total": 2_034_824,
        "params_backbone": 1_412_080,
    }
    assert row["ratio_requested"] == 32 and row["ratio_deviation"] == pytest.approx(-0.05)
    assert row["budget_params"] == 2_000_000 and row["budget_deviation"] == pytest.approx(0.017412)
    assert row["params_extra"] == 0 and row["over_budget"] is False
    assert row["train_flops"] == row["train_flops_per_token"] * row["train_tokens"]


def test_the_ladder(capsys):
    assert [row["n_layer"] for row in rows(capsys, "--size", "400m")] == [16, 20, 24, 28, 32, 42, 70]
    assert [row["n_layer"] for row in rows(capsys, "--size", "300m", "--budget", "backbone")] == [16, 24, 32, 42, 70, 84]


def test_the_table_is_aligned_and_in_human_units(capsys):
    out, err = call(capsys, "--size", "400m", "--seq-len", "4096")
    title, blank, header, *body = out.splitlines()
    assert "405,406,720 parameters (total)" in title and "4,096 tokens" in title and not blank and not err
    assert header.split()[:8] == ["n_layer", "d_model", "heads", "head_dim", "d_ff", "ratio", "total", "backbone"]
    assert len(body) == 7 and {len(line) for line in body} == {len(header)}
    for text in ("2.98 T", "304 MiB", "76.00", "407 M", "284 M"):
        assert text in body[0]
    assert "+0.0 %" in body[2] and "!" not in out


def test_one_row_says_how_far_it_is_from_what_was_asked(capsys):
    out, _ = call(capsys, "--ratio", "32")
    assert out.splitlines()[-1] == "asked for ratio 32, got 30.40 (-5.0 %)"


def test_the_sequence_length_moves_prefill_and_cache_but_not_training(capsys):
    short, long = (rows(capsys, "--ratio", "32", "--seq-len", length)[0] for length in ("256", "512"))
    assert long["kv_cache_bytes"] == 2 * short["kv_cache_bytes"] and long["prefill_flops"] > 2 * short["prefill_flops"]
    assert long["train_flops"] == short["train_flops"]


def test_a_design_that_leaves_the_tolerance_is_marked(capsys, heavy):
    marked, plain = rows(capsys, "--size", "400m", "--arch", "heavy"), rows(capsys, "--size", "400m")
    for with_extra, without in zip(marked, plain, strict=True):
        assert with_extra["n_layer"] == without["n_layer"] and with_extra["over_budget"] is True
        assert with_extra["params_extra"] == without["params_backbone"] // 6
        assert with_extra["params_total"] == without["params_total"] + with_extra["params_extra"]
    out, _ = call(capsys, "--size", "400m", "--arch", "heavy")
    assert sum(line.endswith("!") or " % !" in line for line in out.splitlines()) == 7 and "--count-extras" in out


def test_flops_include_the_designs_own(capsys, heavy):
    ours, plain = rows(capsys, "--arch", "heavy", "--ratio", "16"), rows(capsys, "--ratio", "16")
    extra = plain[0]["params_backbone"] // 6
    assert ours[0]["prefill_flops"] - plain[0]["prefill_flops"] == 2 * 256 * extra
    assert ours[0]["train_flops_per_token"] - plain[0]["train_flops_per_token"] == 6 * extra


def test_options_of_a_design_change_what_it_adds(capsys, heavy):
    default, halved = (rows(capsys, "--arch", "heavy", "--ratio", "16", *more)[0] for more in ([], ["--arch.share=12"]))
    assert halved["params_extra"] == pytest.approx(default["params_extra"] / 2, abs=1)
    assert halved["prefill_flops"] < default["prefill_flops"]


def test_counting_extras_brings_it_back_into_the_budget(capsys, heavy):
    counted = rows(capsys, "--size", "400m", "--arch", "heavy", "--count-extras")
    assert len(counted) == 7
    for row in counted:
        assert row["over_budget"] is False and abs(row["params_total"] / 405_406_720 - 1) <= 0.035


def test_a_rung_out_of_reach_does_not_hide_the_others(capsys):
    out, err = call(capsys, "--tolerance", "0.005", "--json")
    assert [row["n_layer"] for row in json.loads(out)] == [8, 13, 21]
    assert len(err.splitlines()) == 2 and all("left out: no nano shape within 0.5 %" in line for line in err.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "0"], "--ratio must be a positive number, not 0"),
        (["--ratio", "-3"], "--ratio must be a positive number, not -3"),
        (["--ratio", "nan"], "--ratio must be a positive number, not nan"),
        (["--ratio=-inf"], "--ratio must be a positive number, not -inf"),
        (["--ratio", "wide"], "--ratio must be a positive number, not wide"),
        (
            ["--ratio", "5000"],
            "no nano shape within 3.5 % of 2,000,000 parameters (total) has an aspect ratio near 5000: the nearest reachable is 276",
        ),
        (["--size", "400"], "unknown size '400': did you mean '400m'?"),
        (["--budget", "totl"], "unknown budget 'totl': did you mean 'total'?"),
        (["--tolerance", "much"], "--tolerance must be a positive number, not much"),
        (["--tolerance", "3.5"], "tolerance must be a fraction below 1, not 3.5"),
        (["--seq-len", "0"], "--seq-len must be a positive number, not 0"),
        (["--seq-len", "1.5"], "--seq-len is '1.5', no whole number"),
        (["--count-extras"], "--count-extras needs --arch NAME"),
        (["--arch", "heavi"], "unknown design 'heavi': did you mean 'heavy'?"),
        (["--arch", "heavy", "--arch.shere", "3"], "unknown option 'shere': did you mean 'share'?"),
        (["--arch", "heavy", "--arch.share", "many"], "share cannot be 'many': give a whole number (what it adds is one of so many parts"),
        (["--arch", "heavy", "--arch.share=0"], "share is 0: give a whole number of at least 1"),
        (["--arch", "heavy", "--arch.share"], "--arch.share needs a value"),
        (["--arch.share", "3"], "--arch.share needs --arch NAME"),
    ],
)
def test_mistakes_are_one_line(capsys, heavy, arguments, message):
    with pytest.raises(UserError) as error:
        call(capsys, *arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")
