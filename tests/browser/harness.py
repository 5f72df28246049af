"""The dashboard as a user has it: `depthbench app` in a process of its own, and Chromium looking at it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = {"runs": "", "scaling": "scaling", "layers": "layers"}
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# A Plotly figure is drawn when it holds data and something of it is on the page: a line, a marker or the image of a heatmap.
DRAWN = """() => [...document.querySelectorAll('.js-plotly-plot')].some(plot => (plot.data || []).length
    && plot.querySelector('.scatterlayer path.js-line[d], .scatterlayer path.point, .heatmaplayer image'))"""


def missing() -> str | None:
    """What a browser test lacks on this machine, or None."""
    if not (shutil.which("chromium") or shutil.which("chromium-browser")):
        return "Debian's chromium is not installed (apt-get install chromium)"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed (pip install 'depthbench[test]')"
    return None


@contextmanager
def serve(runs: Path, home: Path) -> Iterator[str]:
    """`depthbench app` over ``runs`` for a user who never ran Streamlit; yields its address, ends it by Ctrl-C.

    Raises AssertionError with the program's output where it does not come up, asks something, or does not end cleanly.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "depthbench", "app", "--runs", str(runs), "--port", str(port), "--no-browser"]
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    log = home / "app.log"
    with log.open("w") as out:
        app = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=home)
        try:
            address = f"http://localhost:{port}"
            _wait_until_up(f"{address}/_stcore/health", app, log)
            assert address in log.read_text()
            yield address
            app.send_signal(signal.SIGINT)
            app.wait(timeout=30)
        finally:
            app.kill()
            app.wait()
    said = log.read_text()
    assert app.returncode in (0, 130), said
    assert "Traceback" not in said and "mail" not in said.lower(), said


def _wait_until_up(url: str, app: subprocess.Popen, log: Path) -> None:
    for _ in range(300):
        assert app.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the dashboard did not come up: {log.read_text()}")


@contextmanager
def chromium() -> Iterator:
    """A Playwright browser."""
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


def look(page, address: str, path: str) -> None:
    """Open a page of the dashboard and wait until its figure is drawn and nothing is running any more."""
    page.goto(f"{address}/{path}")
    page.wait_for_function(DRAWN, timeout=60_000)
    page.wait_for_selector("[data-testid=stStatusWidget]", state="detached", timeout=60_000)
    height = page.evaluate("document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight")
    page.set_viewport_size({"width": page.viewport_size["width"], "height": height})  # all of it: the page scrolls in a box of its own
    page.wait_for_timeout(500)  # fonts and the figure's own resizing
