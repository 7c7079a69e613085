"""Closed forms, the judge and the simulator: one figure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.machine.link import Link
from outcore.planner import Pipeline, RankLink
from outcore.planner.partition.strategies import PartitionTask
from outcore.planner.pipeline.lower import SCHEDULE_NAMES, simulate_candidate
from outcore.program import Links, Stages, compile_program, simulate
from tests.planner.nets import Net, nets, valid_cuts
from tests.planner.partition.test_partition import PIPELINES, ROUTE

relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
FREE = RankLink(bytes_per_s=1e30, latency_s=0.0)


def some_cut(net: Net, count: int, draw: st.DataObject) -> Stages | None:
    cuts = list(valid_cuts(net.pieces, count)) if len(net.pieces) >= count else []
    return net.pieces.cut(draw.draw(st.sampled_from(cuts)), count) if cuts else None


@relaxed
@given(nets(7), st.integers(1, 4), st.sampled_from(PIPELINES), st.data())
def test_closed_forms_of_memory_are_the_simulators(
    net: Net, count: int, pipeline: Pipeline, draw: st.DataObject
) -> None:
    stages = some_cut(net, count, draw)
    if stages is None:
        return
    even = Stages(tuple(replace(s, forward_s=1.0, backward_s=2.0) for s in stages.stages), stages.edges)
    assert simulate_candidate(even, pipeline, 1, FREE).peak_bytes == pipeline.peak_bytes(even)


@relaxed
@given(nets(7), st.integers(1, 4), st.sampled_from(PIPELINES), st.integers(2, 3), st.data())
def test_one_replica_stands_for_all(
    net: Net, count: int, pipeline: Pipeline, replicas: int, draw: st.DataObject
) -> None:
    stages = some_cut(net, count, draw)
    if stages is None:
        return
    program = compile_program(
        stages,
        SCHEDULE_NAMES[pipeline.schedule],
        micro_batches=pipeline.micro_batches,
        batches=pipeline.batches,
        replicas=replicas,
    )
    link = Link.symmetric(bandwidth_bytes_per_s=ROUTE.bytes_per_s, latency_s=ROUTE.latency_s)
    whole = simulate(program, stages, Links(link))
    simulated = simulate_candidate(stages, pipeline, replicas, ROUTE)
    assert simulated.peak_bytes == whole.peak_bytes[: len(stages)]
    if pipeline.paired:  # two rings on one rank wait for each other a little differently
        assert simulated.time_s == pytest.approx(whole.step_s, rel=0.15)
    else:
        assert simulated.time_s == pytest.approx(whole.step_s)


@pytest.mark.parametrize(
    "pipeline",
    [Pipeline("model_parallel", 1, 90), Pipeline("gpipe", 3, 30), Pipeline("1f1b", 90), Pipeline("gems", 1, 91)],
    ids=str,
)
def test_a_long_program_is_counted_on_from_short_ones(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Stages.uniform(4, saved_bytes=3, edge_bytes=1, gradient_bytes=2)
    whole = simulate_candidate(stages, pipeline, 1, RankLink(4.0, 0.25))
    monkeypatch.setattr("outcore.planner.pipeline.lower._LARGEST", 120)
    short = simulate_candidate(stages, pipeline, 1, RankLink(4.0, 0.25))
    assert short.judge != whole.judge == "simulated"
    assert short.time_s == pytest.approx(whole.time_s, rel=0.02) and short.bubble == pytest.approx(
        whole.bubble, abs=0.02
    )
    assert short.peak_bytes == whole.peak_bytes


@relaxed
@given(
    nets(7), st.integers(2, 4), st.sampled_from(PIPELINES), st.sampled_from(["compute", "memory", "search"]), st.data()
)
def test_the_integer_program_finds_the_best_partition(
    net: Net, count: int, pipeline: Pipeline, balance: str, draw: st.DataObject
) -> None:
    from outcore.planner.partition.milp import solve_integer
    from outcore.planner.partition.strategies import _aim

    pieces = replace(net.pieces, update_bytes_per_s=draw.draw(st.sampled_from([float("inf"), 3.0])))
    cuts = list(valid_cuts(pieces, count)) if len(pieces) >= count else []
    if not cuts:
        return
    peaks = [max(pipeline.peak_bytes(pieces.cut(cut, count))) for cut in cuts]
    cap = draw.draw(st.none() | st.integers(min(peaks), max(peaks)))
    task = PartitionTask(pieces, count, balance, pipeline, cap, ROUTE)  # type: ignore[arg-type]
    best = min(task.score(task.stages(cut)) for cut in cuts)
    exact = solve_integer(pieces, count, pipeline, _aim(task))
    assert exact is not None
    found = task.score(task.stages(exact))
    assert (found[0], found[1]) == (best[0], pytest.approx(best[1], rel=1e-6))
