"""Landscape and U: blocks do not overlap, levels lie beside each other, and shades say how much."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import OutcoreError
from outcore.models import UNet
from outcore.program.plan.document import Plan
from outcore.report.graph_drawing.left_to_right import landscape, nested_skips, u_shape
from outcore.report.graph_drawing.shading import Shading, memory_by_block, moved_by_block, time_by_block
from tests.cli.command import outcore_command


def unet(depth: int = 3) -> outcore.Graph:
    with torch.device("meta"):
        return outcore.capture(UNet(width=8, depth=depth), [(1, 3, 64, 64)])


def boxes(picture: str) -> dict[str, tuple[float, float, float, float]]:
    rects = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="44" rx="4"', picture)
    titles = re.findall(r'class="middle title" x="[\d.]+" y="[\d.]+">([^<]+)<', picture)
    return dict(zip(titles, (tuple(map(float, r)) for r in rects), strict=True))  # type: ignore[arg-type]


def overlap(places: list[tuple[float, ...]]) -> bool:
    return any(
        a is not b and a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + 44 and b[1] < a[1] + 44
        for a in places
        for b in places
    )


def test_a_unet_is_a_u() -> None:
    graph = unet()
    assert len(nested_skips(graph.view(1, functions=False))) == 3
    found = boxes(u_shape(graph))
    for level in (1, 2, 3):
        left, right = found[f"encoder{level}"], found[f"decoder{level}"]
        assert left[1] == right[1] and left[0] + left[2] < right[0]
    assert found["encoder1"][1] < found["encoder2"][1] < found["encoder3"][1] < found["bottom"][1]
    assert not overlap(list(found.values()))


def test_a_chain_is_a_line_from_left_to_right() -> None:
    graph = outcore.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), [(2, 4)])
    found = list(boxes(landscape(graph)).values())
    assert [p[0] for p in found] == sorted(p[0] for p in found) and len({p[1] for p in found}) == 1
    with pytest.raises(OutcoreError, match="it is no U; try another --depth, or --form landscape"):
        u_shape(graph)


def test_skips_in_landscape_run_above_and_apart() -> None:
    picture = landscape(unet(), title="U-Net")
    ElementTree.fromstring(picture)
    assert not overlap(list(boxes(picture).values()))
    heights = [d.split("L")[1].split()[1] for d in re.findall(r'd="(M[^"]+)" fill="none" stroke="#0072b2"', picture)]
    assert len(heights) == 3 == len(set(heights))


def test_the_darkest_block_takes_most() -> None:
    graph = unet()
    costs = outcore.estimate(graph, machine="a100")
    for values in (time_by_block(graph, costs), memory_by_block(graph, costs)):
        assert values["encoder1"] >= max(v for k, v in values.items() if k.startswith("encoder1."))
        children = {k: v for k, v in values.items() if "." not in k and k}
        shading = Shading(children, "time")
        darkest = max(children, key=children.__getitem__)
        assert shading.colour(darkest) == "#005a96" and shading.is_dark(darkest)


def test_the_command_draws_all_forms(tmp_path: Path) -> None:
    network = ["outcore.models:UNet", "-i", "1x3x64x64", "-a", "width=8", "--svg", "g.svg"]
    for more in (["--form", "u", "--shade", "time", "--on", "a100"], ["--form", "landscape"], []):
        shown = outcore_command("graph", *network, *more, folder=tmp_path)
        assert shown.returncode == 0, shown.stderr
        ElementTree.fromstring((tmp_path / "g.svg").read_text())
    shades = {}
    graph = unet(4)
    policy = {"encoder1.0#0:out": "offload"}
    Plan(graph=graph.fingerprint, stages=(("",),), policy=policy).save(tmp_path / "plan.json")
    for shade, said in (
        ("time", "time of forward and backward: 0 to"),
        ("memory", "memory kept for backward: 0 to"),
        ("plan.json", "memory that the plan does not keep: 0 to"),
    ):
        more = ["--form", "landscape", "--shade", shade, "--on", "a100"]
        assert outcore_command("graph", *network, *more, folder=tmp_path).returncode == 0
        shades[shade] = (tmp_path / "g.svg").read_text()
        assert said in shades[shade] and ">UNet<" in shades[shade]
    assert len({re.sub("[a-z :]+0 to.*", "", picture) for picture in shades.values()}) == 3
    assert outcore_command("graph", *network, "--form", "round", folder=tmp_path).returncode == 2
    assert outcore_command("graph", *network, "--shade", "time", folder=tmp_path).returncode == 2


def test_what_a_plan_moves_is_counted_in_the_block_that_made_it_and_in_all_around_it() -> None:
    graph = unet(1)
    made = {call.block: call.outputs[0] for call in graph.calls.values() if call.block.startswith("encoder1.")}
    (first, a), (second, b), *_ = made.items()
    policy = {a: "offload", b: "recompute", graph.outputs[0]: "keep", "not there": "offload"}
    found = moved_by_block(graph, Plan(graph=graph.fingerprint, stages=(("",),), policy=policy))
    sizes = [graph.values[v].bytes for v in (a, b)]
    assert (found[first], found[second]) == tuple(sizes) and found["encoder1"] == sum(sizes)
    assert not any(block.startswith("decoder") for block in found)


def test_a_scale_says_what_its_darkest_shade_is() -> None:
    def said(unit: str, most: float) -> str:
        return (
            ElementTree.fromstring("<g>" + "".join(Shading({"a": most, "b": 0.0}, unit).scale(0, 0)) + "</g>")[-1].text
            or ""
        )

    assert said("time", 0.25) == "time: 0 to 250 ms" and said("memory", 3 << 20) == "memory: 0 to 3 MiB"
    assert said("values", 12.0) == "values: 0 to 12"
    shading = Shading({"a": 4.0, "b": 1.0}, "time")
    assert shading.share("b") == 0.25 and not shading.is_dark("b") and shading.share("elsewhere") == 0
    assert Shading({}, "time").colour("a") == Shading({"a": 0.0}, "time").colour("a") == shading.colour("elsewhere")
