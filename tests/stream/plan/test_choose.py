"""The choice among ways to stream."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from outcore.errors import PlanError
from outcore.graph import capture
from outcore.stream.plan.candidates import StreamCandidates, StreamLimits
from outcore.stream.plan.choose import CandidateOutline, OrderedCandidates, TileCandidate, choose, worth
from outcore.stream.plan.prepared import bound

WAYS = [
    TileCandidate(boundary, (tile,), time_s=1 / tile + cost, rough_bytes=10 * tile + rest)
    for boundary, cost, rest in ((("early",), 0.0, 900), (("late",), 0.1, 100), (None, 0.2, 0))
    for tile in (1, 2, 4, 8, 16, 32)
]


def test_the_fastest_that_fits_is_taken() -> None:
    def exact(candidate: TileCandidate) -> int:
        return candidate.rough_bytes

    for budget in (20, 60, 150, 400, 1000, 5000):
        fitting = [c for c in WAYS if c.rough_bytes <= budget]
        assert choose(WAYS, budget, exact) == (
            best := min(fitting, key=lambda c: c.time_s),
            best.rough_bytes,
        )
    assert choose(WAYS, None, exact)[0] == min(WAYS, key=lambda c: c.time_s)


def test_rough_bytes_that_are_wrong_for_one_boundary_do_not_lead_astray() -> None:
    asked = []

    def exact(candidate: TileCandidate) -> int:
        asked.append(candidate)
        return candidate.rough_bytes * (5 if candidate.boundary == ("early",) else 2)

    chosen, size = choose(WAYS, 1000, exact)
    assert chosen == TileCandidate(("late",), (32,), 1 / 32 + 0.1, 420) and size == 840
    assert len(asked) <= 4


def test_none_that_fits_names_the_least() -> None:
    with pytest.raises(PlanError, match="the least found is 30 B"):
        choose(WAYS, 5, lambda c: 3 * c.rough_bytes)
    with pytest.raises(PlanError, match="no way to stream"):
        choose([], 5, lambda c: 0)


def test_working_out_few_chooses_as_working_out_all_does() -> None:
    for budget in (None, 5, 20, 60, 150, 400, 1000, 5000):
        made: list[TileCandidate] = []

        def made_of(candidate: TileCandidate, made: list[TileCandidate] = made) -> list[TileCandidate]:
            made.append(candidate)
            return [candidate]

        outlines = [CandidateOutline(c.time_s * 0.9, int(c.rough_bytes * 0.8), partial(made_of, c)) for c in WAYS]
        for factor in (0.8, 1.0, 1.3):
            exact = {c: int(c.rough_bytes * factor) for c in WAYS}
            try:
                expected = choose(WAYS, budget, exact.__getitem__)
            except PlanError as refused:
                with pytest.raises(PlanError) as also:
                    choose(OrderedCandidates(worth(outlines, budget)), budget, exact.__getitem__)
                assert also.value.least_bytes == refused.least_bytes
            else:
                made.clear()
                assert choose(OrderedCandidates(worth(outlines, budget)), budget, exact.__getitem__) == expected
                assert all(0.9 * c.time_s <= expected[0].time_s for c in made)


def _deep(norm: type[nn.Module]) -> nn.Module:
    blocks = []
    for channels, stride in ((4, 1), (8, 2), (8, 1), (16, 2)):
        before = blocks[-1][0].out_channels if blocks else 3
        blocks.append(nn.Sequential(nn.Conv2d(before, channels, 3, stride, 1), norm(channels), nn.ReLU()))
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))


@pytest.mark.parametrize(
    ("net", "allowed"),
    [
        (_deep(nn.BatchNorm2d).eval(), StreamLimits()),
        (_deep(nn.BatchNorm2d).train(), StreamLimits(statistics=True, policies=True)),
        (_deep(nn.Identity), StreamLimits(training=False)),
        (
            nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)),
            StreamLimits(dense=True),
        ),
    ],
)
def test_the_least_that_is_said_of_ways_is_less_than_they_take(net: nn.Module, allowed: StreamLimits) -> None:
    ways = StreamCandidates(bound(capture(net, [(1, 3, 700, 500)]), folded=True), None, allowed, 2**22)
    outlines = list(ways.outlines())
    every = [list(outline.candidates()) for outline in outlines]
    assert sum(map(len, every)) == len(list(ways.candidates())) > 10
    for outline, candidates in zip(outlines, every, strict=True):
        assert outline.least_s <= min(c.time_s for c in candidates)
        assert outline.least_bytes <= min(c.rough_bytes for c in candidates)
    flat = [c for candidates in every for c in candidates]
    sizes = sorted(c.rough_bytes for c in flat)
    for budget in (None, sizes[0], sizes[len(sizes) // 8], sizes[len(sizes) // 3], sizes[-1]):
        expected = choose(flat, budget, lambda c: c.rough_bytes)
        assert (
            choose(OrderedCandidates(worth(outlines, budget)), budget, lambda c: c.rough_bytes)[0].time_s
            == expected[0].time_s
        )
