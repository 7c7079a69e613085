from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.errors import PlanError
from outcore.planner import Pipeline, RankLink, split, split_by_hand
from outcore.planner.partition.interval_tables import IntervalTables
from outcore.planner.partition.milp import MilpObjective, solve_integer
from outcore.planner.partition.strategies import cut_pieces
from outcore.planner.partition.topological_orders import coarse_places, linear_orders
from tests.planner.nets import Net, build, nets, row_cuts, valid_cuts

PIPELINES = (
    Pipeline("model_parallel"),
    Pipeline("gpipe", 4),
    Pipeline("1f1b", 4),
    Pipeline("gems", 1, 2),
    Pipeline("model_parallel", 1, 3),
    Pipeline("gpipe", 2, 2),
    Pipeline("gems", 2, 3),
)
ROUTE = RankLink(bytes_per_s=2.0, latency_s=0.5)
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
few = settings(relaxed, max_examples=25)


@relaxed
@given(nets(), st.integers(1, 4), st.sampled_from(PIPELINES))
def test_tables_of_a_row_agree_with_cutting_it(net: Net, count: int, pipeline: Pipeline) -> None:
    pieces = net.pieces
    for order in linear_orders(pieces):
        line = IntervalTables(pieces, order)
        always, messages = line.always_bytes(), line.message_s(ROUTE)
        for cut in list(row_cuts(len(pieces), count))[:20]:
            ends = [cut.count(0)]
            for k in range(1, count):
                ends.append(ends[-1] + cut.count(k))
            stages = pieces.cut(line.stage_of(ends), count)
            loads, sent = pipeline.loads(stages), pipeline.message_s(stages, ROUTE)
            several = any(len(e.targets) > 1 for e in stages.edges)
            for k, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
                moving, single = line.moving_bytes(pipeline, k, count)[a, b], line.single_bytes()[a, b]
                assert (always[a, b], line.incoming_bytes[a, b]) == (loads[k].always, loads[k].incoming)
                assert messages[a, b] == pytest.approx(sent[k])
                assert line.time_s[a, b] == pytest.approx(stages.stages[k].forward_s + stages.stages[k].backward_s)
                if several:  # a row does not know to how many stages beyond it a value goes
                    assert moving <= loads[k].moving and single <= loads[k].single
                else:
                    assert (moving, single) == (loads[k].moving, loads[k].single)


@relaxed
@given(nets(), st.integers(2, 4))
def test_balance_by_compute_is_optimal_over_all_orders(net: Net, count: int) -> None:
    pieces = net.pieces
    if len(pieces) < count:
        return
    best = min(
        max(s.forward_s + s.backward_s for s in pieces.cut(cut, count).stages) for cut in valid_cuts(pieces, count)
    )
    found = split(net.graph, net.weights, stages=count)
    assert found.busiest_s == pytest.approx(best)


@few
@given(nets(9), st.integers(2, 4), st.sampled_from(PIPELINES))
def test_balance_by_memory_is_optimal_over_all_orders(net: Net, count: int, pipeline: Pipeline) -> None:
    pieces = net.pieces
    if len(pieces) < count:
        return
    best = min(max(pipeline.peak_bytes(pieces.cut(cut, count))) for cut in valid_cuts(pieces, count))
    found = split(net.graph, net.weights, stages=count, balance="memory", pipeline=pipeline)
    assert max(found.peak_bytes) == best


@few
@given(nets(9), st.integers(2, 4), st.sampled_from(PIPELINES), st.floats(0, 1))
def test_search_is_optimal_under_a_cap(net: Net, count: int, pipeline: Pipeline, tightness: float) -> None:
    pieces = net.pieces
    if len(pieces) < count:
        return
    cuts = [pieces.cut(cut, count) for cut in valid_cuts(pieces, count)]
    peaks = [max(pipeline.peak_bytes(stages)) for stages in cuts]
    cap = round(min(peaks) + tightness * (max(peaks) - min(peaks)))
    best = min(pipeline.step_s(s, ROUTE) for s, peak in zip(cuts, peaks, strict=True) if peak <= cap)
    stage_of, _ = cut_pieces(pieces, count, "search", pipeline, cap, ROUTE)
    found = pieces.cut(stage_of, count)
    assert max(pipeline.peak_bytes(found)) <= cap
    assert pipeline.step_s(found, ROUTE) == pytest.approx(best, rel=1e-6)
    with pytest.raises(PlanError, match=rf"need {min(peaks):,} bytes"):
        cut_pieces(pieces, count, "search", pipeline, min(peaks) - 1, ROUTE)


@few
@given(nets(11), st.integers(1, 4), st.sampled_from(PIPELINES), st.sampled_from(["compute", "memory", "search"]))
def test_every_partition_is_valid(net: Net, count: int, pipeline: Pipeline, balance: str) -> None:
    if len(net.pieces) < count:
        return
    found = split(net.graph, net.weights, stages=count, balance=balance, pipeline=pipeline)  # type: ignore[arg-type]
    stages = found.stages.stages
    placed = {call: k for k, stage in enumerate(stages) for call in stage.calls}
    assert len(stages) == count and all(s.calls for s in stages)
    assert sorted(placed) == sorted(net.graph.calls)
    for call in net.graph.calls.values():
        for value in call.inputs:
            producer = net.graph.values[value].producer
            assert producer is None or placed[producer] <= placed[call.name]
    for edge in found.stages.edges:
        assert edge.targets == tuple(sorted(set(edge.targets))) and edge.targets[0] > edge.source
    again = split_by_hand(net.graph, net.weights, found.names, pipeline=pipeline)
    assert sorted(again.stages.edges, key=str) == sorted(found.stages.edges, key=str)
    assert again.peak_bytes == found.peak_bytes


@relaxed
@given(nets(14), st.integers(2, 8))
def test_orders_respect_the_data_flow_and_coarse_places_lie_inside(net: Net, most: int) -> None:
    pieces = net.pieces
    for order in linear_orders(pieces):
        where = {unit: i for i, unit in enumerate(order)}
        assert sorted(order) == list(range(len(pieces)))
        assert all(where[s] < where[u] for u, sources in enumerate(pieces.units.before) for s in sources)
        places = coarse_places(pieces, order, most)
        assert places is None or (len(places) <= most and all(0 < p < len(pieces) for p in places))


def test_a_skip_goes_straight_to_every_stage_that_uses_it() -> None:
    net = build([[-1], [0], [1], [2, 0], [3, 0]], [1.0] * 5, sizes=[100, 8, 8, 8, 8])
    found = split_by_hand(net.graph, net.weights, [["c0"], ["c1", "c2"], ["c3"], ["c4"]])
    skip = next(e for e in found.stages.edges if e.value == "c0#0:out")
    assert (skip.source, skip.targets, skip.bytes) == (0, (1, 2, 3), 100)
    held = [stage.saved_bytes for stage in found.stages.stages]
    assert held == [104, 108, 116, 108]  # stage 0 also holds the model's input


def test_memory_kept_on_both_sides_of_a_cut_is_held_on_both_and_once_inside() -> None:
    net = build([[-1], [0], [1]], [1.0] * 3, sizes=[100, 10, 1], keeps=[{0}, {0}, {1}])
    together = split_by_hand(net.graph, net.weights, [["c0", "c1"], ["c2"]])
    apart = split_by_hand(net.graph, net.weights, [["c0"], ["c1", "c2"]])
    assert [s.saved_bytes for s in together.stages.stages] == [114, 10]
    assert [s.saved_bytes for s in apart.stages.stages] == [104, 110]


def test_outputs_made_early_travel_to_the_loss() -> None:
    net = build([[-1], [0], [1]], [1.0] * 3, outputs={0})
    found = split_by_hand(net.graph, net.weights, [["c0"], ["c1"], ["c2"]])
    assert {(e.value, e.targets) for e in found.stages.edges} == {("c0#0:out", (1, 2)), ("c1#0:out", (2,))}


def test_moving_a_branch_beats_every_cut_of_the_recorded_order() -> None:
    # The heavy one of three parallel branches is recorded between the others.
    net = build([[-1], [0], [0], [0], [1, 2, 3]], [1.0, 2.0, 3.0, 2.0, 1.0])
    pieces = net.pieces
    in_row = min(max(s.forward_s for s in pieces.cut(cut, 2).stages) for cut in row_cuts(5, 2))
    found = split(net.graph, net.weights, stages=2)
    assert (found.busiest_s / 3, in_row) == (5, 6)


def test_pairs_are_balanced_under_gems() -> None:
    # Equal single stages would put both heavy ends on one rank.
    net = build(
        [[-1], *([i] for i in range(7))],
        [1.0] * 8,
        sizes=[1] * 8,
        parameters=[80, 10, 10, 10, 10, 10, 10, 60],
    )
    gems = Pipeline("gems", 1, 2)
    single = split(net.graph, net.weights, stages=4, balance="memory", pipeline=Pipeline("model_parallel"))
    paired = split(net.graph, net.weights, stages=4, balance="memory", pipeline=gems)
    assert max(paired.peak_bytes) <= max(gems.peak_bytes(single.stages))
    best = min(max(gems.peak_bytes(net.pieces.cut(c, 4))) for c in valid_cuts(net.pieces, 4))
    assert max(paired.peak_bytes) == best


def test_too_many_stages_and_unknown_words_are_refused() -> None:
    net = build([[-1], [0]], [1.0, 1.0])
    with pytest.raises(PlanError, match="3 stages asked for, but only 2 units"):
        split(net.graph, net.weights, stages=3)
    with pytest.raises(PlanError, match="no balance 'weight'; there are compute, memory, search"):
        split(net.graph, net.weights, stages=2, balance="weight")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no schedule 'zigzag'"):
        Pipeline("zigzag")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="granularity 0 is too coarse"):
        split(net.graph, net.weights, stages=2, granularity=0)


def test_closed_forms_hold_for_equal_stages() -> None:
    for depth in range(2, 9):
        net = build([[-1], *([i] for i in range(depth - 1))], [1.0] * depth)
        stages = split(net.graph, net.weights, stages=depth).stages
        free = RankLink(bytes_per_s=float("inf"), latency_s=0.0)
        for m in range(1, 9):
            assert Pipeline("gpipe", m).step_s(stages, free) == 3 * (m + depth - 1)
            assert Pipeline("model_parallel", 1, m).step_s(stages, free) == 3 * depth * m
            assert Pipeline("gems", 1, m).step_s(stages, free) == depth + 2 * depth * m + m - 1


def test_gradients_of_early_outputs_count_in_the_integer_program() -> None:
    # Four ends: what the loss sends back is held where they were made.
    inputs = [[-1], [-1], [-1], [2], [2]]
    net = build(inputs, [1.0] * 5, sizes=[7, 1, 8, 5, 4], keeps=[{-1}, {-1}, {2}, {2}, {4}])
    pipeline = Pipeline("model_parallel")
    best = min(max(pipeline.peak_bytes(net.pieces.cut(c, 3))) for c in valid_cuts(net.pieces, 3))
    exact = solve_integer(net.pieces, 3, pipeline, MilpObjective(memory=1.0))
    assert exact is not None and max(pipeline.peak_bytes(net.pieces.cut(exact, 3))) == best == 26
