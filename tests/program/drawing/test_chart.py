"""A picture of a timeline says when each rank does what, and how much memory it holds meanwhile."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from outcore.figure import COLOURS
from outcore.program import chart, rich_gantt
from outcore.program.simulator.memory_curve import RankMemory
from outcore.program.timeline import COMPUTE, Event, Timeline

SVG = "{http://www.w3.org/2000/svg}"
MIB = 2**20
MEMORY = (
    RankMemory((0.0, 0.004, 0.008), (MIB, 4 * MIB, 0), 4 * MIB, 0.004, (0, 0, 0, 4 * MIB, 0, 0)),
    RankMemory((0.0, 0.002), (2 * MIB, MIB), 2 * MIB, 0.0, (0, 0, 0, 2 * MIB, 0, 0)),
)
EVENTS = (
    Event(0, COMPUTE, "forward", "F0", 0.0, 0.002, 0, 0),
    Event(0, COMPUTE, "forward", "F1", 0.002, 0.004, 0, 1, 1),
    Event(0, COMPUTE, "backward", "B0", 0.004, 0.006, 0, 0),
    Event(0, COMPUTE, "backward", "B1", 0.006, 0.007, 0, 1, 1),
    Event(0, COMPUTE, "step", "S", 0.007, 0.008),
    Event(0, "send", "send", "sent", 0.002, 0.003),
    Event(0, "copy out", "evict", "x", 0.003, 0.0035),
    Event(1, COMPUTE, "recompute", "again", 0.001, 0.0012, 1, 0),
    Event(1, COMPUTE, "forward", "nothing", 0.005, 0.005, 1, 0, 1),
    Event(1, COMPUTE, "forward", "F0", 0.006, 0.008, 1, 0, 1),
)


def drawn(timeline: Timeline, **options: int) -> ElementTree.Element:
    return ElementTree.fromstring(chart(timeline, **options))


def bars(root: ElementTree.Element) -> dict[str, tuple[float, float, float, float, str]]:
    """By the words of its tooltip: left, width, top, height and colour of each bar."""
    found = {}
    for box in root.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None and title.text:
            left, width, top, height = (float(box.attrib[key]) for key in ("x", "width", "y", "height"))
            found[title.text] = (left, width, top, height, box.attrib["fill"])
    return found


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_bars_lie_where_their_times_do_and_lanes_below_each_other() -> None:
    found = bars(drawn(Timeline("a step", EVENTS, MEMORY)))
    assert len(found) == len(EVENTS) - 1, "what took no time is not drawn"
    lanes = [
        box
        for box in drawn(Timeline("a step", EVENTS, MEMORY)).iter(f"{SVG}rect")
        if box.get("fill") == COLOURS["light"]
    ]
    left, width = float(lanes[0].attrib["x"]), float(lanes[0].attrib["width"])
    for event in EVENTS:
        if event.end_s > event.start_s:
            place = (left + width * event.start_s / 0.008, width * (event.end_s - event.start_s) / 0.008)
            shown = [bar[:2] for title, bar in found.items() if title.startswith(f"{event.name} ({event.stream})")]
            assert any(bar == pytest.approx(place, abs=0.01) for bar in shown)
    first, second = (next(bar for title, bar in found.items() if name in title) for name in ("F1 (", "again ("))
    network, copied = (next(bar for title, bar in found.items() if name in title) for name in ("sent (", "x ("))
    assert first[2] + first[3] <= network[2] == copied[2], "the network below what is computed"
    assert network[2] + network[3] <= second[2], "the second rank below the first"


def test_each_kind_has_a_colour_of_its_own_and_a_legend() -> None:
    root = drawn(Timeline("a step", EVENTS, MEMORY))
    colours = {title.partition(" (")[0]: bar[4] for title, bar in bars(root).items() if "F0" not in title}
    assert len({*colours.values()}) == len(colours) == 7
    names = words(root)
    copies = ("forward", "forward, other copy", "backward", "backward, other copy")
    others = ("optimizer's step", "made again", "network", "copy to or from the host", "waiting", "memory, of 4.0 MiB")
    for meaning in (*copies, *others):
        assert names.count(meaning) == 1
    few = words(drawn(Timeline("a step", EVENTS[:1], MEMORY)))
    assert "forward" in few and not {"backward", "network", "forward, other copy"} & {*few}


def test_the_first_replica_that_a_rank_holds_is_not_its_other_copy() -> None:
    """Rank 1 holds replica 1 alone."""
    found = bars(drawn(Timeline("a step", EVENTS, MEMORY)))
    of_rank = {bar[2]: bar[4] for title, bar in found.items() if title.startswith("F0")}
    assert [*of_rank.values()] == [COLOURS["sky"]] * 2


def test_step_bubble_peaks_and_micro_batches_are_written() -> None:
    names = words(drawn(Timeline("a step", EVENTS, MEMORY)))
    assert "a step" in names and "time (ms)" in names
    assert any(name.startswith("step 8") and "36%" in name for name in names), names  # 10.2 of 16 ms are computed
    assert {"rank 0", "rank 1", "4.0 MiB", "2.0 MiB"} <= {*names}
    assert names.count("1") >= 2, "two bars of micro-batch 1 are wide enough for their number"
    assert "-1" not in names
    narrow = words(drawn(Timeline("a step", EVENTS, MEMORY), width=220))
    assert narrow.count("1") < names.count("1")


def test_memory_is_as_high_as_its_share_of_the_highest_peak() -> None:
    root = drawn(Timeline("a step", EVENTS, MEMORY))
    heights = []
    for shape in root.iter(f"{SVG}polygon"):
        points = [tuple(map(float, pair.split(","))) for pair in shape.attrib["points"].split()]
        floor = points[0][1]
        assert points[-1][1] == floor and points[0][0] == points[1][0]
        heights.append([floor - y for _, y in points])
    assert max(heights[0]) == pytest.approx(2 * max(heights[1])) == pytest.approx(4 * heights[0][2])
    assert heights[1][2] == pytest.approx(2 * heights[1][4]) and heights[0][-2] == 0


def test_of_many_ranks_the_first_are_drawn_and_the_others_counted() -> None:
    root = drawn(Timeline("a step", EVENTS, MEMORY), ranks=1)
    assert "first 1 of 2 ranks" in words(root) and "rank 1" not in words(root)
    assert not any("again" in title for title in bars(root))
    assert not any(re.search(r"first \d+ of", name) for name in words(drawn(Timeline("a step", EVENTS, MEMORY))))


def test_a_step_of_nothing_is_a_picture_too() -> None:
    empty = Timeline("nothing", (), (RankMemory((), (), 0, 0.0, (0,) * 6),))
    assert "rank 0" in words(drawn(empty)) and not bars(drawn(empty))


def test_memory_that_nobody_counted_is_not_drawn_as_none() -> None:
    unknown = RankMemory((), (), 0, 0.0, (0,) * 6)
    timeline = Timeline("a step", EVENTS, (unknown, unknown))
    root = drawn(timeline)
    assert not any(name.startswith("memory") or name == "0 B" for name in words(root))
    known = Timeline("a step", EVENTS, MEMORY)
    assert not list(root.iter(f"{SVG}polygon")) and list(drawn(known).iter(f"{SVG}polygon"))
    assert "0 B" not in rich_gantt(timeline).plain and "MiB" in rich_gantt(known).plain
