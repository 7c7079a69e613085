"""Rough times: in proportion to bytes, for what was not measured and for other sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

import outcore
from outcore.cost.costs import CallCost, Costs
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes, scaled, without_gaps
from outcore.machine.clock import TimedRuns
from outcore.models import UNet


@pytest.fixture(scope="module")
def costs() -> Costs:
    return account(outcore.capture(UNet(width=4, depth=1), [(1, 3, 16, 16)]))


def with_calls(costs: Costs, **changes: CallCost) -> Costs:
    return replace(costs, calls=dict(costs.calls) | changes)


def test_times_go_with_the_bytes_that_are_made(costs: Costs) -> None:
    name = next(iter(costs.calls))
    one = replace(costs.calls[name], output_bytes=100, workspace_forward_bytes=10, workspace_backward_bytes=90)
    small = replace(
        one, output_bytes=40, forward=TimedRuns.of([2.0]), backward=TimedRuns.of([6.0]),
        workspace_forward_bytes=20, workspace_backward_bytes=30,
    )  # fmt: skip
    like = replace(with_calls(costs, **{name: small}), library_bytes=7)
    found = scaled(with_calls(costs, **{name: one}), like)
    cost = found.calls[name]
    assert cost.forward is not None and cost.backward is not None
    assert (cost.forward.median_s, cost.backward.median_s) == (5.0, 15.0)
    assert (cost.workspace_forward_bytes, cost.workspace_backward_bytes) == (50, 90), "the larger of both"
    assert cost.time_source == "scaled" and found.library_bytes == 7


def test_what_the_other_has_no_time_for_stays_as_it_is(costs: Costs) -> None:
    assert scaled(costs, costs).calls == costs.calls
    name = next(iter(costs.calls))
    forward_only = replace(costs.calls[name], forward=TimedRuns.of([2.0]), backward=None)
    found = scaled(costs, with_calls(costs, **{name: forward_only})).calls[name]
    assert found.forward is not None and found.backward is None


def test_bytes_and_matrix_work_give_a_time_and_backward_moves_twice_as_much(costs: Costs) -> None:
    name, cost = next((n, c) for n, c in costs.calls.items() if c.has_backward and c.flops_forward)
    moved = cost.output_bytes + sum(s.bytes for s in cost.saved if s.kind == "value")
    slow = by_bytes(costs, 1e3).calls[name]
    assert slow.forward is not None and slow.backward is not None
    assert slow.forward.median_s == pytest.approx(max(moved / 1e3, cost.flops_forward / 1e4))
    assert slow.backward.median_s == pytest.approx(max(2 * moved / 1e3, cost.flops_backward / 1e4))
    light = replace(cost, flops_forward=0, flops_backward=0)
    found = by_bytes(with_calls(costs, **{name: light}), 1e3).calls[name]
    assert found.forward is not None and found.forward.median_s == pytest.approx(moved / 1e3)
    assert found.backward is not None and found.backward.median_s == pytest.approx(2 * moved / 1e3)


def test_gaps_are_filled_at_the_rate_of_the_others_a_third_of_it_in_forward(costs: Costs) -> None:
    names = list(costs.calls)
    timed = {
        n: replace(costs.calls[n], output_bytes=99, forward=TimedRuns.of([1.0]), backward=TimedRuns.of([2.0]))
        for n in names[1:]
    }
    gap = replace(costs.calls[names[0]], output_bytes=300)
    found = without_gaps(with_calls(costs, **timed, **{names[0]: gap})).calls
    assert found[names[0]].forward is not None and found[names[0]].backward is not None
    assert found[names[0]].forward.median_s == pytest.approx(3.0 / 100 * 300 / 3)
    assert found[names[0]].backward.median_s == pytest.approx(3.0 / 100 * 300 / 1.5)
    assert all(found[n] is timed[n] for n in names[1:])
    whole = with_calls(costs, **timed, **{names[0]: timed[names[1]]})
    assert without_gaps(whole) is whole
