"""The wheel, installed elsewhere, is the whole product: verbs, dashboard, sizes and the paper's numbers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.xdist_group("packaging")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        "--wheel-dir",
        str(folder),
        str(REPOSITORY),
    ]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (built,) = folder.glob("depthbench-*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory):
    """Runs the installed package's command line in a folder where the repository is out of sight."""
    site = tmp_path_factory.mktemp("site")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True, text=True)
    away = tmp_path_factory.mktemp("away")
    # An editable install of the checkout would come first on sys.path otherwise.
    code = f"import sys; sys.path = [{str(site)!r}] + [p for p in sys.path if p not in ('', {str(REPOSITORY)!r})]; "
    start = code + "from depthbench.cli import main; sys.exit(main(sys.argv[1:]))"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(site)}

    def popen(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", start, *arguments], cwd=away, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return popen


def test_the_wheel_holds_app_conf_and_the_papers_numbers(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"depthbench/app/main.py", "depthbench/conf/sizes.yaml", "depthbench/conf/recipes.yaml", "depthbench/conf/paper.json"} <= names
    assert {"depthbench/app/views/runs.py", "depthbench/app/views/scaling.py", "depthbench/app/views/layers.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "runs/", "app/", "conf/"))]


def test_shapes_works_elsewhere(elsewhere):
    process = elsewhere("shapes", "--size", "400m", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert [row["n_layer"] for row in json.loads(out)] == [16, 20, 24, 28, 32, 42, 70]


def test_the_dashboard_answers_elsewhere(elsewhere):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = elsewhere("app", "--port", str(port), "--no-browser")
    try:
        assert health(port, process) == "ok"
    finally:
        process.terminate()
        process.communicate(timeout=30)


def health(port: int, process: subprocess.Popen) -> str:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5).read().decode().strip()
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the dashboard did not start: {process.communicate(timeout=30) if process.poll() is not None else 'no answer'}")
