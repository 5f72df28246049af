"""Designs by name, by dotted name and by class; the errors of a user who misspells one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from depthbench import build_model, residuals
from depthbench.errors import UserError
from depthbench.residuals.pre_ln import PreLN

TINY = dict(n_layer=1, d_model=8, n_head=2, vocab_size=7)


def test_every_name_gives_a_design_and_the_baseline_comes_first():
    assert residuals.names()[0] == "pre_ln"
    designs = [residuals.get(name) for name in residuals.names()]
    assert designs[0] is PreLN
    assert len(set(designs)) == len(designs)


def test_listing_names_imports_no_torch():
    code = "import sys; from depthbench import residuals; residuals.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_new_file_in_the_folder_is_a_new_design(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text("from depthbench.residuals.base import SingleStream\nclass Half(SingleStream):\n    pass\n")
    (tmp_path / "_helper.py").write_text("")
    monkeypatch.setattr(residuals, "__path__", [*residuals.__path__, str(tmp_path)])
    assert "half" in residuals.names() and "_helper" not in residuals.names()
    assert residuals.get("half").__name__ == "Half"


def test_a_class_and_a_dotted_name_serve_as_well():
    assert residuals.get(PreLN) is PreLN
    assert residuals.get("depthbench.residuals.pre_ln.PreLN") is PreLN


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_designs.py").write_text("from depthbench.residuals.pre_ln import PreLN\nclass Mine(PreLN):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert build_model("my_designs.Mine", **TINY).residual.__class__.__name__ == "Mine"
    del sys.modules["my_designs"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pre_lm", "unknown design 'pre_lm': did you mean 'pre_ln'?"),
        ("no_such_module_here.Mine", "no module 'no_such_module_here'"),
        ("depthbench.residuals.pre_ln.PostLN", "'PostLN' in 'depthbench.residuals.pre_ln' is no design"),
        ("depthbench.errors.UserError", "is no design"),
        (".PreLN", "names no class"),
        ("pre_ln.", "names no class"),
        (7, "not 7"),
        (int, "subclass of Residual"),
    ],
)
def test_a_wrong_name_is_one_line(name, says):
    with pytest.raises(UserError) as error:
        residuals.get(name)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_fault_inside_the_users_module_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "broken_designs.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        residuals.get("broken_designs.Mine")


class WithOptions(PreLN):
    def __init__(self, config, *, gain=1.0, streams=4):
        super().__init__(config)
        self.gain = gain


def test_options_reach_the_constructor_and_unknown_ones_are_named():
    assert build_model(WithOptions, **TINY, gain=3.0).residual.gain == 3.0
    with pytest.raises(UserError, match=r"unknown option 'gian': did you mean 'gain'\? \(known: gain, streams\)"):
        build_model(WithOptions, **TINY, gian=3.0)
    with pytest.raises(UserError, match="unknown option 'gain': PreLN takes none"):
        build_model("pre_ln", **TINY, gain=3.0)
