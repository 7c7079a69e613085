"""What a step holds at every moment, and how long it takes, for one choice of saved values.

The forward runs in the order of the joint graph. The backward runs as torch orders it: its own operations in their
order, and before each what has to be made again for it, once, shared by all that need it later. Inductor turns both
into kernels. An operation that it can fuse gets no memory of its own unless a library reads it, it leaves the graph, it
is a reduction, or so much would have to be read to make it again in every reader that Inductor stores it. Whoever reads
a value without memory reads what that is made of instead, which therefore lives as long. Memory is taken when a kernel
writes and given back after its last reader; a fused kernel writes over what it reads last if that has the same size.

    saved ──┐             forward:  results and saved values stay
            ├─ lifetimes  turn:     the loss
    order ──┘             backward: saved values go with their last reader, gradients of parameters stay

A saved value can leave the device instead: its memory is free after the copy out, and taken again when the copy back
begins (`outcore.compiled.times.copy_times`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outcore.compiled.joint_graph import JointGraph
from outcore.compiled.times.copy_times import EARLY, copies_back, copies_out
from outcore.compiled.times.fused_times import kernel_times
from outcore.compiled.times.host_times import ENTER, PARAMETER, WAY, host_and_device_s

__all__ = ["Held", "Moment", "StepOfGraph", "Way", "step_of"]

_READS = 4
"""More buffers than this, and a value with several readers is stored (Inductor's `realize_reads_threshold`)."""
_CALLS = 4
"""Operations that a value's way out and back takes."""
_CHAIN = 30
"""Fused operations after which a value is stored (Inductor's `realize_opcount_threshold`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer between two kernels."""

    source: int
    bytes: int
    first: int
    last: int
    over: int = -1
    """The buffer whose memory it takes over."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The kernel at which most is held."""

    phase: str
    """"forward", "loss" or "backward"."""
    number: int
    """Of the kernel in its phase."""
    node: int


@dataclass(frozen=True, slots=True)
class Way:
    """The way of a saved value out and back."""

    value: int
    free_after: int | None
    """The node of the forward after which its memory is free; none for the last."""
    fetch_before: int
    """The node of the backward before which it begins to come back."""


@dataclass(frozen=True)
class StepOfGraph:
    """A step with one choice of saved values."""

    saved: frozenset[int]
    """What backward is given of the forward's values; inputs of the graph are not counted among them."""
    peak_bytes: int
    """Beside the graph's inputs."""
    seconds: float
    peak: Moment
    saved_bytes: int
    again: frozenset[int]
    """Values of the forward that the backward makes again."""
    forward_bytes: int
    """At the end of the forward: what is saved, and the results."""
    backward: list[Held] = field(repr=False)
    """Buffers of the backward, saved values in it; those have `first` -1."""
    forward: list[Held] = field(repr=False)
    inputs: frozenset[int] = field(repr=False, default=frozenset())
    """Inputs of the graph that backward is given again."""
    ways: tuple[Way, ...] = ()
    """Of the saved values that leave the device."""
    offloaded: frozenset[int] = frozenset()
    """Their buffers."""
    offloaded_bytes: int = 0
    host_s: float = 0.0
    """What the host takes to launch all of it."""
    device_s: float = 0.0
    """What its kernels take."""
    forward_s: float = 0.0
    """What a forward alone takes."""


@dataclass(slots=True)
class _Kernels:
    """One graph as kernels."""

    nodes: list[int]
    reads: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    seconds: list[float]
    work: float
    """Of the host, in simple operations."""


def step_of(
    graph: JointGraph,
    saved: Iterable[int],
    *,
    offloaded: frozenset[int] = frozenset(),
    early: float = EARLY,
    loss_bytes: int = 0,
) -> StepOfGraph:
    """Lifetimes and time of a step.

    Args:
        graph: the joint graph.
        saved: numbers of values to hand to the backward; what must not be computed twice is added where needed.
        offloaded: buffers of them that leave the device in between; those that cannot stay.
        early: how many times its length a copy back begins before its value is read.
        loss_bytes: what the loss holds between forward and backward, beside the results and their gradients.
    """
    chosen = set(saved)
    needed, again, inputs = _needed(graph, chosen)
    # A view was to be saved and its base to be made again: both are the same memory where the base is saved too.
    if twice := {graph.source[i] for i in needed} & again:
        needed, again, inputs = _needed(graph, chosen | twice)
    order = _backward_order(graph, again)
    source, size = graph.source, graph.bytes
    results = {source[i] for i in graph.outputs if not graph.given[source[i]]}
    held = {source[i] for i in needed if not graph.given[source[i]]}
    forward_nodes = _forward_order(graph, needed)
    forward = _kernels(graph, forward_nodes, results | held)
    backward = _kernels(graph, order, {source[i] for i in graph.gradients})
    gradients = {source[i] for i in graph.gradients}
    moving = _moving(graph, needed, offloaded - results - gradients) if offloaded else {}
    unit_s = graph.rates.host_s
    host_s = unit_s * (ENTER + PARAMETER * len(graph.gradients) + forward.work + backward.work)
    device_s = sum(forward.seconds) + sum(backward.seconds)
    slower = max(1.0, host_s / device_s) if device_s else 1.0
    free_after, fetch_before, waited = _copies(graph, forward, backward, moving, early, slower)
    # What is copied is read and written beside the kernels, in the same memory.
    rates = graph.rates
    device_s += sum(2 * size[b] / rates.bytes_per_s + _CALLS * rates.launch_s for b in fetch_before)
    host_s += unit_s * WAY * len(fetch_before)
    converted: frozenset[int] = graph.converted if not moving else frozenset()
    stay = (results | held | (converted & inputs)) - moving.keys()
    curve, intervals = _sweep(graph, forward, set(converted), stay, until=free_after)
    at_turn = sum(size[b] for b in stay)
    tangents = {source[i] for i in graph.tangents}
    turn = at_turn + loss_bytes + sum(size[t] for t in tangents)
    start = (held | tangents | results | (converted & inputs)) - moving.keys()
    back_curve, back_intervals = _sweep(graph, backward, start, gradients | results, since=fetch_before)
    top = max(range(len(curve)), key=curve.__getitem__, default=0) if curve else 0
    low = max(range(len(back_curve)), key=back_curve.__getitem__, default=0) if back_curve else 0
    most = [
        (curve[top] if curve else 0, Moment("forward", top, forward.nodes[top] if forward.nodes else 0)),
        (turn, Moment("loss", 0, 0)),
        (back_curve[low] if back_curve else 0, Moment("backward", low, backward.nodes[low] if backward.nodes else 0)),
    ]
    peak_bytes, peak = max(most, key=lambda one: one[0])
    return StepOfGraph(
        saved=frozenset(needed),
        peak_bytes=peak_bytes,
        seconds=host_and_device_s(host_s, device_s) + waited,
        peak=peak,
        saved_bytes=sum(size[b] for b in held),
        again=frozenset(again),
        forward_bytes=at_turn,
        backward=back_intervals,
        forward=intervals,
        inputs=frozenset(inputs),
        ways=tuple(
            Way(
                moving[b],
                forward.nodes[free_after[b]] if free_after[b] < len(forward.nodes) else None,
                backward.nodes[fetch_before[b]],
            )
            for b in sorted(fetch_before)
        ),
        offloaded=frozenset(fetch_before),
        offloaded_bytes=sum(size[b] for b in fetch_before),
        host_s=host_s,
        device_s=device_s,
        forward_s=host_and_device_s(unit_s * (ENTER / 2 + forward.work), sum(forward.seconds)),
    )


def _moving(graph: JointGraph, needed: set[int], offloaded: frozenset[int]) -> dict[int, int]:
    """Of the buffers that are to leave, those that can, each with its value: one that fills its buffer, and is the only
    one that backward is given of it; and no more than there is room for."""
    given: dict[int, list[int]] = {}
    for i in needed:
        given.setdefault(graph.source[i], []).append(i)
    moving: dict[int, int] = {}
    link = graph.rates.link
    room = link.capacity_bytes if link is not None else 0
    taken = 0
    for b in sorted(offloaded):
        values = given.get(b, ())
        if len(values) != 1 or not graph.fills[values[0]] or graph.given[b]:
            continue
        taken += graph.bytes[b]
        if room is not None and taken > room:
            break
        moving[b] = values[0]
    return moving


def _copies(
    graph: JointGraph, forward: _Kernels, backward: _Kernels, moving: dict[int, int], early: float, slower: float
) -> tuple[dict[int, int], dict[int, int], float]:
    """By buffer the kernel after which its memory is free and the one before which it is taken again; and what is
    waited, where the host makes kernels so many times slower. A buffer that no kernel of the backward reads is left out
    of both."""
    link = graph.rates.link
    if not moving or link is None:
        moving.clear()
        return {}, {}, 0.0
    made = {w: k for k, written in enumerate(forward.writes) for w in written if w in moving}
    last = {s: k for k, found in enumerate(forward.reads) for s in found if s in moving}
    first: dict[int, int] = {}
    for k, found in enumerate(backward.reads):
        for s in found:
            if s in made and s not in first:
                first[s] = k
    for b in moving.keys() - first.keys():
        del moving[b]
    size = graph.bytes
    out = copies_out(
        [slower * t for t in forward.seconds],
        {b: made[b] for b in first},
        last,
        {b: size[b] / link.out_bytes_per_s for b in first},
    )
    copy_s = {b: size[b] / link.in_bytes_per_s for b in first}
    back = copies_back([slower * t for t in backward.seconds], first, copy_s, early)
    return out.free_after, back.fetch_before, out.wait_s + back.wait_s


def _needed(graph: JointGraph, saved: set[int]) -> tuple[set[int], set[int], set[int]]:
    """What of the saved values the backward uses, what it makes again, and the inputs it is given."""
    used: set[int] = set()
    again: set[int] = set()
    inputs: set[int] = set()
    seen = bytearray(len(graph.nodes))
    waiting = list(graph.gradients)
    given, backward, fixed, tensor = graph.given, graph.is_backward, graph.fixed, graph.tensor
    while waiting:
        i = waiting.pop()
        if seen[i]:
            continue
        seen[i] = 1
        if given[i]:
            if not backward[i]:
                inputs.add(i)
            continue
        if not backward[i] and tensor[i] and (i in saved or fixed[i]):
            used.add(i)
            continue
        again.add(i)
        waiting += graph.arguments[i]
    return used, again, inputs


def _backward_order(graph: JointGraph, again: set[int]) -> list[int]:
    """The nodes of the backward in the order in which torch puts them."""
    order: list[int] = []
    placed = bytearray(len(graph.nodes))

    def place(number: int) -> None:
        if placed[number]:
            return
        found, waiting = [], [number]
        while waiting:
            i = waiting.pop()
            if placed[i]:
                continue
            placed[i] = 1
            found.append(i)
            waiting += [a for a in graph.arguments[i] if a in again]
        found.sort()
        order.extend(found)

    chosen = sorted(again)
    for i in chosen:
        if i >= graph.first_backward:
            place(i)
    for i in graph.gradients:
        if i in again:
            place(i)
    return order


def _forward_order(graph: JointGraph, needed: set[int]) -> list[int]:
    """The nodes of the forward: what its results need, and what is saved beside."""
    beside: set[int] = set()
    waiting = [i for i in needed if not graph.is_forward[i]]
    while waiting:
        i = waiting.pop()
        if i in beside or graph.is_forward[i] or graph.given[i]:
            continue
        beside.add(i)
        waiting += graph.arguments[i]
    return graph.forward_order if not beside else sorted([*graph.forward_order, *beside])


def _kernels(graph: JointGraph, order: list[int], leaving: set[int]) -> _Kernels:
    """Fuse the nodes of one graph."""
    source, fusible, given, arguments = graph.source, graph.fusible, graph.given, graph.arguments
    stored: set[int] = set(leaving)
    readers: dict[int, int] = {}
    inside = set(order)
    for i in order:
        whole = fusible[i] or source[i] != i or graph.joins[i]
        for a in arguments[i]:
            s = source[a]
            readers[s] = readers.get(s, 0) + 1
            if not whole:
                stored.add(s)
    reads: dict[int, frozenset[int]] = {}
    chain: dict[int, int] = {}
    nodes: list[int] = []
    kernel_reads: list[tuple[int, ...]] = []
    writes: list[tuple[int, ...]] = []
    nothing: frozenset[int] = frozenset()
    for i in order:
        if source[i] != i or (graph.whole[i] in inside):
            continue
        found: set[int] = set()
        length = 1
        for a in arguments[i]:
            s = source[a]
            if s not in inside or given[s]:
                found.add(s)
            elif s in reads:
                found |= reads[s]
                length += chain[s]
            else:
                found.add(s)
        many = len(found) > _READS and readers.get(i, 0) > 1
        parts = tuple(p for p in graph.parts.get(i, ()) if p in inside)
        if fusible[i] and i not in stored and not parts and not graph.reduces[i] and not many and length <= _CHAIN:
            reads[i] = frozenset(found) if found else nothing
            chain[i] = length
            continue
        nodes.append(i)
        kernel_reads.append(tuple(found))
        writes.append(parts or (i,))
    seconds, work = kernel_times(graph, nodes, kernel_reads, writes)
    return _Kernels(nodes, kernel_reads, writes, seconds, sum(work))


def _sweep(
    graph: JointGraph,
    kernels: _Kernels,
    start: set[int],
    stay: set[int],
    until: Mapping[int, int] = {},
    since: Mapping[int, int] = {},
) -> tuple[list[int], list[Held]]:
    """Bytes at every kernel, and from which to which every buffer is there.

    Args:
        graph: the joint graph.
        kernels: of the forward or the backward.
        start: what is there before the first.
        stay: what is there after the last.
        until: buffers that go after a kernel, whoever reads them.
        since: buffers that come before one.
    """
    size = graph.bytes
    leaving: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    for places, when in ((leaving, until), (arriving, since)):
        for b, number in when.items():
            places.setdefault(number, []).append(b)
    last: dict[int, int] = {}
    for number, found in enumerate(kernels.reads):
        for s in found:
            last[s] = number
    end = len(kernels.nodes)
    first = dict.fromkeys(start, -1)
    live = sum(size[s] for s in start)
    curve: list[int] = []
    held: list[Held] = []
    written_over: dict[int, int] = {}
    steps = zip(kernels.nodes, kernels.reads, kernels.writes, strict=True)
    for number, (i, found, written) in enumerate(steps):
        for b in arriving.get(number, ()):
            first[b] = number
            live += size[b]
        dying = [s for s in found if last[s] == number and s in first and s not in stay and s not in until]
        over = 0
        taken: set[int] = set()
        for w in written:
            if w in first:
                continue
            first[w] = number
            live += size[w]
            if graph.fusible[i] and not graph.reduces[i]:
                for s in dying:
                    if size[s] == size[w] and first[s] >= 0 and s not in taken:
                        over += size[w]
                        written_over[w] = s
                        taken.add(s)
                        break
        curve.append(live - over)
        for s in dying:
            live -= size[s]
            held.append(Held(s, size[s], first.pop(s), number, written_over.get(s, -1)))
        for w in written:
            if w not in last and w not in stay and w not in until:
                live -= size[w]
                held.append(Held(w, size[w], first.pop(w), number, written_over.get(w, -1)))
        for b in leaving.get(number, ()):
            live -= size[b]
            held.append(Held(b, size[b], first.pop(b), number, written_over.get(b, -1)))
    held += [Held(s, size[s], begin, end, written_over.get(s, -1)) for s, begin in first.items()]
    return curve, held
