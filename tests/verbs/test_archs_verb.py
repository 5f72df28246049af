"""`depthbench archs`: a row per design, and one design with its options."""

from __future__ import annotations

import json

import pytest

from depthbench import residuals
from depthbench.cli import dispatch
from depthbench.errors import UserError


def test_there_is_a_row_for_every_design_and_every_cell_is_filled(capsys):
    assert dispatch(["archs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sorted(row["design"] for row in rows) == sorted(residuals.names())
    for row in rows:
        assert all(row[cell] for cell in ("family", "update", "weights", "reads", "source")), row
        assert "not stated" not in row.values()


def test_the_table_is_aligned_and_families_stand_together(capsys):
    assert dispatch(["archs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("design"))
    rows = lines[head + 1 : head + 1 + len(residuals.names())]
    start = lines[head].index("family")
    assert all(line[start - 1] == " " and line[start] != " " for line in rows)
    families = [line[start:].split("  ")[0] for line in rows]
    assert families[0] == "baseline"
    changes = sum(a != b for a, b in zip(families, families[1:], strict=False))
    assert changes == len(set(families)) - 1


def test_additions_are_counted_at_the_shape_asked_for(capsys):
    assert dispatch(["archs", "--size", "400m", "--ratio", "42.67", "--json"]) == 0
    keel = next(row for row in json.loads(capsys.readouterr().out) if row["design"] == "keel")
    assert keel["params_extra"] == (2 * 24 - 1) * 1024


def test_one_design_is_shown_with_its_options(capsys):
    assert dispatch(["archs", "--arch", "keel", "--arch.alpha", "3"]) == 0
    shown = capsys.readouterr().out
    assert "--arch.alpha 3.0" in shown and "lns" not in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arch", "kel"], "unknown design 'kel': did you mean 'keel'?"),
        (["--arch", "keel", "--arch.beta", "1"], "unknown option 'beta'"),
        (["--arch", "keel", "--arch.alpha", "deep"], "alpha cannot be 'deep': give a number or null"),
        (["--arch.alpha", "3"], "--arch.alpha needs --arch NAME"),
        (["--size", "nanno"], "unknown size 'nanno'"),
    ],
)
def test_mistakes_are_one_line(arguments, says):
    with pytest.raises(UserError) as error:
        dispatch(["archs", *arguments])
    assert says in str(error.value) and "\n" not in str(error.value)
