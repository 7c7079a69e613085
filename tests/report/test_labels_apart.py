"""Every picture with axes: no two labels touch, none is cut off, and no colour of a legend means two things."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import outcore
from outcore.cost.profile import profile
from outcore.figure import SIZE, SMALL
from outcore.fusion.sweep.curves import draw_curves
from outcore.fusion.sweep.trials import TrialResult
from outcore.machine import parse
from outcore.models import UNet
from outcore.planner.memory.plan import frontier, plan_memory
from outcore.program import Stages, chart, compile_program, simulate
from outcore.report.evaluation import evaluate
from outcore.report.evaluation_svg import confusion_svg, curves_svg
from outcore.report.frontier import frontier_svg
from outcore.report.graph_drawing.labels import text_width
from outcore.report.graph_drawing.left_to_right import landscape, u_shape
from outcore.report.profile_svg import profile_svg
from outcore.train.run_folder.predictions import Predictions
from outcore.whatif.links import parse_link
from outcore.whatif.scaling import scale_out
from outcore.whatif.scaling_plot import scaling_svg

Box = tuple[float, float, float, float]


def net() -> outcore.Job:
    return outcore.Job(
        model=lambda: UNet(width=8, depth=2), batch=lambda n: (torch.rand(n, 3, 64, 64), None), name="net"
    )


def profiles() -> Iterator[str]:
    yield profile_svg(profile(net(), parse("h200").devices[0], size=1))


def frontiers() -> Iterator[str]:
    graph = net().capture(1)
    costs = outcore.estimate(graph, machine="a100")
    made = plan_memory(graph, costs, budget_bytes=None, policy={})
    found = frontier(made.keeping, points=2, search_s=0.1)
    floor, plain = made.keeping.floor[0], made.plain_bytes
    for budget in (None, floor, (floor + plain) // 2, plain):
        yield frontier_svg(made.keeping, found, name="net", budget_bytes=budget, chosen=found[-1] if budget else None)


def timelines() -> Iterator[str]:
    for count, schedule in ((2, "gpipe"), (4, "gems-master")):
        stages = Stages.uniform(count, saved_bytes=1 << 20, edge_bytes=2, gradient_bytes=1 << 20)
        copies = {"batches": 2, "replicas": 2} if schedule == "gems-master" else {}
        yield chart(simulate(compile_program(stages, schedule, micro_batches=1, **copies), stages))


def sweeps() -> Iterator[str]:
    for count in (1, 4, 6, 12):
        trials = [
            TrialResult(
                i, {"lr": 0.0001 * 3**i, "weight_decay": 0.01}, "complete", 1.0, 9, [(1, 2.0), (9, 1 / (i + 1))]
            )
            for i in range(count)
        ]
        yield draw_curves(trials)


def scalings() -> Iterator[str]:
    device = parse("v100").devices[0]
    found = scale_out(net(), (1, 2, 4, 8, 16, 64, 1024), parse_link("10gbe", device), device=device)
    yield scaling_svg(found)
    yield scaling_svg(replace(found, points=tuple(p for p in found.points if p.gpus <= 8)))


def graphs() -> Iterator[str]:
    graph = net().capture(1)
    yield landscape(graph, title="net")
    yield landscape(graph, depth=2)
    yield u_shape(graph, title="net")


def evaluations() -> Iterator[str]:
    path = Path(tempfile.mkdtemp()) / "p.csv"
    for names in (["benign", "malignant"], [f"a long name of class {i}" for i in range(3)]):
        rows = Predictions()
        draw = torch.Generator().manual_seed(0)
        labels = torch.arange(60) % len(names)
        rows.add([f"slide-{i}.tif" for i in range(60)], torch.randn(60, len(names), generator=draw), labels)
        rows.write(path)
        found = evaluate(path, names)
        assert found is not None
        yield confusion_svg(found)
        yield curves_svg(found.roc, kind="roc")


def labels(picture: str) -> Iterator[tuple[str, Box]]:
    """Level texts with the room that they take."""
    turned = {id(e) for g in ElementTree.fromstring(picture).iter() if "transform" in g.attrib for e in g.iter()}
    for element in ElementTree.fromstring(picture).iter():
        words = (element.text or "").strip()
        if not element.tag.endswith("text") or not words or id(element) in turned:
            continue
        classes = element.get("class", "").split()
        small = {"small", "tick"} & set(classes)
        size = SMALL if small else SIZE
        width = text_width(words, size, bold="title" in classes)
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        left = x - width / 2 if "middle" in classes else x - width if "end" in classes else x
        yield words, (left, y - 0.72 * size, left + width, y + 0.1 * size)


@pytest.mark.parametrize(
    "drawn", [profiles, frontiers, timelines, sweeps, scalings, graphs, evaluations], ids=lambda f: f.__name__
)
def test_labels_are_apart_and_inside(drawn: Callable[[], Iterator[str]]) -> None:
    for picture in drawn():
        found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture)
        assert found is not None
        width, height = float(found[1]), float(found[2])
        said = list(labels(re.sub(r"<g transform.*?</g>", "", picture)))
        assert said
        for words, (left, top, right, bottom) in said:
            assert left >= 0 and top >= 0 and right <= width + 1 and bottom <= height, (words, left, right, width)
        for (one, a), (two, b) in itertools.combinations(said, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (one, two)
        keys = re.findall(r'width="13.00" height="11" fill="(#\w+)"', picture)
        assert len(keys) == len(set(keys))
