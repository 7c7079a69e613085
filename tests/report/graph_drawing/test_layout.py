import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from importlib.resources import files
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.graph.graph import Graph
from outcore.report.bundle import sketch_json
from outcore.report.graph_drawing.drawing import GEOMETRY, Drawing, Placed, WireSegment
from outcore.report.graph_drawing.layout import lay_out
from outcore.report.graph_drawing.measured_boxes import SMALL, Sketch
from tests.report.graphs import Maker, branches, random_graphs, stack, unet

Rectangle = tuple[float, float, float, float]
NEAR = 1e-6


def overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] - NEAR and b[0] < a[2] - NEAR and a[1] < b[3] - NEAR and b[1] < a[3] - NEAR


def rectangle(placed: Placed) -> Rectangle:
    return placed.x, placed.y, placed.x + placed.width, placed.y + placed.height


def pieces(line: WireSegment) -> list[Rectangle]:
    """The rectangles in which a line runs: down, sideways, down."""
    left, right = sorted((line.x1, line.x2))
    return [
        (line.x1, line.y1, line.x1, line.y2),
        (left, line.y2, right, line.y3),
        (line.x2, line.y3, line.x2, line.y4),
    ]


@st.composite
def drawings(draw: st.DrawFn) -> tuple[Sketch, Drawing]:
    sketch = Sketch(draw(random_graphs()))
    opened = {name for name in sketch.flat if draw(st.booleans())}
    return sketch, lay_out(sketch, opened, fold=draw(st.booleans()))


@given(drawings())
@settings(deadline=None)
def test_boxes_do_not_overlap_and_stand_inside_their_frames(drawn: tuple[Sketch, Drawing]) -> None:
    sketch, drawing = drawn
    around = {p.part: sketch.nest.parts[p.part].around for p in drawing.placed}
    for a, b in combinations(drawing.placed, 2):
        if a.part in around[b.part]:
            inner, outer = rectangle(b), rectangle(a)
            assert outer[0] < inner[0] and outer[1] < inner[1] and inner[2] < outer[2] and inner[3] < outer[3]
        elif b.part not in around[a.part]:
            assert not overlap(rectangle(a), rectangle(b)), (a, b)
    assert all(p.x >= 0 and p.x + p.width <= drawing.width for p in drawing.placed)


@given(drawings())
@settings(deadline=None)
def test_wires_go_down_and_through_no_box(drawn: tuple[Sketch, Drawing]) -> None:
    _, drawing = drawn
    boxes = [rectangle(p) for p in drawing.placed if not p.open]
    for line in drawing.lines:
        assert line.y1 <= line.y2 + NEAR and line.y2 < line.y3 and line.y3 <= line.y4 + NEAR
        assert not any(overlap(piece, box) for piece in pieces(line) for box in boxes)


@given(drawings())
@settings(deadline=None)
def test_every_wire_begins_and_ends_at_its_boxes(drawn: tuple[Sketch, Drawing]) -> None:
    _, drawing = drawn
    placed = {p.part: p for p in drawing.placed}
    sheet = GEOMETRY["sheet"]
    starts = {(line.x1, line.y1) for line in drawing.lines}
    stops = {(line.x2, line.y4) for line in drawing.lines}
    for line in drawing.lines:
        if line.source:
            box = placed[line.source]
            assert -NEAR <= line.y1 - box.y - box.height <= sheet + NEAR
            assert line.source not in placed or not box.open or box.x < line.x1 < box.x + box.width
        if line.target:
            box = placed[line.target]
            assert line.y4 == pytest.approx(box.y)
            assert box.x < line.x2 < box.x + box.width
            assert line.arrow is not box.open
    # Pieces meet: what begins or ends on the way does so where another piece does.
    assert {(round(x, 6), round(y, 6)) for x, y in starts} >= {
        (round(line.x2, 6), round(line.y4, 6)) for line in drawing.lines if not line.arrow and not line.target
    } - {(round(x, 6), round(y, 6)) for x, y in stops if _leaves(drawing, x, y)}


def _leaves(drawing: Drawing, x: float, y: float) -> bool:
    """Whether a piece ends at the bottom of a frame, where the next one begins outside."""
    return any(p.open and abs(p.y + p.height - y) < NEAR and p.x < x < p.x + p.width for p in drawing.placed)


@given(drawings())
@settings(deadline=None)
def test_labels_cover_neither_boxes_nor_each_other(drawn: tuple[Sketch, Drawing]) -> None:
    sketch, drawing = drawn
    texts = [(e.x, e.y - SMALL, e.x + sketch.label_width(e.wire), e.y) for e in drawing.labels]
    boxes = [rectangle(p) for p in drawing.placed if not p.open]
    assert not any(overlap(text, box) for text in texts for box in boxes)
    assert not any(overlap(a, b) for a, b in combinations(texts, 2))


@given(random_graphs())
@settings(deadline=None, max_examples=20)
def test_the_same_graph_is_drawn_the_same_way(graph: Graph) -> None:
    first, second = (lay_out(s, s.flat) for s in (Sketch(graph), Sketch(graph)))
    assert first == second


def test_a_unet_is_a_straight_line_with_arcs_on_one_side() -> None:
    drawing = lay_out(Sketch(unet()), ())
    middles = {p.x + p.width / 2 for p in drawing.placed}
    assert max(middles) - min(middles) < 1
    right = max(p.x + p.width for p in drawing.placed)
    lanes = {line.x1 for line in drawing.lines if line.skip and line.x1 == line.x2}
    assert len(lanes) == 3 - 1  # the shortest skip passes one row only
    assert min(lanes) > min(middles)
    assert max(lanes) > right


def test_the_main_line_is_straight_through_open_blocks() -> None:
    sketch = Sketch(unet())
    drawing = lay_out(sketch, sketch.flat)
    assert len({round(line.x1, 3) for line in drawing.lines if not line.skip}) == 1


def test_branches_spread_evenly_around_the_box_that_joins_them() -> None:
    placed = {p.part: p.x + p.width / 2 for p in lay_out(Sketch(branches()), ()).placed}
    ends = [placed[f"branch{i}_0#0"] for i in range(4)]
    assert ends == sorted(ends)
    assert placed["stem#0"] == pytest.approx(sum(ends) / 4, abs=2)
    assert placed["cat()#0"] == pytest.approx(sum(ends) / 4, abs=2)


def test_repeats_are_one_box_until_they_are_unfolded() -> None:
    sketch = Sketch(stack(5))
    folded = {p.part: p.repeat for p in lay_out(sketch, ["layers#0"]).placed}
    assert folded["layers.0#0"] == 5
    assert "layers.1#0" not in folded
    unfolded = {p.part: p.repeat for p in lay_out(sketch, ["layers#0"], flat=["layers#0"]).placed}
    assert unfolded["layers.4#0"] == 1


def test_more_boxes_than_calls_may_be_nested_are_laid_out() -> None:
    make, values = Maker(), ["x"]
    for i in range(count := sys.getrecursionlimit() + 50):
        reads = dict.fromkeys([values[-1], values[-1 - (i % 7) * 5 % len(values)]])
        values.append(make.call(f"leaf{i}", *reads))
    graph = make.graph(values[-1])
    drawing = lay_out(Sketch(graph), ())
    assert len(drawing.placed) == count


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's layout runs in node")
@pytest.mark.parametrize("graph", [unet(), branches(), stack(4, mask=True), stack(6, two_back=True)])
@pytest.mark.parametrize("fold", [True, False])
def test_the_page_lays_out_exactly_as_we_do(graph: Graph, fold: bool) -> None:
    sketch = Sketch(graph)
    some, every = list(sketch.flat)[::2], list(sketch.flat)
    states = [[], some, every, some, []]  # one after the other: what was laid out before is used again
    ours = [json.loads(json.dumps(asdict(lay_out(sketch, set(opened), fold=fold)))) for opened in states]
    assert _close(_in_javascript(sketch, states, fold), ours)


def _in_javascript(sketch: Sketch, states: list[list[str]], fold: bool) -> Any:
    given = {"sketch": sketch_json(sketch), "geometry": GEOMETRY, "states": states, "fold": fold}
    script = (
        (files("outcore.report") / "page" / "layout.js").read_text()
        + """
        const given = JSON.parse(require("fs").readFileSync(0));
        const layout = new Layout(given.sketch, given.geometry);
        const state = (opened, fold) => ({ opened: new Set(opened), flat: new Set(), fold });
        for (const _ of layout.ahead(state(Object.keys(given.sketch.flat), true)));
        console.log(JSON.stringify(given.states.map((opened) => layout.drawing(state(opened, given.fold)))));
    """
    )
    done = subprocess.run(["node", "-e", script], input=json.dumps(given), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_close(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_close, a, b))
    return a == b if isinstance(a, str | bool) else abs(a - b) < 1e-6
