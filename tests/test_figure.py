"""Axes, ticks and legends: round numbers, one unit for an axis, no colour with two meanings."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from outcore.figure import COLOURS, Axes, Span, bytes_unit, document, legend, time_unit


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 1.07), (0.0, 7.16), (3.0, 3e6), (-2.0, 5.0)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = Span(low, high, "x").ticks()
    assert 2 <= len(ticks) <= 12 and all(low - 1e-9 <= t <= high + 1e-9 for t in ticks)
    assert all(len(re.sub(r"[-.0]|e.*", "", f"{t:g}")) <= 4 for t in ticks)


def test_logarithmic_ticks_are_one_two_and_five() -> None:
    assert Span(0.03, 0.7, "loss", log=True).ticks() == pytest.approx([0.05, 0.1, 0.2, 0.5])
    assert Span(1e-6, 1.0, "loss", log=True).ticks() == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0])


def test_a_unit_suits_the_largest_value() -> None:
    units = [bytes_unit(n)[1] for n in (200, 3 << 10, 9 << 20, 1 << 30, 5 << 40)]
    assert units == ["bytes", "KiB", "MiB", "GiB", "TiB"]
    assert [time_unit(s)[1] for s in (2e-8, 3e-5, 0.004, 12.0)] == ["ns", "µs", "ms", "s"]


def test_a_picture_is_well_formed_and_names_its_axes() -> None:
    axes = Axes(50, 20, 300, 200, Span(0, 10, "step"), Span(0, 1, "loss <nats>"))
    keys, end = legend([("blue", "one"), ("orange", "another & more")], 50, 280, 120)
    drawn = [*axes.drawn(), axes.path([(0, 0), (10, 2)], "blue"), axes.point(1, 1, "orange"), *keys]
    picture = document(400, end, drawn)
    words = [e.text for e in ElementTree.fromstring(picture).iter() if e.tag.endswith("text")]
    assert {"step", "loss <nats>", "one", "another & more"} <= set(words)
    assert axes.at(10, 1) == (350, 20)


def test_no_two_colours_are_the_same() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_the_two_axes_meet_below_on_the_left_and_ticks_stand_at_their_values() -> None:
    axes = Axes(50, 20, 300, 200, Span(0, 10, "step"), Span(0, 1, "loss"))
    lines = [e for e in ElementTree.fromstring(document(400, 300, axes.drawn())).iter() if e.tag.endswith("line")]
    ends = [
        tuple(float(e.get(name, "")) for name in ("x1", "y1", "x2", "y2")) for e in lines if e.get("class") == "axis"
    ]
    assert {(50, 220, 350, 220), (50, 20, 50, 220)} <= set(ends)
    ticks = {axes.at(value, 0) for value in axes.x.ticks()}
    assert {(x, y) for x, y, other, _ in ends if x == other and (x, y) != (50, 20)} == ticks
