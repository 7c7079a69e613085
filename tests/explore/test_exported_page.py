"""The exported page in a real browser: every panel, every handle, and nothing in the console."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from outcore.explore import size_grid
from outcore.explore.page import explore_page
from outcore.explore.parts import ExploreSettings, explore_bundle
from tests.explore.browser import Browser, browser, needs_browser
from tests.explore.jobs import SMALL, line_of, write

pytestmark = needs_browser()

NAME = "<img src=x onerror=hurt=1>"
EVIL = SMALL.replace(
    "        self.head =", f'        self.add_module("{NAME}", nn.ReLU())\n        self.head ='
).replace(
    "b = self.second(a)", f'b = self.second(getattr(self, "{NAME}")(a))  # </script><script>window.hurt=1</script>'
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = write(tmp_path_factory.mktemp("job"), EVIL)
    settings = ExploreSettings(str(path), machine="2xv100", devices=2, seconds=60.0, search_s=0.03)
    few = {"_MOST_BATCHES": 4, "_MOST_IMAGES": 3}  # of the sizes that are predicted ahead
    with mock.patch.multiple(size_grid, **few):
        return explore_bundle(settings)


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as made:
        yield made


@pytest.fixture
def page(window: Browser, bundle: dict[str, Any], tmp_path: Path) -> Iterator[Browser]:
    file = tmp_path / "page.html"
    file.write_text(explore_page(bundle), encoding="utf-8")
    window.driver.get(file.as_uri())
    window.until("document.querySelector('.figure') !== null")
    yield window
    assert window.complaints() == []
    assert window.ask("window.hurt === undefined")


def number(text: str) -> float:
    found = re.match(r"[\d,.]+", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


def test_handles_change_the_prediction_at_once(page: Browser, bundle: dict[str, Any]) -> None:
    own = bundle["sizes"]["cells"]["4x64"]
    rate = number(page.text(".throughput .figure"))
    assert rate == pytest.approx(4 / own["step_s"], rel=0.01)
    page.drag(".grid-charts .size:nth-child(1) .knob", 60)
    batch = number(page.text(".grid-charts .size:nth-child(1) .reading b"))
    assert batch > 4
    assert number(page.text(".throughput .figure")) > rate
    page.press(".grid-charts .size:nth-child(1) .knob", "\ue00c")  # Escape: back to the job's own
    assert page.text(".grid-charts .size:nth-child(1) .reading b") == "4"
    page.drag(".grid-charts .size:nth-child(2) .knob", 60)
    assert number(page.text(".grid-charts .size:nth-child(2) .reading b")) > 64
    assert number(page.text(".throughput .figure")) < rate
    assert "scaled here" in page.text(".verdict")
    page.click(".verdict .link")
    assert number(page.text(".throughput .figure")) == rate


def test_a_smaller_budget_shows_the_plan_that_meets_it(page: Browser, bundle: dict[str, Any]) -> None:
    points = bundle["plans"]["points"]
    assert "nothing to change" in page.text(".verdict")
    page.press(".wide-chart .knob", "\ue012")  # left: the next smaller plan
    assert points[1]["peak_bytes"] < points[0]["peak_bytes"]
    assert "With a plan" in page.text(".verdict")
    assert f"{points[1]['over_plain']:.3f}×" in page.text(".wide-chart .reading")
    assert "MiB -o plan.json" in page.text(".verdict code")
    page.click(".verdict > .link")
    assert "nothing to change" in page.text(".verdict")
    page.drag(".memory-bar .knob", -int(0.94 * page.ask("document.querySelector('.memory-bar').clientWidth")))
    assert "fits" in page.text(".verdict")  # 1 of 16 GiB is still more than it takes
    page("document.querySelector('.memory-bar .knob').focus()")
    page.press(".memory-bar .knob", *["\ue012"] * 12)
    assert "does not fit" in page.text(".verdict")


def test_axes_have_units_and_a_bar_of_policies_its_legend(page: Browser, bundle: dict[str, Any]) -> None:
    ticks = "[...document.querySelectorAll('{} .tick.{}')].map((t) => t.textContent)"
    for chart in (".grid-charts .size:nth-child(1)", ".grid-charts .size:nth-child(2)"):
        assert page.ask(ticks.format(chart, "title")) == ["samples/s"]
        assert page.ask(ticks.format(chart, "limit-name")) == ["capacity", "16.0 GiB"]
    sides = page.ask(ticks.format(".grid-charts .size:nth-child(2)", "middle"))
    assert len(sides) > 1 and all(side.endswith(" px") for side in sides)
    assert page.ask(ticks.format(".wide-chart", "title")) == ["time of a step / plain's"]
    assert all(re.fullmatch(r"[\d.]+ MiB", budget) for budget in page.ask(ticks.format(".wide-chart", "middle")))
    page.press(".wide-chart .knob", "\ue012")
    shown = {how: size for how, size in bundle["plans"]["points"][1]["blocks"][""].items() if size}
    assert page.count(".verdict .keys span") == len(shown) > 1
    assert page.count(".verdict .stack.policy div") == len(shown)
    page.click(".verdict > .link")


def test_no_two_colours_of_the_timeline_are_the_same(page: Browser) -> None:
    page.open("timeline")
    keys = page.ask(
        "[...document.querySelectorAll('.timeline > .keys i')].map((i) => getComputedStyle(i).backgroundColor)"
    )
    assert len(keys) == len(set(keys)) >= 3
    page.open("overview")


def test_lines_and_blocks_lead_to_each_other(page: Browser) -> None:
    page.open("code")
    line = line_of(EVIL, "a = self.first(image)")
    assert page.text(f"[data-line='{line}'] .source").strip() == "a = self.first(image)"
    page.click(f"[data-line='{line}']")
    assert "Line" in page.text(".code .side h2") and "first" in page.text(".code .side .row.block")
    page.click(".code .side .row.block")
    page.until("document.querySelector('.network .selected') !== null")
    assert page.ask("document.querySelector('.network .selected').dataset.part") == "first#0"
    assert "saved for backward" in page.text(".network .costs-box")
    page.click(".network .costs-box .link")
    assert page.ask("[...document.querySelectorAll('.line.marked')].map((l) => l.dataset.line).join()") == str(line)
    page.press(".lines", "\ue015")  # down
    assert page.ask("document.querySelector('.line.marked').dataset.line") == str(line_of(EVIL, "b = self.second"))
    assert "script" in page.text(f"[data-line='{line_of(EVIL, 'b = self.second')}'] .source")


def test_the_graph_opens_closes_and_is_coloured(page: Browser) -> None:
    page.open("graph")
    closed = page.count(".network .box")
    page.click(".network [data-do='expand']")
    assert page.count(".network .box") > closed
    page.click(".network [data-do='collapse']")
    assert page.count(".network .box") == closed
    fills = {}
    for shade in ("kind", "time", "memory", "policy", "stage"):
        page.click(f".network .choice [data-value='{shade}']")
        fills[shade] = page.ask(
            "[...document.querySelectorAll('.network .box > rect')].map((r) => getComputedStyle(r).fill).join()"
        )
    assert len(set(fills.values())) == 5
    page.press(".network .search input", "second")
    page.press(".network .search input", "\ue007")
    assert page.ask("document.querySelector('.network .selected').dataset.part") == "second#0"


def test_the_breakdown_zooms_and_has_every_form(page: Browser, bundle: dict[str, Any]) -> None:
    page.open("breakdown")
    assert page.count(".shape") > 8
    shapes = "[...document.querySelectorAll('.shape')]"
    widths = f"Object.fromEntries({shapes}.map((s) => [s.dataset.path, s.firstChild.getBBox().width]))"
    found, rows = page.ask(widths), bundle["costs"]["blocks"]["rows"]
    ratio = sum(rows["first"][:2]) / sum(rows["second"][:2])
    assert found["first"] / found["second"] == pytest.approx(ratio, rel=0.02)
    for metric in ("saved_bytes", "peak_bytes", "parameters", "time_s"):
        page.click(f".breakdown .choice [data-value='{metric}']")
        assert page.count(".shape") > 4
    page.click(".breakdown .choice [data-value='map']")
    assert page.count(".shape.leaf") > 4
    page.click(".breakdown .choice [data-value='flame']")
    second = "document.querySelector(\".shape[data-path='second']\")"
    page(f"{second}.dispatchEvent(new MouseEvent('click', {{ bubbles: true }}))")
    assert page.text(".crumbs").endswith("second") and page.count(".shape[data-path='first']") == 0
    page.press(".shapes", "\ue003")  # Backspace
    assert page.count(".shape[data-path='first']") == 1


def keep_downloads(page: Browser) -> None:
    """Have what a page offers to save in a variable."""
    page("delete window.saved; HTMLAnchorElement.prototype.click = () => {}")
    page("URL.createObjectURL = (blob) => { blob.text().then((t) => (window.saved = t)); return 'blob:none'; }")


def test_the_timeline_zooms_and_follows_the_plan(page: Browser, bundle: dict[str, Any]) -> None:
    page.open("timeline")
    assert "2 devices" in page.text(".timeline option")
    painted = "document.querySelector('.timeline canvas').toDataURL()"
    whole = page.ask(painted)
    page.press(".timeline canvas", "+", "+")
    closer = page.ask(painted)
    assert closer != whole
    page.press(".timeline canvas", "0")
    assert page.ask(painted) == whole
    page("const s = document.querySelector('.timeline select'); s.value = '1'; s.dispatchEvent(new Event('change'))")
    assert page.ask(painted) != whole and "simulated step" in page.text(".timeline .note")
    keep_downloads(page)
    page.click(".timeline .tools button:last-child")
    page.until("window.saved !== undefined")
    rows = json.loads(page.ask("window.saved"))["traceEvents"]
    assert {row["ph"] for row in rows} == {"M", "X", "C"} and all("pid" in row for row in rows)
    assert sum(row["ph"] == "X" for row in rows) == len(bundle["plans"]["points"][1]["timeline"]["events"])


def test_a_recorded_run_is_shown_below_its_prediction(page: Browser, bundle: dict[str, Any], tmp_path: Path) -> None:
    assert page.count("#tab-run") == 1
    page.open("run")
    assert "No run yet" in page.text(".run-body") and "outcore train" in page.text(".run-body code")
    measured = bundle["pipeline"]["timeline"]
    steps = {"step": [0, 1, 2], "loss": [0.7, 0.5, 0.4], "time_s": [0.1, 0.1, 0.1]}
    recorded = measured | {"step_s": measured["step_s"] * 1.25}
    run = {"ended": None, "folder": "runs/<b>x", "steps": steps, "position": {"step": 3}, "recorded": recorded}
    file = tmp_path / "run.html"
    file.write_text(explore_page({**bundle, "run": run, "predicted_run": measured}), encoding="utf-8")
    page.driver.get(file.as_uri())
    page.open("run")
    assert "going on" in page.text(".run-head") and "runs/<b>x" in page.text(".run-head")
    assert page.count(".run-charts .chart") == 2
    page.click(".run-body .act")
    assert "1.25× the prediction" in page.text(".timeline .note")
    keep_downloads(page)
    page.click(".timeline .tools button:last-child")
    page.until("window.saved !== undefined")
    named = {row["args"]["name"] for row in json.loads(page.ask("window.saved"))["traceEvents"] if row["ph"] == "M"}
    assert {"rank 0 predicted", "rank 0 measured", "rank 1 measured"} <= named


def test_keys_alone_reach_every_panel_and_what_is_in_it(page: Browser) -> None:
    down, right, enter, back = "\ue015", "\ue014", "\ue007", "\ue003"
    for i, tab in enumerate(("overview", "code", "graph", "breakdown", "timeline", "plan", "run"), start=1):
        page.press("body", str(i))
        assert page.ask(f"document.getElementById('panel-{tab}').hidden") is False
        clickable = "button:not([tabindex]), a[href], input, select, [tabindex='0'], .knob"
        assert page.count(f"#panel-{tab} :is({clickable})") > 0
    page.press("body", "4")
    page.press(".breakdown .shapes", down)
    marked = page.ask("document.querySelector('.shape.marked').dataset.path")
    page.press(".breakdown .shapes", right if marked == "first" else down)
    assert page.ask("document.querySelector('.shape.marked').dataset.path") != marked
    page.press(".breakdown .shapes", enter)
    assert page.text(".crumbs").count("›") >= 1
    page.press(".breakdown .shapes", back)
    page.press("body", "3")
    page.press("body", "e", right)
    assert page.ask("document.querySelector('.network .selected') !== null")
    page.press("body", "6")
    page.press(".plan-list", down)
    assert page.ask("document.querySelectorAll('.plan-row')[1].getAttribute('aria-selected')") == "true"


def test_the_plan_shows_blocks_and_commands(page: Browser, bundle: dict[str, Any]) -> None:
    page.press("body", "6")
    points = bundle["plans"]["points"]
    assert page.count(".plan-row") == len(points)
    page.click(".plan-row", len(points) - 1)
    assert f"{points[-1]['over_plain']:.3f}× the time" in page.text(".plan-head h3")
    rows = page.count(".plan-block")
    page.click(".plan-block .opener[aria-expanded='false']")
    assert page.count(".plan-block") > rows
    assert page.count(".plan-block select") == 0  # an exported page is read-only
    assert "outcore verify" in page.text(".plan .side")
    keep_downloads(page)
    page.click(".plan .act.main")
    page.until("window.saved !== undefined")
    assert page.ask("JSON.parse(window.saved).policy") == points[-1]["document"]["policy"]


@pytest.mark.slow
def test_it_is_usable_on_a_small_and_a_wide_screen(page: Browser) -> None:
    for width, height in ((1024, 700), (2200, 1200)):
        page.driver.set_window_size(width, height)
        for tab in ("overview", "code", "graph", "breakdown", "timeline", "plan"):
            page.open(tab)
            assert page.ask("document.documentElement.scrollWidth <= innerWidth"), (tab, width)
    page.driver.set_window_size(1366, 768)


def test_a_narrow_window_is_not_scrolled_sideways(page: Browser) -> None:
    wide = page.driver.get_window_size()
    page.open("overview")
    try:
        page.driver.set_window_size(500, 900)
        assert page.ask("window.innerWidth") <= 520
        assert page.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        rows = "[...document.querySelectorAll('.hot .row > *')]"
        assert page.ask(f"{rows}.every(e => e.getBoundingClientRect().right <= document.documentElement.clientWidth)")
    finally:
        page.driver.set_window_size(wide["width"], wide["height"])
