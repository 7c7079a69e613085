"""Pictures of profiles and frontiers: axes with units, and colours that mean one thing."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import torch

import outcore
from outcore.cost.profile import profile
from outcore.fusion.sweep.curves import draw_curves
from outcore.fusion.sweep.trials import TrialResult
from outcore.machine import parse
from outcore.models import UNet
from outcore.program import Stages, chart, compile_program, simulate
from outcore.report.profile_svg import profile_svg


def words(picture: str) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(picture).iter() if e.tag.endswith("text")]


def swatches(picture: str) -> list[str]:
    return re.findall(r'width="13.00" height="11" fill="(#\w+)"', picture)


def test_a_profile_has_the_wait_a_time_axis_and_a_colour_for_each_kind() -> None:
    job = outcore.Job(
        model=lambda: UNet(width=8, depth=2), batch=lambda n: (torch.rand(n, 3, 64, 64), None), name="net"
    )
    picture = profile_svg(profile(job, parse("h200").devices[0], size=1))
    said = words(picture)
    assert any(w.startswith("wait for the host") for w in said)
    assert any(re.match(r"step \S+ \S+ \(estimated\), ", w) for w in said), "in the words of the table"
    for name in ("time of a step", "time of forward and backward", "memory at the peak"):
        assert any(re.fullmatch(rf"{name} \((ns|µs|ms|s|bytes|[KMG]iB)\)", w) for w in said), name
    assert len(swatches(picture)) == len(set(swatches(picture))) >= 4


def test_a_timeline_has_a_time_axis_and_says_what_its_colours_mean() -> None:
    stages = Stages.uniform(4, saved_bytes=1 << 20, edge_bytes=2, gradient_bytes=1 << 20)
    picture = chart(simulate(compile_program(stages, "gems-master", micro_batches=1, batches=2, replicas=2), stages))
    said = words(picture)
    assert any(re.fullmatch(r"time \((ns|µs|ms|s)\)", w) for w in said)
    assert {"forward", "backward", "forward, other copy", "backward, other copy"} <= set(said)
    assert len(swatches(picture)) == len(set(swatches(picture)))
    assert any(w.endswith("; numbers are micro-batches") for w in said) and {"0", "1"} <= set(said)
    one = words(chart(simulate(compile_program(stages, "gpipe", micro_batches=1), stages)))
    assert one.count("0") == 1 and not any("micro-batches" in w for w in one)  # the tick: what is not counted has none


def test_curves_of_a_few_trials_are_told_apart_and_of_many_by_their_state() -> None:
    def trial(number: int, state: str = "complete") -> TrialResult:
        settings = {"lr": 0.1 * (number + 1)}
        return TrialResult(number, settings, state, 1.0 / (number + 1), 2, [(1, 2.0), (2, 1.0 / (number + 1))])

    few = draw_curves([trial(i) for i in range(3)])
    assert {"step", "training loss", "lr 0.1", "lr 0.2", "lr 0.3"} <= set(words(few))
    assert len(set(swatches(few))) == 3
    alike = ElementTree.fromstring(draw_curves([replace(trial(0), number=i) for i in range(3)]))
    lines = [e for e in alike.iter() if e.tag.endswith("polyline")]
    assert len({e.get("points") for e in lines}) == 1  # on each other: what is below shows between dashes
    assert lines[0].get("stroke-dasharray") is None and len({e.get("stroke-dasharray") for e in lines}) == 3
    many = draw_curves([trial(i, "pruned" if i % 2 else "complete") for i in range(12)])
    assert {"best", "complete", "pruned"} <= set(words(many))
    assert "no trial has made a step yet" in draw_curves([])


def test_a_curve_above_the_axis_leaves_the_picture_and_is_counted() -> None:
    def trial(number: int, *losses: float) -> TrialResult:
        return TrialResult(number, {"lr": number}, "complete", losses[-1], len(losses), list(enumerate(losses, 1)))

    calm = [trial(i, *(1.0 - 0.001 * (s + i) for s in range(20))) for i in range(9)]
    drawn = draw_curves([*calm, trial(9, 1.0, *([1e9] * 3), 0.5, *([0.4] * 15))])
    lines = [e for e in ElementTree.fromstring(drawn).iter() if e.tag.endswith("polyline")]
    assert len(lines) == 11  # the last one comes back
    tops = [[float(place.split(",")[1]) for place in str(line.get("points")).split()] for line in lines]
    edge = min(map(min, tops))
    assert sum(y == edge for line in tops for y in line) == 2, "it touches the edge twice, and does not run along it"
    assert any("; 1 trial goes above the axis" in word for word in words(drawn))
    assert not any("above the axis" in word for word in words(draw_curves(calm)))
