"""What figures may know."""

from __future__ import annotations

import subprocess
import sys


def test_figures_know_no_torch_and_no_streamlit():
    code = (
        "import sys, depthbench.figures.curves, depthbench.figures.layers, depthbench.figures.report, depthbench.figures.scaling\n"
        "print([m for m in ('torch', 'lightning', 'streamlit', 'duckdb') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
