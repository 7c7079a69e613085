"""What a rank's part takes beyond its share, and that predictions count it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.measure import measure
from outcore.cost.predicted.estimate import estimate
from outcore.errors import PlanError
from outcore.machine import known
from outcore.machine.link import Link
from outcore.machine.machine import Machine
from outcore.planner.pipeline.plan_job import links_of, weights_on
from outcore.spatial.layout import SplitLayout
from outcore.spatial.part_costs import PartCosts, _Part, _PartTimes, measure_part
from outcore.spatial.timeline import predict_timeline
from outcore.stream.network import RegionNetwork


def _job(head: nn.Module | None = None) -> outcore.Job:
    def model() -> nn.Module:
        layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)]
        return nn.Sequential(*([head] if head is not None else []), *layers)

    return outcore.Job(model=model, batch=lambda n: (torch.randn(n, 3, 24, 20), torch.randn(n, 2, 24, 20)), size=1)


def _machine(link: Link) -> Machine:
    one = known()
    return replace(one, devices=one.devices[:1] * 2, between_devices=link)


def test_every_node_of_a_part_is_measured() -> None:
    job = _job()
    graph = job.capture(1)
    costs = measure(graph, "cpu", time_limit_s=2.0)
    where = _machine(Link.symmetric(bandwidth_bytes_per_s=1e9))
    found = measure_part(job, (1, 2), costs=costs, machine=where, steps=3)
    assert len(found.forward_s) == len(graph.calls) + 1  # the statistics of the norm are a node of their own
    assert found.backward_s.keys() <= found.forward_s.keys() and found.exchange_s[0] > 0
    made = {name for call in ("0#0", "3#0") for name in graph.calls[call].outputs}
    assert made & found.overlap_forward_s.keys() and found.overlap_forward_s.keys() == found.overlap_backward_s.keys()


def test_what_a_part_takes_beyond_its_share_is_in_the_prediction() -> None:
    job = _job()
    graph = job.capture(1)
    where = _machine(Link.symmetric(bandwidth_bytes_per_s=1e12))
    weights, links = weights_on(where, graph), links_of(where)
    plan = outcore.spatial.plan_grid(job, (1, 2), machine=where)
    first = next(iter(graph.values[v].name for v in graph.calls["0#0"].outputs))
    plain = predict_timeline(plan, graph, weights, links).step_s
    parts = PartCosts({first: 0.5}, {first: 0.25}, (0.0, 0.0))
    assert predict_timeline(plan, graph, weights, links, parts).step_s == pytest.approx(plain + 0.75, abs=1e-4)
    dear = PartCosts(exchange_s=(1.0, 2.0))
    kept = replace(plan, spatial={"grid": [1, 2]})
    plain = predict_timeline(kept, graph, weights, links).step_s
    assert predict_timeline(kept, graph, weights, links, dear).step_s == pytest.approx(plain + 3.0, abs=1e-4)
    # So dear an exchange is not made: borders are computed on both sides.
    assert outcore.spatial.plan_grid(job, (1, 2), machine=where, parts=dear).spatial["twice"]
    # Unless whoever makes or reads such a value pays more for it.
    nodes = RegionNetwork(graph).nodes
    paid = replace(dear, overlap_forward_s=dict.fromkeys(nodes, 10.0))
    assert "twice" not in outcore.spatial.plan_grid(job, (1, 2), machine=where, parts=paid).spatial
    both = replace(plan, spatial={"grid": [1, 2], "twice": [first]})
    cheap, costly = (predict_timeline(both, graph, weights, links, p).step_s for p in (dear, paid))
    reading = sum(first in (node.output, *node.values) for node in nodes.values())
    assert costly == pytest.approx(cheap + 10.0 * reading, abs=1e-4)


def test_a_part_that_was_measured_as_planned_is_predicted_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With messages that take nothing, a step takes the seconds that the part of its layout took."""
    job = _job()
    graph = job.capture(1)
    where = _machine(Link.symmetric(bandwidth_bytes_per_s=1e15))
    costs = estimate(graph, where)
    weights, links = weights_on(where, graph, costs), links_of(where)
    first = next(iter(graph.calls["0#0"].outputs))
    spatial = {"grid": [1, 2], "twice": [first]}
    plan = outcore.Plan(graph.fingerprint, (("",),), spatial=spatial, exactness="reassociated")
    monkeypatch.setattr("outcore.spatial.script.POSTING_S", 0.0)
    seen: list[SplitLayout] = []

    def measured(self: _Part, layout: SplitLayout, steps: int) -> _PartTimes:
        seen.append(layout)
        forward = {node.output: 1.0 + number for number, node in enumerate(layout.extent.nodes)}
        return _PartTimes(layout, forward, 0.5 * len(layout.exchanges), 100.0)

    monkeypatch.setattr(_Part, "measure", measured)
    parts = measure_part(job, (1, 2), costs=costs, machine=where, spatial=spatial)
    assert len(seen) == 1 and first not in seen[0].exchanges
    nodes, exchanges = len(seen[0].extent.nodes), len(seen[0].exchanges)
    took = sum(1.0 + number for number in range(nodes)) + 0.5 * exchanges + 100.0
    bare = predict_timeline(plan, graph, weights, links, PartCosts()).step_s
    shares = sum(c.forward_s + c.backward_s for c in weights.calls.values())
    assert bare < 0.1 and shares < 0.1  # what else there is in a step is next to nothing
    assert predict_timeline(plan, graph, weights, links, parts).step_s == pytest.approx(took, abs=0.2)


def test_the_medians_of_nodes_add_up_to_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five steps each had another node that took ten times as long."""
    job = _job()
    network = RegionNetwork(job.capture(1))
    part = _Part(job, network, None, torch.device("cpu"))
    rows = iter([{n: 10.0 if n == slow else 1.0 for n in range(5)} for slow in (0, 1, 0, 1, 2, 3, 4)])
    monkeypatch.setattr(part, "_step", lambda layout: _PartTimes(layout, next(rows), 0.0, 1.0))
    assert sum(part.measure(None, 7).forward.values()) == pytest.approx(14.0)  # type: ignore[arg-type]


def test_a_network_that_cannot_be_split_has_no_part() -> None:
    job = outcore.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 2)),
        batch=lambda n: (torch.randn(n, 3, 2, 2), torch.randn(n, 2)),
        size=1,
    )
    costs = measure(job.capture(1), "cpu", time_limit_s=1.0)
    with pytest.raises(PlanError, match="no part to measure"):
        measure_part(job, (1, 2), costs=costs, machine=_machine(Link.symmetric(bandwidth_bytes_per_s=1e9)))
