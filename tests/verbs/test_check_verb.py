"""`depthbench check`, as a user calls it on a design of their own."""

from __future__ import annotations

import sys
import textwrap

import pytest

from depthbench import contract

SOUND = """
    import torch
    from torch import nn
    from depthbench.errors import UserError
    from depthbench.residuals.base import SingleStream, Stream

    class Scaled(SingleStream):
        '''x + s F(N(x)).

        start: s at initialisation
        '''

        def __init__(self, config, *, start: float = 0.5) -> None:
            super().__init__(config)
            if start <= 0:
                raise UserError(f"start is {start}: give a number above 0")
            self.start = start
            self.scale = nn.Parameter(torch.empty(config.n_sublayer))

        def reset_parameters(self):
            nn.init.constant_(self.scale, self.start)

        def write(self, state, carry, branch_out, emitted, *, sublayer):
            return Stream(state.x + self.scale[sublayer] * branch_out)

        def swap_parameters(self, blocks, *, block):
            return super().swap_parameters(blocks, block=block) | {"scale": self.scale[2 * block : 2 * block + 2]}

        def linear(self, state, *, sublayer, branch_out=None):
            return None

        @classmethod
        def params_extra(cls, shape, **options):
            return 2 * shape.n_layer
"""
BROKEN = """
    from scaled import Scaled

    class Broken(Scaled):
        def write(self, state, carry, branch_out, emitted, *, sublayer):
            return super().write(state, carry, branch_out.no_such_thing, emitted, sublayer=sublayer)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's current folder, with two designs in it; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("scaled.py", SOUND), ("broken.py", BROKEN)):
        (tmp_path / name).write_text(textwrap.dedent(text))
    yield tmp_path
    for name in ("scaled", "broken", "faulty"):
        sys.modules.pop(name, None)


def test_a_sound_design_in_the_users_folder_passes(depthbench, folder):
    """All but the two slow checks, which tests/test_new_design_doc.py lets a user's design take."""
    quick = [name for name in contract.CHECKS if name not in ("compiled_equals_eager", "two_processes_equal_one")]
    process = depthbench("check", "scaled.Scaled", "--arch.start", "0.25", "--only", ",".join(quick), cwd=folder)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = process.stdout.splitlines()
    verdicts = [(name, verdict.strip()) for verdict, name in (line.rsplit(maxsplit=1) for line in lines if len(line.split()) > 1)]
    assert [pair for pair in verdicts if pair[0] in contract.CHECKS] == [
        (name, "not defined" if name == "the_linear_form_composes" else "ok") for name in quick
    ]
    assert "linear gives None: path weights are recorded as not defined" in process.stdout
    assert lines[-1].startswith(f"scaled.Scaled --arch.start 0.25: {len(quick) - 1} ok, 0 failed, 1 not defined (")
    assert process.stderr == ""


def test_what_the_users_code_raises_is_named_by_its_line(says, folder):
    code, out, _ = says("check", "broken.Broken", "--only", "is_causal, states_are_never_changed")
    assert code == 1
    assert out.splitlines()[:-1] == [
        "function",
        "  FAILED       is_causal",
        "               AttributeError: 'Tensor' object has no attribute 'no_such_thing'",
        "               broken.py:6, in write: return super().write(state, carry, branch_out.no_such_thing, emitted, sublayer=sublayer)",
        "state",
        "  FAILED       states_are_never_changed, as above",
        "",
    ]
    assert out.splitlines()[-1].startswith("broken.Broken: 0 ok, 2 failed (")
    _, whole, _ = says("check", "broken.Broken", "--only", "is_causal", "--traceback")
    assert "Traceback (most recent call last)" in whole and "in _step" in whole


def test_a_broken_contract_is_a_number_and_an_exit_code(says):
    code, out, _ = says("check", "tests.contract.test_broken.Miscounts", "--only", "extra_parameters_equal_their_formula")
    assert code == 1
    assert "FAILED       extra_parameters_equal_their_formula" in out
    assert "params_extra says 7 at 3 blocks of width 16, the model has 6 beyond Pre-LN's" in out
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hcc"], "unknown design 'hcc': did you mean 'hc'?"),
        (["pre_ln", "--only", "is_casual"], "unknown check 'is_casual': did you mean 'is_causal'?"),
        (["pre_ln", "--arch.streams", "2"], "unknown option 'streams': PreLN takes none"),
        (["hc", "--arch.streams", "many"], "streams cannot be 'many': give a whole number"),
        (["hc", "--arch.streams", "0"], "streams is 0: give a whole number from 1 to 64"),
        (["nowhere.Design"], "no module 'nowhere' for design 'nowhere.Design'"),
        ([], "the following arguments are required: ARCH"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(says, arguments, message):
    code, out, err = says("check", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"depthbench: {message}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "faulty.Design cannot be imported: ZeroDivisionError: division by zero, at faulty.py:1, in <module>: 1 / 0"),
        ("def f(:", "faulty.Design cannot be imported: SyntaxError: invalid syntax (faulty.py, line 1)"),
        ("class Design: pass", "'Design' in 'faulty' is no design: it must be a subclass of depthbench.residuals.base.Residual"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(says, folder, text, message):
    (folder / "faulty.py").write_text(text)
    assert says("check", "faulty.Design") == (2, "", f"depthbench: {message}\n")
    assert says("archs", "--arch", "faulty.Design") == (2, "", f"depthbench: {message}\n")


def test_the_whole_traceback_of_an_import_is_there_for_the_asking(says, folder):
    (folder / "faulty.py").write_text("1 / 0")
    code, _, err = says("check", "faulty.Design", "--traceback")
    assert code == 2 and err.startswith("Traceback") and err.splitlines()[-1].startswith("depthbench: faulty.Design cannot be imported")


OWN = """
    from depthbench.residuals.base import Residual, SingleStream, Stream

    class Bare(Residual):
        pass

    class Stateless(SingleStream):
        def write(self, state, carry, branch_out, emitted, *, sublayer):
            raise ValueError("no state")

    class Uncounted(SingleStream):
        @classmethod
        def params_extra(cls, shape, **options):
            return shape.no_such_thing

    class Wordy(SingleStream):
        @classmethod
        def params_extra(cls, shape, **options):
            return "many"

    class Positional(SingleStream):
        def __init__(self, config, lanes):
            super().__init__(config)
"""


@pytest.mark.parametrize(
    ("design", "message"),
    [
        ("Bare", "design faulty.Bare: MissingMethod: Bare lacks the method open"),
        ("Stateless", "design faulty.Stateless: ValueError: no state, at faulty.py:9, in write: raise ValueError"),
        ("Uncounted", "design faulty.Uncounted: AttributeError: 'Shape' object has no attribute 'no_such_thing'"),
        ("Wordy", "params_extra of design Wordy gives 'many': it must be a whole number"),
        ("Positional", "Positional takes lanes by position, but options are keywords: write __init__(self, config, *, lanes)"),
    ],
)
def test_what_a_users_design_raises_in_training_is_one_line(says, folder, tiny_corpus, design, message):
    (folder / "faulty.py").write_text(textwrap.dedent(OWN))
    few = ("--size", "pico", "--ratio", "18", "--tokens", "4096", "--corpus", tiny_corpus, "--trainer.accelerator", "cpu")
    code, _, err = says("fit", "--arch", f"faulty.{design}", *few)
    assert code == 2
    assert err.startswith(f"depthbench: {message}") and err.count("\n") == 1


def test_a_fault_of_ours_keeps_its_traceback(says, folder, monkeypatch):
    assert says("archs", "--arch", "scaled.Scaled")[0] == 0
    monkeypatch.setattr("depthbench.verbs.archs.describe", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        says("archs", "--arch", "scaled.Scaled")
