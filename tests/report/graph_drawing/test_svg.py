import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from outcore.errors import OutcoreError
from outcore.graph import capture
from outcore.graph.graph import Graph
from outcore.report import svg
from outcore.report.graph_drawing.labels import text_width
from outcore.report.graph_drawing.measured_boxes import Sketch
from tests.report.graphs import Maker, random_graphs, stack, unet

SVG = "{http://www.w3.org/2000/svg}"


def shown(picture: str) -> set[str]:
    return {part for group in ET.fromstring(picture).iter(f"{SVG}g") if (part := group.get("data-part"))}


@given(random_graphs())
@settings(deadline=None, max_examples=30)
def test_every_visible_box_is_in_the_picture(graph: Graph) -> None:
    for depth in (1, 2, None):
        view = graph.view(depth)
        boxes = set(view.boxes)
        frames = {name for box in view.boxes.values() for name in box.around}
        assert boxes | frames <= {part.partition("~")[0] for part in shown(svg(graph, depth=depth, fold=False))}


def test_blocks_are_expanded_by_name() -> None:
    parts = shown(svg(unet(), depth=1, expand=["decoder1"]))
    assert "decoder1.cat()#0" in parts
    assert "decoder0.cat()#0" not in parts


def test_names_with_markup_are_text() -> None:
    make = Maker()
    picture = svg(make.graph(make.call("a", "x", type="<Odd & 'quoted'>")), title="a < b & c")
    text = "".join(ET.fromstring(picture).itertext())
    assert "<Odd & 'quoted'>" in text
    assert "a < b & c" in text


def test_repeats_shapes_and_parameters_are_told() -> None:
    text = " ".join(ET.fromstring(svg(stack(5), depth=2)).itertext())
    assert "× 5" in text
    assert "8×16×16" in text
    assert "64 params" in text
    assert "shapes without the batch of 2" in text


@pytest.mark.parametrize("title", [None, "a title"])
def test_title_drawing_and_legend_stand_below_each_other(title: str | None) -> None:
    picture = ET.fromstring(svg(stack(2), depth=1, title=title))
    whole = float(picture.get("height", ""))
    texts = [float(t.get("y", "")) for t in picture.findall(f"{SVG}text")]
    above = texts[:1] if title else []
    legend = texts[len(above) :]
    begins = float(picture.findall(f"{SVG}g")[0].get("transform", "").split()[1].rstrip(")"))
    assert begins == 0 if title is None else above[0] < begins
    assert begins < min(legend) and max(legend) < whole


def test_text_fits_its_box() -> None:
    make = Maker()
    value = make.call("a_block_with_a_name_that_nobody_should_have_to_read_in_a_picture", "x", type="Conv2d" * 9)
    for face in Sketch(make.graph(value)).faces.values():
        assert text_width(face.name, 12, bold=True) + text_width(" " + face.type, 12) <= face.width
        assert text_width(face.note, 10) <= face.width


def test_functions_can_be_hidden() -> None:
    make = Maker()
    hidden = make.call("relu()", make.call("a", "x"), type="relu")
    assert shown(svg(make.graph(hidden), functions=False)) == {"a#0"}


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        svg(unet(), depth=0)
    with pytest.raises(OutcoreError, match="decoder1"):
        svg(unet(), expand=["decodr1"])


def test_outputs_have_the_names_the_model_gives_them_and_shared_blocks_say_so() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.mask, self.edge = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1), nn.Conv2d(3, 1, 1)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            x = self.block(self.block(x))
            return {"mask": self.mask(x), "more": {"edge": self.edge(x)}}

    graph = capture(Net(), [(1, 3, 8, 8)])
    assert graph.output_names == ("mask", "more.edge") and Graph.from_json(graph.to_json()) == graph
    picture = svg(Graph.from_json(graph.to_json()))
    assert ">mask<" in picture and ">more.edge<" in picture and "output 0" not in picture
    assert "12 params, shared" in picture and "8 params, shared" not in picture
    assert ">output 1<" in svg(capture(Two(), [(1, 3, 8, 8)])) and ">output<" in svg(capture(nn.ReLU(), [(1, 3)]))


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.relu(), x.sigmoid()


def test_the_legend_explains_the_colours_that_are_there_and_counts_parameters() -> None:
    make = Maker()
    value = make.call("a", "x", type="Conv2d", parameters=1234)
    value = make.call("b", value, type="ReLU")
    picture = ET.fromstring(svg(make.graph(make.call("c", value, type="Linear", parameters=6))))
    legend = [t.text for t in picture.findall(f"{SVG}text")]
    assert legend[:4] == ["convolution", "activation, pooling", "linear", "1.24k parameters"]
    drawn = {str(r.get("class")).removeprefix("box "): r.get("fill") for r in picture.iter(f"{SVG}rect")}
    swatches = [r.get("fill") for r in picture.findall(f"{SVG}rect") if r.get("class") == "box"]
    assert swatches == [drawn["convolution"], drawn["activation"], drawn["linear"]]
    places = [(float(t.get("x", "")), float(t.get("y", ""))) for t in picture.findall(f"{SVG}text")]
    assert len(set(places)) == len(places)  # in a row or below each other, never on each other
    assert not ET.fromstring(svg(make.graph(value), legend=False)).findall(f"{SVG}text")


def test_boxes_that_stand_for_several_have_a_sheet_behind_and_containers_a_second_border() -> None:
    def rects(part: str, **options: bool) -> int:
        groups = ET.fromstring(svg(stack(3), depth=2, **options)).iter(f"{SVG}g")
        return next(len(g.findall(f"{SVG}rect")) for g in groups if g.get("data-part") == part)

    assert rects("layers.0#0", fold=False) == 2 and rects("layers.0#0") == 3
    assert rects("stem#0") == 1


def test_a_name_ends_before_its_type_begins_whatever_the_font() -> None:
    make = Maker()
    graph = make.graph(make.call("patch_embeddings", "x", type="PatchEmbedding"))
    picture = ET.fromstring(svg(graph))
    texts = {text.text: text for text in picture.iter(f"{SVG}text")}
    assert not list(picture.iter(f"{SVG}tspan"))  # some programs centre each part of a line
    name, rest = texts["patch_embeddings"], next(t for words, t in texts.items() if (words or "").startswith("PatchE"))
    assert name.get("class") == "name right" and rest.get("class") == "left"
    assert float(name.get("x", "")) < float(rest.get("x", "")) and name.get("y") == rest.get("y")
    box = next(r for r in picture.iter(f"{SVG}rect") if "box" in (r.get("class") or ""))
    left, width = float(box.get("x", "")), float(box.get("width", ""))
    assert left <= float(name.get("x", "")) - text_width("patch_embeddings", 12, bold=True)
    assert float(rest.get("x", "")) + text_width(rest.text or "", 12) <= left + width
