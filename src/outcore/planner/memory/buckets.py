"""Offloadable parameters: the parameters that can leave the device, packed into buckets, and the rules by which buckets
come and leave.

Tensors that are used one after the other travel together, as a *bucket*. Where not all buckets can be here at once, the
next one is started beside the one in use, and what will not be needed for longest makes room. All of that follows from
sizes and from the order of use alone, so it is decided here, by the same few functions for the step that runs
(`outcore.memory.param_offload.residency`) and for the one that is predicted (`outcore.planner.memory.state_residency`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outcore.graph import Graph

if TYPE_CHECKING:
    from outcore.planner.memory.state_policy import StatePolicy

ALIGN = 512
"""As allocators align: kernels choose by alignment, and must choose what they choose in plain training."""
_FIRST_BYTES = 12 * 2**20
"""What leaves last and must be back first: small, because the device waits for it, but every bucket takes the host the
better part of a millisecond."""


@dataclass(frozen=True, slots=True)
class OffloadableParam:
    """A parameter that can be offloaded between its uses."""

    name: str
    bytes: int
    trained: bool = True


@dataclass(frozen=True)
class OffloadableParams:
    """Parameters that can leave, in the order in which a step first uses them."""

    items: tuple[OffloadableParam, ...]
    calls: Mapping[str, tuple[str, ...]]
    """Call -> what it reads of them."""
    other_names: Mapping[str, str]
    """Of a parameter that has several: each -> the one it has here."""

    @classmethod
    def of(cls, graph: Graph, parameters: Mapping[str, int]) -> OffloadableParams:
        """All trained parameters that a graph reads."""
        calls = {name: tuple(p for p in call.parameters if p in parameters) for name, call in graph.calls.items()}
        names = dict.fromkeys(p for read in calls.values() for p in read)
        return cls(tuple(OffloadableParam(name, parameters[name]) for name in names), calls, {})

    def name(self, given: str) -> str:
        """The name that a parameter has here."""
        return self.other_names.get(given, given)

    def buckets(self, policy: StatePolicy) -> list[list[OffloadableParam]]:
        """What travels together, those that are trained and those that are not apart, in the order of use."""
        most, first = limits(policy, sum(item.bytes for item in self.items))
        place = {item.name: i for i, item in enumerate(self.items)}
        found = []
        for trained in (True, False):
            items = [item for item in self.items if item.trained is trained]
            found += [[items[i] for i in bucket] for bucket in packed([item.bytes for item in items], most, first)]
        return sorted(found, key=lambda bucket: min(place[item.name] for item in bucket))


def rounded(size: int) -> int:
    """Bytes that a tensor takes in a bucket."""
    return -(-size // ALIGN) * ALIGN


def limits(policy: StatePolicy, total_bytes: int) -> tuple[int, int | None]:
    """How large buckets are at most, and the first of them where they grow: as few as overlap allows, if there is room
    for all of them."""
    if policy.parameters == "offload" and policy.stage_bytes is None:
        return max(policy.flat_buffer_bytes, total_bytes), _FIRST_BYTES
    return policy.flat_buffer_bytes, None


def packed(sizes: Iterable[int], most_bytes: int, first_bytes: int | None = None) -> list[list[int]]:
    """Positions of tensors that go together, in this order, up to about so many bytes; a larger one is alone.

    With a size of the first, buckets grow from that by a factor of eight: what is needed first leaves last, and must be
    back soonest; the others are few, because each takes the host the better part of a millisecond.
    """
    buckets: list[list[int]] = []
    bucket: list[int] = []
    taken = 0
    for i, size in enumerate(sizes):
        needed = rounded(size)
        most = most_bytes if first_bytes is None else min(most_bytes, first_bytes << 3 * len(buckets))
        if _is_full(taken, needed, most):
            buckets.append(bucket)
            bucket, taken = [], 0
        bucket.append(i)
        taken += needed
    return [*buckets, bucket] if bucket else buckets


def _is_full(size: int, needed: int, most_bytes: int) -> bool:
    """Whether a bucket of a size cannot take so many bytes more; small tensors (biases) go along with a bucket that is
    full, rather than travel alone."""
    if not size or size + needed <= most_bytes or needed <= most_bytes // 64:
        return False
    return needed > most_bytes // 8 or size + needed > 9 * most_bytes // 8


def most_of(sizes: Sequence[int]) -> int | None:
    """Which of a bucket's tensors, of these sizes, is more than half of it; its gradient leaves without being
    gathered.

    >>> most_of([10, 500, 20]), most_of([10, 10])
    (1, None)
    """
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    return largest if 2 * sizes[largest] > sum(sizes) else None


def that_leave(
    here: Sequence[int], sizes: Sequence[int], needed: int, kept: Collection[int], stage_bytes: int, *, backward: bool
) -> list[int]:
    """The buckets that leave so that there is room for so many bytes more: what will not be needed for longest.

    Args:
        here: numbers of the buckets that are here, rising.
        sizes: of all buckets.
        needed: bytes.
        kept: buckets that must stay.
        stage_bytes: room for all.
        backward: whether buckets are needed in falling order.
    """
    taken, found = sum(sizes[i] for i in here), []
    for i in reversed(here) if backward else here:
        if taken + needed <= stage_bytes:
            break
        if i not in kept:
            taken -= sizes[i]
            found.append(i)
    return found


def that_follows(in_use: Sequence[int], sizes: Sequence[int], stage_bytes: int, *, backward: bool) -> int | None:
    """The bucket that is needed next, if there is room for it beside those in use."""
    following = min(in_use) - 1 if backward else max(in_use) + 1
    if not 0 <= following < len(sizes):
        return None
    return following if sizes[following] + sum(sizes[i] for i in in_use) <= stage_bytes else None
