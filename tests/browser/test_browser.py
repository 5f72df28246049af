"""The whole way in a real browser: train a tiny run, open the dashboard on it, see it drawn on every page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.browser import harness

SHOWS = "text => document.querySelector('[data-testid=stMain]').textContent.includes(text)"


@pytest.mark.browser
def test_a_trained_run_is_seen_on_every_page(depthbench, tiny_corpus, tmp_path):
    if reason := harness.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    runs, home = tmp_path / "runs", tmp_path / "home"
    home.mkdir()
    trained = depthbench("fit", "--arch", "pre_ln", "--size", "pico", "--corpus", tiny_corpus, "--tokens", "40k", "--runs", runs)
    assert trained.returncode == 0, trained.stderr
    (run_id,) = [folder.name for folder in runs.iterdir() if not folder.name.startswith(".")]
    screenshots = Path(os.environ.get("DEPTHBENCH_SCREENSHOTS") or tmp_path / "screenshots")
    screenshots.mkdir(parents=True, exist_ok=True)

    with harness.serve(runs, home) as address, harness.chromium() as browser:
        page = browser.new_page(viewport={"width": 1360, "height": 1000})
        errors, hosts = [], set()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2] if request.url.startswith("http") else ""))
        for name, path in reversed(harness.PAGES.items()):  # the server's first visitor may come by a link to any page
            harness.look(page, address, path)
            page.wait_for_function(SHOWS, arg=run_id, timeout=60_000)  # a table draws its cells after the page
            assert "runs folder" in page.locator("[data-testid=stSidebar]").text_content(), f"{name} came without the router"
            page.screenshot(path=screenshots / f"{name}.png")
            assert not page.locator("[data-testid=stException], [data-testid=stAlert]").count(), f"{name} shows an error"
        harness.look(page, address, "runs")  # the first page has a name too
        assert not errors
        assert hosts <= {address.removeprefix("http://"), ""}, "the dashboard must work without a network"
