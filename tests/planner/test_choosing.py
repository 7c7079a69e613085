"""How the search chooses among plans: what it calls bitwise, what it lowers, what it looks at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.planner import Pipeline, plan
from outcore.planner.pipeline.candidates import Candidate, candidates_for
from outcore.planner.pipeline.lower import RankLink
from outcore.planner.pipeline.search import PlanSearch, SimulatedCandidate, _levels, fewest_in_flight
from tests.planner.pipeline.test_search import chain
from tests.planner.shape_weights import weights_from_shapes


class Tied(nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)).relu())


def test_a_plan_is_bitwise_unless_gradients_are_added_over_ranks() -> None:
    """Replicas, inverted replicas and copies of tied weights each make sums that plain training takes in one piece."""
    graph = chain()
    weights = weights_from_shapes(graph)
    piped = plan(graph, weights, devices=2, schedule="gpipe")
    assert (piped.replicas, piped.tied, piped.exactness) == (1, {}, "bitwise")
    inverted = plan(graph, weights, devices=2, schedule="gems")
    assert (inverted.replicas, inverted.tied, inverted.exactness) == (1, {}, "reassociated")
    copied = plan(graph, weights, devices=2, link=RankLink(1e8, 1e-6))
    assert copied.schedule != "gems" and copied.replicas == 2 and copied.exactness == "reassociated"
    tied = outcore.capture(Tied(), torch.randint(0, 64, (8, 64)))
    shared = plan(tied, weights_from_shapes(tied), devices=3, schedule="1f1b", tied="copies")
    assert shared.replicas == 1 and shared.tied and shared.exactness == "reassociated"


class LanguageModel(nn.Module):
    """As many are: the head is the embedding, so that the first and the last call share the largest parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
        self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "model_parallel"])
def test_a_language_model_is_cut_between_its_embedding_and_its_head(schedule: Any) -> None:
    graph = outcore.capture(LanguageModel(), torch.randint(0, 512, (16, 256)))
    weights = weights_from_shapes(graph)
    with pytest.raises(PlanError, match="cannot share 1 units"):
        plan(graph, weights, devices=2, schedule=schedule, tied="together")
    chosen = plan(graph, weights, devices=2, schedule=schedule)
    assert len(chosen.stages) == 2 and chosen.tied == {"embed.weight": (0, 1)}
    assert chosen == plan(graph, weights, devices=2, schedule=schedule, tied="copies")


def test_calls_that_share_a_parameter_stay_together_where_that_is_faster() -> None:
    layers = [nn.Linear(64, 64) for _ in range(6)]
    layers[5].weight = layers[3].weight
    graph = outcore.capture(nn.Sequential(*layers), torch.randn(16, 64))
    weights = weights_from_shapes(graph)
    for link, apart in ((RankLink(1e12, 0.0), True), (RankLink(1e5, 1e-3), False)):
        options: dict[str, Any] = {"devices": 4, "schedule": "gpipe", "link": link}
        both = [plan(graph, weights, tied=way, **options) for way in ("together", "copies")]
        times = [made.predicted.time_s for made in both if made.predicted is not None]
        assert (times[1] < times[0]) == apart == bool(plan(graph, weights, **options).tied)
        assert plan(graph, weights, **options) == both[apart]


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_the_smallest_peak_is_looked_for_among_the_fewest_samples_in_flight(devices: int) -> None:
    candidates = candidates_for(10, devices, 24, None)
    found = fewest_in_flight(candidates)
    least = min(c.in_flight for c in candidates)
    assert found and all(c.in_flight == least for c in found)
    assert [c for c in candidates if c not in found and c.in_flight <= least] == []
    assert len(found) < len(candidates)


def test_a_cut_that_the_simulator_finds_too_large_is_cut_again_under_as_much_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every further try has the cap of the one before less what was found above the cap that was asked for."""
    graph = chain()
    weights = weights_from_shapes(graph)
    tries: list[tuple[float | None, SimulatedCandidate | None]] = []
    cut = PlanSearch._cut

    def seen(
        self: PlanSearch, candidate: object, level: int, balance: str, cap: float | None
    ) -> SimulatedCandidate | None:
        found = cut(self, candidate, level, balance, cap)  # type: ignore[arg-type]
        tries.append((cap, found))
        return found

    monkeypatch.setattr(PlanSearch, "_cut", seen)
    search = PlanSearch(_levels(graph, weights, "layer", "together"), 8, "gems", "search", RankLink(1e8, 1e-6))
    candidate = Candidate(2, 1, Pipeline("gems", 2, 4))
    free = search._fitting(candidate, 0, None)
    assert free is not None
    tries.clear()
    asked = 0.95 * max(free[0].peak_bytes)
    found = search._fitting(candidate, 0, asked)
    assert found is None or max(found[0].peak_bytes) <= asked
    (cap, judged), (lower, _) = tries[:2]
    assert judged is not None and cap == asked and (excess := max(judged[0].peak_bytes) - asked) > 0
    assert lower == asked - excess
