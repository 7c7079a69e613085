"""What messages between the ranks of a run take, measured by the ranks themselves.

A link's rate says little of a small message: the call that sends it, the switch to whoever waits for it and the copy
out of the system's memory take longer than its bytes do, and they take it of a processor that could compute. Nor does
the rate say anything of adding gradients up. So ranks exchange messages of several sizes, two and two, as the
neighbours of a grid do: both send and both receive, after some computing, since ranks do not come to an exchange at the
same moment, and what it needs is not in a cache by then. Of the seconds that an exchange takes, those in which a
process computes are the host's, for one message sent and one received; the rest of the smallest exchange is latency;
the line from there that passes best through the medians of the larger ones, which are far from equally long, gives the
rate. (Short messages may go another way than long ones, and the first bytes after a pause faster than a slow link does
move bytes, so a line through all of them, each as good as the other, gave 22 MB/s to a link of 12.) No more ranks do so
at once than there are processors: a wait for a processor is no latency (`Machine.processors` says how many there are).
Where the host of a GPU handles messages while the GPU computes, they follow each other at some distance; a small row
from every rank to every other, as the statistics of a norm are sent, says at which. Then all ranks add up rows as they
do gradients.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from outcore.errors import EngineError
from outcore.machine.host_allocator import keep_freed_memory
from outcore.machine.link import Link
from outcore.run.ranks.world import World
from outcore.run.transport.all_reduce import AllReduce, DirectAllReduce, GlooAllReduce
from outcore.run.transport.choose import point_to_point
from outcore.run.transport.part_messages import PartMessages
from outcore.run.transport.shared_memory import SharedRows
from outcore.spatial.communicator import gather_rows

__all__ = ["measure_link"]

_SIZES = {1 << 10: 60, 1 << 13: 40, 1 << 16: 20, 1 << 18: 16, 1 << 20: 12, 1 << 22: 8}
"""Bytes of the messages, and how often each is exchanged."""
_ROW_BYTES, _WARM, _TURNS = 1 << 23, 2, 4
"""Of the rows that are added up; turns that do not count, and those that do."""


def measure_link(device: torch.device | str = "cpu", *, sizes: Mapping[int, int] | None = None) -> Link:
    """The link between the ranks of this run, for `outcore.Machine.between_devices`; every rank calls it.

    >>> from outcore.run import launch, measure_link
    >>> launch(measure_link, 2)[0].host_s < 1.0  # doctest: +SKIP
    True

    Args:
        device: where tensors are. A GPU's host is busy while it waits for a message, and is not kept from computing
            by it.
        sizes: bytes of messages, and how often each is exchanged.

    Raises:
        EngineError: there is only one rank.
    """
    where = torch.device(device)
    if where.type == "cpu":
        keep_freed_memory()
    world = World.join(timeout_s=120.0)
    try:
        if world.size < 2:
            raise EngineError("a link needs two ranks; start some with outcore.run.launch, torchrun, SLURM or mpirun")
        probe = _Probe(world, where)
        try:
            return probe.link(sizes or _SIZES)
        finally:
            probe.close()
    finally:
        world.close()


class _Probe:
    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.shared_rows = SharedRows(world, device)
        self.p2p = point_to_point(world, device, self.shared_rows)
        self.messages = PartMessages(self.p2p, world.rank, world.size, 0, world.place, _ignored)
        self.number = 0

    def link(self, sizes: Mapping[int, int]) -> Link:
        found = {nbytes: self._exchange(nbytes, times) for nbytes, times in sizes.items()}
        mine = _fitted(found, self.device.type == "cuda")
        rows = [row for row in self.world.share(mine) if row]
        per_byte, latency_s, host_s = (statistics.median(column) for column in zip(*rows, strict=True))
        is_spaced = self.device.type == "cuda" and self.world.size > 2
        gap_s = self._gap_s(min(sizes.values()), latency_s) if is_spaced else 0.0
        latency_s -= gap_s
        size, added_s = self.world.size, statistics.median(self.world.share(self._add_up()))
        moved_s = 2 * (size - 1) * (latency_s + gap_s + 2 * host_s + _ROW_BYTES / size * per_byte)
        return Link.symmetric(
            bandwidth_bytes_per_s=1 / per_byte,
            latency_s=latency_s,
            host_s=host_s,
            gap_s=gap_s,
            adding_s_per_byte=max(0.0, added_s - moved_s) / _ROW_BYTES,
        )

    def _exchange(self, nbytes: int, times: int) -> tuple[float, float] | None:
        """The median of some exchanges, and what each takes of a processor; None for a rank that has none."""
        other = self.world.rank ^ 1
        taking = max(2, min(self.world.size, _processors()) // 2 * 2) if self.device.type == "cpu" else 2
        row, walls, used = torch.zeros(nbytes // 4, device=self.device), list[float](), list[float]()
        self.world.barrier()
        first = self.number
        self.number += times  # on every rank: those that do not exchange now number what comes next alike
        for number in range(first, self.number) if self.world.rank < taking else ():
            if self.device.type == "cpu":
                F.conv2d(torch.zeros(2, 3, 64, 64, device=self.device), torch.zeros(64, 3, 7, 7, device=self.device))
            began, computed = time.perf_counter(), time.process_time()
            coming = self.messages.receive((len(row),), row.dtype, self.device, other, number)
            self.messages.send(row, other, number)
            coming.wait()
            walls.append(time.perf_counter() - began)
            used.append(time.process_time() - computed)
        self.messages.finish()
        self.p2p.end_step()
        return (statistics.median(walls), statistics.median(used)) if walls else None

    def _gap_s(self, times: int, alone_s: float) -> float:
        """Seconds from one message to the next among three ranks or more, where one takes so long alone."""
        row, walls = torch.zeros(64, device=self.device), list[float]()
        for _ in range(times):
            self.number += 1
            self.world.barrier()
            began = time.perf_counter()
            gather_rows(self.messages, row, self.number)
            walls.append(time.perf_counter() - began)
            self.messages.finish()
            self.p2p.end_step()
        together_s = float(statistics.median(self.world.share(statistics.median(walls))))
        return min(alone_s, max(0.0, together_s - alone_s) / (self.world.size - 2))

    def _add_up(self) -> float:
        """Seconds to add a row up over all ranks: filled, added and handed back; of two at a time, as of gradients that
        are more than a row holds."""
        gradient, began = torch.ones(_ROW_BYTES // 4, device=self.device), 0.0
        for turn in range(_WARM + _TURNS):
            if turn == _WARM:
                self.world.barrier()
                began = time.perf_counter()
            under_way = [self._start(torch.empty_like(gradient).copy_(gradient)) for _ in range(2)]
            for total in under_way:
                total.add()
            for total in under_way:
                total.wait()
        return (time.perf_counter() - began) / (2 * _TURNS)

    def _start(self, row: torch.Tensor) -> AllReduce:
        everyone = range(self.world.size)
        if self.shared_rows.connect(everyone, _ROW_BYTES):
            return DirectAllReduce(row, self.world.rank, everyone, 1 << 20, self.shared_rows)
        return GlooAllReduce(row, self.world.group, self.world.watched_wait)

    def close(self) -> None:
        self.world.barrier()
        self.p2p.close()


def _processors() -> int:
    """How many this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def _ignored(*_: Any) -> None:
    """Takes an event of the timeline, which a probe has no use for."""


def _fitted(found: Mapping[int, tuple[float, float] | None], is_gpu: bool) -> tuple[float, float, float] | None:
    """Seconds per byte, latency and seconds of a host, from exchanges by their bytes."""
    times = {nbytes: pair for nbytes, pair in found.items() if pair is not None}
    if not times:
        return None
    small = min(times)
    small_s, used_s = times[small]
    rest = [(nbytes - small, wall - small_s, wall) for nbytes, (wall, _) in times.items()]
    per_byte = sum(x * y / wall for x, y, wall in rest) / max(1, sum(x * x / wall for x, _, wall in rest))
    per_byte = max(1e-12, per_byte)
    host_s = 0.0 if is_gpu else min(used_s, small_s) / 2
    return per_byte, max(0.0, small_s - per_byte * small - 2 * host_s), host_s
