"""The report's page: every figure with its help and definition, what is not defined or not measured said in words, nothing loaded."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from depthbench.figures import catalogue, report
from tests.figures.probe_rows import measured, row

HEADER = report.Header(
    title="pre_ln <wide>, 4 blocks",
    run_id="pre_ln-4",
    facts={"design": "pre_ln <wide>", "corpus": "embedded"},
    repeat=["depthbench fit --config runs/pre_ln-4/config.yaml"],
    missing="depthbench probe pre_ln-4",
    links={"causal": {"CSV": "report/causal.csv"}},
)


def page(rows, arch="pre_ln") -> str:
    return report.page(HEADER, report.sections(rows, arch), report.numbers(rows, arch))


def body(text: str) -> str:
    """What a reader sees: without plotly.js, the figures' data and the style."""
    return re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)


class Balance(HTMLParser):
    """Collects ids and addresses, and holds that every element is closed in its turn."""

    VOID = {"meta", "br", "link", "img"}

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.addresses = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name in ("src", "href"):
                self.addresses.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text: str) -> Balance:
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def whole() -> str:
    return page(measured(4))


def test_the_page_is_whole_and_loads_nothing(whole):
    found = parsed(whole)
    assert len(found.ids) == len(set(found.ids))
    local = [address for address in found.addresses if not address.startswith("#")]
    assert local == ["report/causal.csv"]
    assert {address[1:] for address in found.addresses if address.startswith("#")} <= set(found.ids)
    assert "@import" not in whole.split("</style>")[0] and "url(" not in whole.split("</style>")[0]
    assert whole.count("plotly.js v") == 1, "plotly.js is inside, once"


def test_every_figure_has_its_data_its_help_and_its_definition(whole):
    seen = body(whole)
    for probe in catalogue.PROBES:
        if probe.name != "transport":
            assert probe.definition in seen
            for drawing in probe.drawings:
                assert drawing.title in seen and drawing.reading in seen
                data = re.search(rf'<script type="application/json" id="figure-{drawing.name}-data">(.*?)</script>', whole, re.DOTALL)
                assert json.loads(data[1])["data"]


def test_texts_are_plain_text_and_cannot_break_the_page():
    rows = measured(2)
    rows.loc[rows["probe"] == "transport", "note"] = "no <b>mixing</b></script>"
    rows["rule"] = rows["rule"].where(rows["rule"].isna(), "</script><i>")
    text = page(rows)
    parsed(text)
    assert "pre_ln &lt;wide&gt;" in text and "<wide>" not in text
    assert "no &lt;b&gt;mixing" in text and "</script><i>" not in text


def test_skip_rules_are_named_in_titles_and_numbers():
    seen = body(page(measured(4, slots="sources", rules=("reference", "renormalise")), arch="full_attnres"))
    assert "without block s (skip rules: reference, renormalise)" in seen
    lines = re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td class="number">(.*?)</td><td class="number">(.*?)</td>', seen)
    assert ("late pairs with a causal score above 0.45", "reference", "25.0%", "16%") in lines
    assert ("late pairs with a causal score above 0.45", "renormalise", "50.0%", "16%") in lines
    assert ("late pairs with a permutation score above 0.15", "–", "50.0%", "46%") in lines
    assert ("first blocks that do not read the running sum", "–", "1", "–") in lines


def test_the_papers_numbers_stand_beside_ours_only_for_its_designs(whole):
    assert "paper, 400M at 32 layers" in whole
    assert "paper, 400M at 32 layers" not in page(measured(2), arch="my_module.MyDesign")


def test_what_is_not_defined_is_a_sentence_with_the_reason_and_no_figure(whole):
    assert "<b>Not defined:</b> one stream: nothing is mixed." in whole
    assert 'id="figure-transport' not in whole
    assert re.search(r'<a href="#transport">.*?</a> <span class="quiet">not defined</span>', whole)
    sources = page(measured(3, slots="sources"))
    assert "<b>Not defined:</b> a block reads all sources." in sources and 'id="figure-depth_weights"' in sources


def test_what_was_not_measured_is_listed_with_the_command(whole):
    assert "Not measured" not in whole
    rows = measured(4)
    text = page(rows[~rows["probe"].isin(["permutation", "norms"])])
    assert "depthbench probe pre_ln-4 --probes permutation,norms" in text
    assert "Permutation map" in body(text) and 'id="figure-permutation"' not in text
    assert '<a href="#missing">Not measured</a> <span class="quiet">2</span>' in text


def test_remarks_say_how_much_was_measured_and_what_was_left_out():
    rows = measured(2)
    rows.loc[len(rows)] = row("angular", "zero_vectors", 3.0, 1)
    rows.loc[(rows["probe"] == "norms") & (rows["i"] == 1), "value"] = float("nan")
    rows.loc[rows["probe"] == "paths", "note"] = "with unit gains"
    found = {part.probe.name: part.remarks for part in report.sections(rows, "pre_ln")}
    assert found["angular"] == ["512 tokens", "3 zero vectors have no angle and were left out"]
    assert found["norms"][1] == "3 of 8 values are not finite"
    assert found["paths"] == ["512 tokens", "with unit gains"]


def test_equal_values_are_said_in_words(whole):
    assert "Here all values are 1." in whole


def test_a_number_that_is_not_finite_is_a_dash():
    rows = measured(4)
    rows.loc[rows["metric"] == "late_fraction", "value"] = float("nan")
    assert set(report.numbers(rows, "pre_ln").query("metric == 'late_fraction'")["shown"]) == {"–"}


def test_a_run_that_diverged_has_its_page_too():
    rows = measured(4)
    rows.loc[rows["status"] == "ok", "value"] = float("nan")
    assert "Here all values are nan." in page(rows)


def test_a_picture_is_on_white_with_its_title():
    (drawn,) = [d for part in report.sections(measured(2), "pre_ln") for d in part.drawn if d.drawing.name == "pruning"]
    picture = report.on_paper(drawn, "run-1")
    assert picture.layout.paper_bgcolor == "white" and "Pruning" in picture.layout.title.text and "run-1" in picture.layout.title.text
    assert drawn.figure.layout.title.text is None, "the page's own figure stays as it is"


def test_a_deep_network_fits_a_page_of_8_megabytes():
    assert len(page(measured(70, slots="streams", rules=("a", "b"))).encode()) < 8e6
