"""The report in a real browser: every figure is drawn, light and dark, without a network and without an error."""

from __future__ import annotations

import os

import pytest

from depthbench.figures import report
from tests.browser import harness
from tests.figures.probe_rows import measured

INK = "() => getComputedStyle(document.querySelector('.plot .xtick text')).fill"


@pytest.mark.browser
def test_the_report_draws_itself_in_the_colours_of_the_reader(tmp_path):
    if reason := harness.missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    rows = measured(6, slots="streams")
    header = report.Header("hc", "hc-6", {}, [], "")
    (tmp_path / "report.html").write_text(report.page(header, report.sections(rows, "hc"), report.numbers(rows, "hc")), encoding="utf-8")

    with harness.chromium() as browser:
        page = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
        errors, asked = [], []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_function("document.documentElement.dataset.drawn")
        plots = page.locator(".plot").count()
        assert plots == 13 and page.locator(".plot .main-svg").count() >= plots
        assert page.evaluate("[...document.querySelectorAll('.plot')].every(plot => plot.querySelector('.trace, .heatmaplayer image'))")
        light = page.evaluate(INK)
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"({INK})() !== '{light}'")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1000
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.wait_for_function(f"({INK})() === '{light}'")
        widths = page.evaluate("[...document.querySelectorAll('.plot .main-svg:first-of-type')].map(svg => svg.clientWidth)")
        assert max(widths) <= 700, "a figure is wider than paper"
    assert errors == []
    assert asked == [(tmp_path / "report.html").as_uri()], "the page must load nothing"
