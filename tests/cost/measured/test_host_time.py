"""What is between the calls, and what a call finds when its turn comes."""

import time
from dataclasses import replace

import pytest
import torch

from outcore.cost.costs import Costs
from outcore.cost.measured import host_time
from outcore.cost.measured.saved_bytes import account
from outcore.graph import Graph
from outcore.machine.clock import TimedRuns, time_calls

CPU = torch.device("cpu")


def taking(seconds: float) -> tuple[list[Graph], object]:
    """A way to measure that gives every call the same time, and the graphs it was asked for."""
    asked: list[Graph] = []

    def measure(graph: Graph) -> Costs:
        asked.append(graph)
        costs, timing = account(graph), TimedRuns.of([seconds])
        calls = {n: replace(c, forward=timing, backward=timing) for n, c in costs.calls.items()}
        return replace(costs, calls=calls)

    return asked, measure


def test_the_rest_of_a_real_step_is_shared_out_over_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "_known", {})
    monkeypatch.setattr(host_time, "_step_s", lambda *_: 1.0)
    asked, measure = taking(1e-4)
    found = host_time.between_calls(CPU, measure)  # type: ignore[arg-type]
    (graph,) = asked
    assert found == pytest.approx((1.0 - 2e-4 * len(graph.calls)) / (2 * len(graph.calls)))
    assert host_time.between_calls(CPU, measure) == found  # type: ignore[arg-type]
    assert len(asked) == 1


def test_calls_that_take_longer_alone_than_together_have_nothing_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "_known", {})
    random = torch.get_rng_state()
    assert host_time.between_calls(CPU, taking(10.0)[1]) == 0.0  # type: ignore[arg-type]
    assert torch.equal(random, torch.get_rng_state())


def test_what_is_done_between_runs_is_not_part_of_their_time() -> None:
    now, clock_calls = [0.0], []

    def clock() -> float:
        clock_calls.append(time.perf_counter())
        return now[0]

    def call() -> None:
        now[0] += 1.0

    def between() -> None:
        now[0] += 100.0

    timing = time_calls(call, CPU, seconds=1e9, most=4, clock=clock, between=between)
    assert (timing.min_s, timing.max_s, timing.runs) == (1.0, 1.0, 4)
