"""How long the kernels of one graph take, with those that Inductor runs as one.

A fused kernel takes its traffic. Inductor puts further operations of the same size into it: those that read what it
reads anyway, as the two sums of a batch norm's backward do, and those that read what it writes, which then is still in
registers. So what a group of kernels reads together is read once, and what one of them writes is not read again by the
next. A sum over leading dimensions is complete only when the whole kernel is over: who needs it comes later. A sum over
the last dimensions, as in layer norms and softmax, is complete within its row, and readers of the same size may follow
in the same kernel.

The operations of libraries take what is known of them, or their traffic if that takes longer.

Beside the device's time there is the host's work (`outcore.compiled.times.host_times`): one launch for all operations
of a kernel, a call for each of a library, and memory for everything that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outcore.compiled.joint_graph import JointGraph
from outcore.compiled.times.host_times import BUFFER, LAUNCH

__all__ = ["kernel_times"]

_LARGEST = 64
"""Operations in one kernel (Inductor's `max_fusion_size`)."""


@dataclass(slots=True)
class _Group:
    """Operations that are one kernel."""

    first: int
    elements: int
    count: int = 1
    touched: set[int] = field(default_factory=set)
    """Buffers that it reads and writes."""
    complete: set[int] = field(default_factory=set)
    """Buffers that it writes and that may be read in it."""


def kernel_times(
    graph: JointGraph, nodes: Sequence[int], reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """The seconds of every kernel of a graph, and the host's work for it; of one that is part of another, what it adds
    to that.

    Args:
        graph: the joint graph.
        nodes: the last node of every kernel, in the order of computing.
        reads: the buffers that each reads.
        writes: the buffers that each writes.
    """
    size, rates, fusible, elements = graph.bytes, graph.rates, graph.fusible, graph.elements
    made: dict[int, int] = {}
    latest: dict[int, _Group] = {}
    seconds: list[float] = []
    work: list[float] = []
    for number, (i, found, written) in enumerate(zip(nodes, reads, writes, strict=True)):
        for w in written:
            made[w] = number
        if not fusible[i]:
            traffic = sum(size[s] for s in found) + sum(size[s] for s in written)
            seconds.append(max(graph.seconds[i], traffic / rates.bytes_per_s) + rates.launch_s)
            work.append(graph.work[i])
            continue
        group, shared = None, 0
        for s in found:
            there = latest.get(s)
            if there is None or there is group or there.elements != elements[i] or there.count >= _LARGEST:
                continue
            if all(made.get(b, -1) < there.first or b in there.complete for b in found):
                here = sum(size[b] for b in found if b in there.touched)
                if here > shared:
                    group, shared = there, here
        more = sum(size[s] for s in found) - shared + sum(size[s] for s in written)
        memory = BUFFER * len(written)
        if group is None:
            group = _Group(number, elements[i])
            seconds.append(more / rates.bytes_per_s + rates.launch_s)
            work.append(LAUNCH + memory)
        else:
            group.count += 1
            seconds.append(more / rates.bytes_per_s)
            work.append(memory)
        group.touched.update(found, written)
        if not graph.reduces[i] or graph.by_rows[i]:
            group.complete.update(written)
        for s in (*found, *written):
            latest[s] = group
    return seconds, work
