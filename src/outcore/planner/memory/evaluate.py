"""What a training step takes when some buffers are not kept: its time, and its memory at every moment.

Each buffer has a policy. What is not kept leaves after its last use in forward and comes back in backward when it is
first needed; it stays until it was needed for the last time, so nothing is fetched or computed twice:

    moment     F0 F1 F2 F3 … B3 B2 B1 B0 optimizer
    keep          ###############
    recompute     ##        ######            from its sources, which must be there at B3 and stay no longer
    offload       ####    ########            leaves when the copy out is done, room is taken when the copy in begins
    encode        ##------#######             a smaller form in between

A buffer that is made again needs its sources when it is first needed itself, so they come back earlier too, and theirs:
recomputing a long chain brings all of it back at once. That is why the *whole* assignment is evaluated, not each
choice by itself. Buffers that backward does not need at all (the output of batch norm before ReLU) are made again on
the way, or held if that is cheaper.

The memory is `outcore.cost.memory_curve` of the plain step, with what each policy adds to it and takes away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from outcore.cost.buffers import Buffer, buffers_of
from outcore.cost.costs import CallCost, Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.step_memory import MemoryCurve, memory_curve
from outcore.cost.predicted.step_time import backward_with_sums
from outcore.graph import Graph
from outcore.ops.recompute_encode import codec_for, held_bytes
from outcore.ops.registry import spatial_dims
from outcore.planner.memory.copy_schedule import CopySchedule, OffloadTarget, schedule_transfers
from outcore.program.policies import (
    KEEP,
    OFFLOAD,
    OFFLOAD_EARLY,
    RECOMPUTE,
    Encode,
    Keep,
    Offload,
    Policies,
    Policy,
    Recompute,
)

Curve = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepUnderPolicies:
    """A step under one assignment of policies."""

    time_s: float
    peak_bytes: int
    curve: Curve
    """Bytes at every moment of the plain step's memory curve."""
    extra_s: float
    """Above the plain step."""
    recomputed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Buffer -> positions of the calls before whose backward it comes back and after whose backward it goes."""
    transfers: CopySchedule | None = None


class StepModel:
    """A network's step, ready to be evaluated under any assignment of policies."""

    draws: bool = True
    """Whether what draws random numbers may be made again; a CUDA graph cannot go back to an earlier state."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        optimizer: OptimizerCost | float,
        tier: OffloadTarget | None,
        memory_bytes_per_s: float = 10e9,
        *,
        draws: bool = True,
    ) -> None:
        self.graph = replace(graph, executable=None)  # facts alone: a plan must not keep a model alive
        self.costs, self.tier, self.memory_bytes_per_s, self.draws = costs, tier, memory_bytes_per_s, draws
        self.plain: MemoryCurve = memory_curve(graph, costs, optimizer=optimizer)
        self.base: Curve = np.array([m.bytes.total for m in self.plain.moments], dtype=np.int64)
        self.buffers: dict[str, Buffer] = buffers_of(graph, costs)
        self.order = list(graph.calls)
        rows = [costs.calls[name] for name in self.order]
        self.forward_s = [c.forward.median_s if c.forward else 0.0 for c in rows]
        backward = backward_with_sums(graph, costs)
        self.backward_s = [backward[name].median_s if name in backward else 0.0 for name in self.order]
        self.plain_s = sum(self.forward_s) + sum(self.backward_s)
        place = {name: i for i, name in enumerate(self.order)}
        self.forward_at = [0] * len(rows)
        self.backward_at = [0] * len(rows)
        """Moment of every call's forward and backward, where it has one (`differentiated`)."""
        seen: set[int] = set()
        for at, moment in enumerate(self.plain.moments):
            if moment.phase == "forward":
                self.forward_at[place[moment.call]] = at
            elif moment.phase == "backward" and place[moment.call] not in seen:
                self.backward_at[place[moment.call]] = at
                seen.add(place[moment.call])
        self.turn = max(self.forward_at, default=0) + 1
        """The first moment of backward."""
        self.made = np.zeros_like(self.base)
        for i in seen:
            made = sum(g.bytes for g in rows[i].gradients) + rows[i].workspace_backward_bytes
            self.made[self.backward_at[i]] = made
        self.cached = frozenset(_cached_casts(rows, costs.parameters))
        self.rows = [
            (b, self.turn if b.name in self.cached else self.forward_at[max(b.last, b.held)] + 1)
            for b in self.buffers.values()
            if b.kind != "given" and b.bytes
        ]
        """Buffers that matter, with the first moment in forward after which nothing but a policy holds them."""
        self.emptied = self._emptied()
        values = [b for b in self.buffers.values() if b.kind == "value" or b.copy_of]
        self.newest_first = sorted(values, key=lambda b: -b.done)  # before whatever it is made from

    @cached_property
    def differentiated(self) -> list[int]:
        """Positions of the calls that backward goes through."""
        found = {m.call for m in self.plain.moments if m.phase == "backward"}
        return [i for i, name in enumerate(self.order) if name in found]

    def _emptied(self) -> list[int]:
        """What changes, moment by moment, if nothing is kept; only memory of the right shape where that is enough."""
        moment = [0] * (len(self.base) + 1)
        for buffer, gone in self.rows:
            if kept_by := [*buffer.savers, *buffer.shapes]:
                _add(moment, gone, self.backward_at[min(kept_by)], -buffer.bytes)
            for i in buffer.shapes:
                _add(moment, self.backward_at[i], self.backward_at[i], buffer.bytes)
        return moment

    @cached_property
    def own_pools(self) -> dict[int, str]:
        """Pools whose backward needs one byte per output and nothing else, if their indices are encoded (kernels)."""
        if self.costs.device_kind != "cuda":
            return {}
        return {
            b.born: b.name for b in self.buffers.values() if codec_for(b) == "window" and spatial_dims(b.maker) == 2
        }

    @cached_property
    def forward_ends(self) -> list[float]:
        """When each call's forward ends, if the computing never waits."""
        return list(accumulate(self.forward_s))

    @property
    def floor(self) -> tuple[int, int]:
        """Bytes that no assignment can go below, and the moment they are needed at.

        There, one operation has only what it reads, makes and works in, beside the gradients and values that wait for
        others in any case; whatever has no policy but to be kept is kept.
        """
        moment = self.emptied[:]
        for buffer, gone in self.rows:
            if buffer.savers and not self.choices(buffer):
                _add(moment, gone, self.backward_at[min(buffer.savers)], buffer.bytes)
                continue
            least = self.held(buffer, Encode(codec))[1] if (codec := codec_for(buffer)) else buffer.bytes
            for i in buffer.savers:
                _add(moment, self.backward_at[i], self.backward_at[i], least)
            for i in buffer.shapes & self.own_pools.keys():
                _add(moment, self.backward_at[i], self.backward_at[i], -buffer.bytes)
        curve = self.base + np.cumsum(moment[:-1])
        return int(curve.max()), int(curve.argmax())

    def choices(self, buffer: Buffer) -> list[Policy]:
        """The policies a buffer can have beside keep, all of them exact."""
        found: list[Policy] = []
        if (buffer.kind == "value" or buffer.copy_of) and not buffer.obstacle and (self.draws or not buffer.drawn):
            found.append(RECOMPUTE)
        if (codec := codec_for(buffer)) is not None:
            found.append(Encode(codec))
        if self.tier is not None and buffer.savers and buffer.bytes >= self.tier.least_bytes and buffer.need == "full":
            found += [OFFLOAD, OFFLOAD_EARLY]
        return found if buffer.kind != "given" and not buffer.opaque else []

    def evaluate(self, policy: Policies) -> StepUnderPolicies:
        """The step under an assignment; buffers that are not in it are kept.

        The search does little else, so what is kept as the plain step keeps it is counted once (`_kept`), and only what
        differs from that is looked at.
        """
        first, last, changed = self._needs(policy)
        if self._torn(policy, first):
            return self._impossible()
        kept, always, rows = self._kept
        moment = kept[:]
        entry: dict[int, int] = {}
        room: dict[int, int] = {}
        extra_s, recomputed, moved = 0.0, {}, []
        backward_at, saved_last = self.backward_at, self._saved_at[1]
        silent = {i for i, name in self.own_pools.items() if policy.get(name, KEEP).codec == "window"}
        for row in rows:
            name = row[0]
            how = policy.get(name, KEEP)
            if isinstance(how, Keep) and name not in changed and name not in always:
                continue
            _, buffer, gone, size = row
            shapes = buffer.shapes
            if shapes:
                for i in shapes & silent:
                    _add(moment, backward_at[i], backward_at[i], -size)
            if name not in first:
                continue
            if not shapes and name in saved_last:
                _add(moment, gone, backward_at[saved_last[name]], -size)  # as it was counted before
            begins, ends = backward_at[first[name]], backward_at[last[name]]
            if isinstance(how, Keep):
                begins = gone
                _add(moment, gone, ends, size)
            elif isinstance(how, Recompute):
                extra_s += buffer.again_s
                recomputed[name] = (first[name], last[name])
                if buffer.savers or ends > begins:
                    if ends >= begins:
                        moment[begins] += size
                        moment[ends + 1] -= size
                else:  # only on the way to another, with what it is itself made from on the way
                    way = sum(self.buffers[v].bytes for v in buffer.sources if self._on_the_way(v, policy))
                    if size + way > entry.get(begins, 0):
                        entry[begins] = size + way
                if buffer.workspace_bytes > room.get(begins, 0):
                    room[begins] = buffer.workspace_bytes
            elif isinstance(how, Offload):
                moved.append((buffer, first[name]))
                _add(moment, gone, ends, size)
            else:
                small, whole = self.held(buffer, how)
                encoded = buffer.done if how.codec == "sign" else buffer.last  # signs are noted by ReLU itself
                _add(moment, self.forward_at[encoded], begins - 1, small)
                _add(moment, begins, ends, whole)
                room[begins] = max(room.get(begins, 0), small)  # both forms, while it is decoded
                extra_s += self.coding_s(buffer, how)
                if how.offloads:
                    moved.append((replace(buffer, bytes=small), first[name]))
            if shapes:
                for i in shapes - silent:
                    if begins <= backward_at[i] <= ends:  # it is there anyway
                        _add(moment, backward_at[i], backward_at[i], -size)
        transfers = self._transfers(moved, policy, recomputed, moment) if moved else None
        if transfers is not None:
            if transfers.stall_s == float("inf"):  # more than there is room for below the device
                return self._impossible()
            extra_s += transfers.stall_s
        curve = self.base + np.array(moment, dtype=np.int64).cumsum()[:-1]
        if entry or room:
            at = list(entry.keys() | room.keys())
            over = np.array([entry.get(i, 0) + room.get(i, 0) for i in at], dtype=np.int64)
            curve[at] = np.maximum(curve[at], curve[at] - self.made[at] + over)
        peak = int(curve.max())
        return StepUnderPolicies(self.plain_s + extra_s, peak, curve, extra_s, recomputed, transfers)

    def _impossible(self) -> StepUnderPolicies:
        """What a step takes under policies that cannot be carried out."""
        return StepUnderPolicies(float("inf"), 2**62, self.base, float("inf"))

    def _transfers(
        self,
        moved: list[tuple[Buffer, int]],
        policy: Policies,
        recomputed: Mapping[str, tuple[int, int]],
        moment: list[int],
    ) -> CopySchedule:
        """Schedule the copies of the buffers that are offloaded, and take these out of `moment` while they are away."""
        assert self.tier is not None
        early = {b.name for b, _ in moved if policy[b.name] == OFFLOAD_EARLY}
        transfers = schedule_transfers(self, moved, recomputed, self.tier, early)
        sizes = {b.name: b.bytes for b, _ in moved}
        for transfer in transfers.moved:
            gone = max(transfer.gone_at, self.turn) if transfer.buffer in self.cached else transfer.gone_at
            _add(moment, gone, transfer.back_at - 1, -sizes[transfer.buffer])
        return transfers

    @cached_property
    def _kept(self) -> tuple[list[int], frozenset[str], list[tuple[str, Buffer, int, int]]]:
        """What changes, moment by moment, if all that backward needs is kept; what is not in that, because it can be
        there for its shape alone; and all buffers that matter, with the first moment after their last use and bytes."""
        moment, last = self.emptied[:], self._saved_at[1]
        for buffer, gone in self.rows:
            if buffer.name in last and not buffer.shapes:
                _add(moment, gone, self.backward_at[last[buffer.name]], buffer.bytes)
        always = frozenset(buffer.name for buffer, _ in self.rows if buffer.shapes)
        return moment, always, [(buffer.name, buffer, gone, buffer.bytes) for buffer, gone in self.rows]

    def resolved(self, policy: Policies) -> dict[str, Policy]:
        """The assignment without what has no effect: only buffers that are needed, and only what is not kept."""
        first, _, _ = self._needs(policy)
        found = {}
        for name in first:
            how, buffer = policy.get(name, KEEP), self.buffers[name]
            if buffer.kind != "given" and (not isinstance(how, Keep) or not buffer.savers):
                found[name] = how
        return {name: found[name] for name in self.buffers if name in found}

    @cached_property
    def _saved_at(self) -> tuple[dict[str, int], dict[str, int]]:
        """Where each buffer is needed first and last if nothing is made again."""
        saved = {name: buffer.savers for name, buffer in self.buffers.items() if buffer.savers}
        return {name: max(at) for name, at in saved.items()}, {name: min(at) for name, at in saved.items()}

    def needs(self, policy: Policies) -> tuple[dict[str, int], dict[str, int]]:
        """Positions of the calls before whose backward each buffer must be there, and after whose backward it goes."""
        first, last, _ = self._needs(policy)
        return first, last

    def _needs(self, policy: Policies) -> tuple[dict[str, int], dict[str, int], set[str]]:
        """Where each buffer is needed first and last in backward (positions of calls: backward counts down), and which
        are needed otherwise than if nothing is made again."""
        at_first, at_last = self._saved_at
        first, last, changed = at_first.copy(), at_last.copy(), set[str]()
        for name, sources in self._newest_sources:
            if not isinstance(policy.get(name), Recompute) or (start := first.get(name)) is None:
                continue
            for source in sources:
                if first.get(source, -1) < start:
                    first[source] = start
                    changed.add(source)
                if last.get(source, start) >= start:
                    last[source] = start
                    changed.add(source)
        return first, last, changed

    @cached_property
    def _newest_sources(self) -> list[tuple[str, tuple[str, ...]]]:
        """What can be made again, and from what, the newest first."""
        return [(buffer.name, buffer.sources) for buffer in self.newest_first]

    def _on_the_way(self, name: str, policy: Policies) -> bool:
        """Whether a buffer is made again only to make others from it."""
        buffer = self.buffers[name]
        return not buffer.savers and buffer.kind == "value" and isinstance(policy.get(name), Recompute)

    def _torn(self, policy: Policies, first: Mapping[str, int]) -> bool:
        """Whether something is to be made from a buffer of which only signs are kept."""
        if not self._any_signs:
            return False
        made = [self.buffers[n] for n, how in policy.items() if isinstance(how, Recompute) and n in first]
        return any(policy.get(source, KEEP).codec == "sign" for buffer in made for source in buffer.sources)

    @cached_property
    def _any_signs(self) -> bool:
        """Whether any buffer could be kept as signs alone."""
        return any(codec_for(buffer) == "sign" for buffer in self.buffers.values())

    def held(self, buffer: Buffer, how: Policy) -> tuple[int, int]:
        """Bytes of a buffer in between, and when backward needs it."""
        small, whole = held_bytes(buffer, how.codec)
        return small, small if how.codec == "window" and buffer.born in self.own_pools else whole

    def coding_s(self, buffer: Buffer, how: Policy) -> float:
        """Time to encode and decode: each passes over the memory once, where that is not part of an operation."""
        inside = self.costs.device_kind == "cuda" and (how.codec == "sign" or self.held(buffer, how)[1] < buffer.bytes)
        return 0.0 if inside else 2.5 * buffer.bytes / self.memory_bytes_per_s


def _cached_casts(rows: Iterable[CallCost], parameters: Mapping[str, int]) -> Iterator[str]:
    """Copies of weights that autocast keeps until forward is over, whatever becomes of them."""
    for saved in (saved for row in rows for saved in row.saved if saved.kind == "derived"):
        if saved.cast_of in parameters:
            yield saved.of


def _add(moment: list[int], begins: int, ends: int, size: int) -> None:
    """Add bytes at all moments from one to another."""
    if ends >= begins:
        moment[begins] += size
        moment[ends + 1] -= size
