"""What the simulator charges for transfers, copies, scripts and memory, and what is drawn from it."""

import json
import xml.etree.ElementTree as ElementTree
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from rich.console import Console

from outcore.errors import ProgramError
from outcore.machine import Link, parse
from outcore.program import (
    Backward,
    Edge,
    Forward,
    Links,
    Program,
    Stage,
    Stages,
    Tie,
    Timeline,
    chart,
    compile_program,
    load_trace,
    rich_gantt,
    save_trace,
    simulate,
    trace,
)
from outcore.program.script import Decode, Encode, Evict, Fetch, Recompute, Run, Wait
from outcore.program.simulator.links import LinkSchedule
from tests.program.networks import programs

WIRE = Links(Link.symmetric(bandwidth_bytes_per_s=4.0, latency_s=0.5))


def test_a_transfer_takes_its_bytes_and_one_latency() -> None:
    """F0 1 s, 8 bytes at 4 per second and 0.5 s, F 1 s, B 2 s, the same way back, B 2 s."""
    stages = Stages.uniform(2, edge_bytes=8)
    timeline = simulate(compile_program(stages, "gpipe"), stages, WIRE)
    assert timeline.step_s == 1 + 2.5 + 1 + 2 + 2.5 + 2
    assert timeline.busy_s() == (3, 3)
    assert timeline.communication_s() == (2 + 2.5, 2.5 + 2)
    assert timeline.exposed_s() == (4.5, 2.5 + 2)


def test_a_message_takes_the_hosts_at_its_ends_some_time() -> None:
    """A quarter of a second before each of the two messages leaves, and one before the first forward, where the receive
    of its gradient is issued; that of the other rank passes while it waits."""
    stages = Stages.uniform(2, edge_bytes=8)
    wire = Links(Link.symmetric(bandwidth_bytes_per_s=4.0, latency_s=0.5, host_s=0.25))
    assert simulate(compile_program(stages, "gpipe"), stages, wire).step_s == 11 + 3 * 0.25
    # On one processor, what the hosts do takes turns with computing.
    shared = replace(wire, processors=1)
    assert simulate(compile_program(stages, "gpipe"), stages, shared).step_s >= 11 + 3 * 0.25


def test_a_gap_keeps_messages_apart_and_adding_up_takes_time_of_its_own() -> None:
    link = Link.symmetric(bandwidth_bytes_per_s=4.0, latency_s=0.5, gap_s=1.0, adding_s_per_byte=0.25)
    traffic = LinkSchedule(Links(link))
    assert traffic.transfer(0, 1, 8, 0.0) == (0.0, 3.0, 3.5)
    assert traffic.transfer(2, 1, 8, 0.0) == (3.0, 6.0, 6.5)  # the same end
    assert traffic.transfer(3, 4, 8, 0.0) == (0.0, 3.0, 3.5)
    bare = LinkSchedule(Links(replace(link, gap_s=0.0, adding_s_per_byte=0.0))).reduce([0, 1], 8, 0.0)
    start, end = LinkSchedule(Links(replace(link, gap_s=0.0))).reduce([0, 1], 8, 0.0)
    assert (start, end) == (bare[0], bare[1] + 2.0)


@settings(max_examples=60, deadline=None)
@given(programs())
def test_with_free_links_the_step_is_the_longest_path(case: tuple[Stages, Program]) -> None:
    """Each compute starts when the one before it on its rank and all that make its inputs have ended, and not later."""
    network, program = case
    incoming, outgoing = network.incoming(), network.outgoing()
    end: dict[tuple[type, int, int, int], float] = {}
    rows = [deque(program.computes(rank)) for rank in range(len(program))]
    free = [0.0] * len(program)
    while any(rows):
        for rank, row in enumerate(rows):
            while row:
                c, costs = row[0], network.stages[row[0].stage]
                if isinstance(c, Forward):
                    makers, taken_s = [(Forward, edge.source) for edge in incoming[c.stage]], costs.forward_s
                else:
                    edges = [edge for edge in outgoing[c.stage] if edge.has_gradient]
                    makers, taken_s = [(Backward, user) for edge in edges for user in edge.targets], costs.backward_s
                needed = [end.get((kind, stage, c.micro_batch, c.replica)) for kind, stage in makers]
                if None in needed:
                    break
                row.popleft()
                free[rank] = max(free[rank], *needed, 0.0) + taken_s
                end[type(c), c.stage, c.micro_batch, c.replica] = free[rank]
    assert simulate(program, network).step_s == pytest.approx(max(free))


def test_transfers_overlap_with_computing_when_the_next_receive_is_issued_early() -> None:
    """From the second micro-batch on a transfer of 1 s hides behind a forward of 2 s."""
    stages = Stages.uniform(2, forward_s=2.0, backward_s=2.0, edge_bytes=4)
    links = Links(Link.symmetric(bandwidth_bytes_per_s=4.0))
    early, late = (
        simulate(compile_program(stages, "gpipe", micro_batches=6, ahead=ahead), stages, links).step_s
        for ahead in (1, 0)
    )
    assert early == 2 * (6 + 1) * 2 + 2
    assert late > early


def test_two_values_share_the_way_out_of_a_rank() -> None:
    stage = Stage((), 1.0, 1.0, 0, 0, 0, 0, 0)
    stages = Stages((stage,) * 3, (Edge("a", 0, (1, 2), 8, False),))
    timeline = simulate(compile_program(stages, "gpipe"), stages, Links(Link.symmetric(bandwidth_bytes_per_s=4.0)))
    arrivals = sorted(event.end_s for event in timeline.events if event.stream == "receive")
    assert arrivals == [3.0, 5.0]


def test_ranks_of_a_node_share_its_way_to_other_nodes() -> None:
    slow = Link.symmetric(bandwidth_bytes_per_s=1.0)
    traffic = LinkSchedule(Links(between_nodes=slow, devices_per_node=2))
    assert traffic.transfer(0, 1, 5, 0.0) == (0.0, 0.0, 0.0)
    assert traffic.transfer(0, 2, 5, 0.0) == (0.0, 5.0, 5.0)
    assert traffic.transfer(1, 3, 5, 0.0) == (5.0, 10.0, 10.0)
    assert traffic.transfer(2, 0, 5, 0.0) == (0.0, 5.0, 5.0)


def test_an_all_reduce_is_a_ring_and_the_step_waits_for_it() -> None:
    """2·(n - 1) times a latency and an n-th of the bytes: n = 4, 8 bytes, 4 per second, 0.5 s."""
    stages = Stages((Stage((), 1.0, 2.0, 0, 0, 8, 8, 0, optimizer_s=1.0),), ())
    timeline = simulate(compile_program(stages, "gpipe", replicas=4), stages, WIRE)
    assert timeline.step_s == 3 + 2 * 3 * (0.5 + 2 / 4) + 1
    slow = Links(Link.symmetric(bandwidth_bytes_per_s=4.0, latency_s=0.5, host_s=0.25))
    timeline = simulate(compile_program(stages, "gpipe", replicas=4), stages, slow)
    assert timeline.step_s == 3 + 2 * 3 * (0.5 + 2 * 0.25 + 2 / 4) + 1


def test_copies_run_beside_computing_and_share_a_bus_that_is_not_duplex() -> None:
    duplex = Links(host=Link.symmetric(bandwidth_bytes_per_s=4.0))
    half = Links(host=Link.symmetric(bandwidth_bytes_per_s=4.0, duplex=False))
    for links, expected in ((duplex, (0.0, 2.0)), (half, (0.0, 4.0))):
        traffic = LinkSchedule(links)
        assert traffic.copy(0, "away", 8, 0.0) == (0.0, 2.0)
        assert traffic.copy(0, "back", 8, 0.0) == expected


def test_offloaded_activations_leave_after_their_forward_and_come_back_before_their_backward() -> None:
    stages = Stages((Stage((), 1.0, 2.0, 8, 0, 0, 0, 0),), ())
    first = Forward(0, 0, 0, (Run(("a",), 1.0), Evict("a", 8)))
    back = Backward(0, 0, 0, (Fetch("a", 8), Wait("a"), Run(("a",), 2.0)))
    program = Program("offload", ((first, Forward(0, 1), back, Backward(0, 1)),))
    timeline = simulate(program, stages, Links(host=Link.symmetric(bandwidth_bytes_per_s=8.0)))
    assert timeline.step_s == 1 + 1 + 1 + 2 + 2
    curve = timeline.memory[0]
    assert list(zip(curve.times_s, curve.bytes, strict=True)) == [(0, 8), (1, 16), (2, 16), (5, 8), (7, 0)]


def test_a_script_is_walked_in_order() -> None:
    """Evict beside the second half of the forward; fetch, recompute meanwhile, wait, then the backward."""
    stages = Stages((Stage((), 9.0, 9.0, 10, 0, 0, 0, 0),), ())
    forward = (Run(("a",), 1.0), Evict("a", 4), Run(("b",), 1.0), Encode("b", "bits", 3, 0.5))
    backward = (
        Fetch("a", 4),
        Recompute("c", ("c",), 2, 0.5),
        Wait("a"),
        Decode("b", "bits", 3, 0.5),
        Run(("b", "a"), 2.0),
    )
    program = Program("scripted", ((Forward(0, 0, 0, forward), Backward(0, 0, 0, backward)),))
    timeline = simulate(program, stages, Links(host=Link.symmetric(bandwidth_bytes_per_s=4.0)))
    assert timeline.step_s == 2.5 + 1.0 + 0.5 + 2.0
    curve = timeline.memory[0]
    assert list(zip(curve.times_s, curve.bytes, strict=True)) == [(0, 10), (2, 6), (2.5, 9), (3.5, 12), (6, 0)]
    whole = Program("whole", ((Forward(0, 0, 0, (Evict("a", 4),)), Backward(0, 0, 0, (Fetch("a", 4), Wait("a")))),))
    assert simulate(whole, stages, Links(host=Link.symmetric(bandwidth_bytes_per_s=4.0))).step_s == 9 + 1 + 1 + 9


def test_the_peak_counts_all_that_a_rank_holds() -> None:
    """Rank 0 at its backward: 10 + 10 + 20 always, 100 saved, 7 workspace, and the received gradient of 4."""
    stage = Stage((), 1.0, 2.0, 100, 7, 10, 10, 20)
    stages = Stages((stage, stage), (Edge("x", 0, (1,), 4, True),))
    first, second = simulate(compile_program(stages, "gpipe"), stages, WIRE).memory
    always = {"parameters": 10, "gradients": 10, "state": 20, "saved": 100, "workspace": 7}
    assert first.parts() == {**always, "buffers": 4}
    assert second.parts() == {**always, "buffers": 4}
    assert first.peak_bytes == 151


def test_gems_holds_both_stages_and_the_larger_activations() -> None:
    stages = [Stage((), 1.0, 2.0, saved, 0, weights, weights, 0) for saved, weights in ((50, 1), (20, 2), (10, 3))]
    network = Stages(tuple(stages), tuple(Edge(f"x{i}", i, (i + 1,), 0, True) for i in range(2)))
    timeline = simulate(compile_program(network, "gems-mast"), network)
    assert timeline.peak_bytes == (50 + 2 * (1 + 3), 20 + 2 * 2, 50 + 2 * (1 + 3))


@settings(max_examples=25, deadline=None)
@given(programs())
def test_a_trace_is_json_with_every_event(case: tuple[Stages, Program]) -> None:
    network, program = case
    timeline = simulate(program, network, WIRE)
    rows = json.loads(json.dumps(trace(timeline)))["traceEvents"]
    bars = [(r["pid"], r["name"], r["ts"], r["dur"]) for r in rows if r["ph"] == "X"]
    assert bars == [(e.rank, e.name, e.start_s * 1e6, (e.end_s - e.start_s) * 1e6) for e in timeline.events]
    assert sum(r["ph"] == "C" for r in rows) == sum(len(curve.times_s) for curve in timeline.memory)
    computes = sum(1 for rank in range(len(program)) for _ in program.computes(rank))
    assert sum(r.get("cat") in ("forward", "backward") for r in rows) == computes
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


def test_pictures_fit_the_terminal_and_are_well_formed(tmp_path: Path) -> None:
    stages = Stages.uniform(6, saved_bytes=1 << 20, edge_bytes=2, gradient_bytes=1 << 20)
    timeline = simulate(compile_program(stages, "gems-master", micro_batches=3, batches=4, replicas=8), stages, WIRE)
    plain = rich_gantt(timeline).plain.strip()
    assert max(map(len, plain.splitlines())) <= 80
    assert len(plain.splitlines()) == 24 + 3
    console = Console(width=100, file=(tmp_path / "out.txt").open("w"), force_terminal=False)
    console.print(rich_gantt(timeline))
    console.file.close()
    assert (tmp_path / "out.txt").read_text().strip() == plain
    root = ElementTree.fromstring(chart(timeline))
    bars = [e for e in root.iter() if e.tag.endswith("title")]
    assert len(bars) == sum(e.end_s > e.start_s for e in timeline.events)
    save_trace(timeline, tmp_path / "trace.json")
    again = load_trace(tmp_path / "trace.json")
    assert [e[:4] + e[6:] for e in again.events] == [e[:4] + e[6:] for e in timeline.events]
    assert again.step_s == pytest.approx(timeline.step_s) and again.peak_bytes == timeline.peak_bytes
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["name"] == "gems-master"
    assert "… 16 more ranks" in str(timeline)


def test_links_come_from_a_machine() -> None:
    machine = parse("2x4xv100")
    links = Links.of(machine)
    assert links.devices_per_node == 4
    assert links.between(0, 3) == (1 / machine.between_devices.away_bytes_per_s, machine.between_devices.latency_s)
    assert links.host == machine.host_link.pinned
    with pytest.raises(ProgramError, match=r"the link between_nodes of machine .* is not known"):
        Links.of(replace(machine, between_nodes=None))
    with pytest.raises(ProgramError, match="0 devices"):
        Links(devices_per_node=0)


def test_gradients_of_tied_copies_are_added_before_any_step() -> None:
    """A ring over the two ranks that hold a copy, after the slower of them, and only then their steps."""
    chain = Stages.uniform(3, gradient_bytes=8)
    tied = Stages(tuple(replace(s, optimizer_s=1.0) for s in chain.stages), chain.edges, (Tie((0, 2), 400),))
    links = Links(Link.symmetric(bandwidth_bytes_per_s=100.0))
    program = compile_program(tied, "gpipe", micro_batches=2)
    free, timed = (simulate(program, s, links) for s in (replace(tied, ties=()), tied))
    last_backward = max(e.end_s for e in timed.events if e.kind == "backward" and e.rank in (0, 2))
    rows = [e for e in timed.events if e.kind == "reduce"]
    assert [(e.rank, e.name, e.start_s, e.end_s) for e in rows] == [
        (rank, "R0+2", last_backward, last_backward + 4.0) for rank in (0, 2)
    ]
    steps = {e.rank: e.start_s for e in timed.events if e.kind == "step"}
    assert steps[0] == steps[2] == last_backward + 4.0 and steps[1] < steps[0]
    assert timed.step_s == free.step_s + 4.0
    assert Stages.from_json(tied.to_json()) == tied


def test_all_reduces_that_follow_each_other_wait_for_one_latency() -> None:
    """What a link carries goes one after the other; the latency of the first is no reason to begin the second later."""
    link = Link.symmetric(bandwidth_bytes_per_s=1e6, latency_s=0.1, host_s=0.01)
    traffic = LinkSchedule(Links(link))
    first, second = (traffic.reduce((0, 1), 1_000_000, 0.0) for _ in range(2))
    moved_s = 2 * (0.5 + 2 * 0.01)
    assert first == pytest.approx((0.0, moved_s + 2 * 0.1))
    assert second == pytest.approx((moved_s, 2 * moved_s + 2 * 0.1))
