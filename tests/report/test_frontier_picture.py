"""The picture of a frontier: budget, plan and plain training lie where their bytes and times do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from outcore.figure import COLOURS
from outcore.program.policies import parse_policies
from outcore.report import frontier as module
from outcore.report.frontier import frontier_json, frontier_svg

MIB = 2**20


def assignment(peak: int, extra_s: float, policy: dict[str, str]) -> Any:
    return SimpleNamespace(policy=parse_policies(policy), outcome=SimpleNamespace(peak_bytes=peak, extra_s=extra_s))


PLAIN, SMALL = assignment(100 * MIB, 0.0, {}), assignment(50 * MIB, 0.5, {"a": "recompute"})
STEP: Any = SimpleNamespace(
    plain=SimpleNamespace(peak_bytes=100 * MIB), plain_s=1.0, floor=(20 * MIB, "conv"), resolved=lambda policy: policy
)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> ElementTree.Element:
    monkeypatch.setattr(module, "policy_counts", lambda keeping, one: "one recomputed")
    return ElementTree.fromstring(frontier_svg(STEP, [PLAIN, SMALL], name="net", budget_bytes=80 * MIB, chosen=SMALL))


def test_everything_lies_where_its_bytes_and_time_do(root: ElementTree.Element) -> None:
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    places = {e.attrib["fill"]: (float(e.attrib["cx"]), float(e.attrib["cy"])) for e in circles}
    (plain_x, plain_y), (small_x, small_y) = places[COLOURS["grey"]], places[COLOURS["orange"]]
    assert places[COLOURS["blue"]] == (small_x, small_y) and small_y < plain_y, "slower is higher"
    lines = {e.attrib["class"]: float(e.attrib["x1"]) for e in root.iter() if e.get("class") in ("limit", "least")}
    per_mib = (plain_x - small_x) / 50
    assert lines["limit"] == pytest.approx(plain_x - 20 * per_mib, abs=0.2)
    assert lines["least"] == pytest.approx(plain_x - 80 * per_mib, abs=0.2)


def test_the_legend_names_what_is_drawn(root: ElementTree.Element) -> None:
    words = [e.text for e in root.iter() if e.tag.endswith("text")]
    for said in ("plain training", "this plan, 1.50x", "budget, 80.0 MiB", "what one operation alone needs"):
        assert said in words
    without = ElementTree.fromstring(frontier_svg(STEP, [PLAIN], name="net", budget_bytes=1000 * MIB))
    said = [e.text or "" for e in without.iter() if e.tag.endswith("text")]
    assert not any(w.startswith(("this plan", "budget")) for w in said), "a budget beyond the picture is not in it"


def test_rows_have_the_time_over_plain() -> None:
    row = frontier_json(STEP, [SMALL], plain_s=2.0)[0]
    assert (row["peak_bytes"], row["time_s"], row["over_plain"]) == (50 * MIB, 2.5, 1.25)
    assert frontier_json(STEP, [SMALL])[0]["over_plain"] == 1.5
