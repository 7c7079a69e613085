"""What the ranks of a grid do in a forward and a backward, in order, with what each action takes.

It is made from the layout that the ranks run, node by node: computing takes the cost of the call on the whole image
times the share that a rank computes of it, halo included, and at least what its host takes to launch it; borders and
sums are sent where `outcore.spatial.execute` sends them, and waited for where it waits. Backward goes the other way:
what was waited for is sent back, what was sent is waited for. A message also takes the hosts at its ends some time of
their own, a copy and a call each: what was measured of the link (`Link.host_s`), and `POSTING_S` at least. What a part
takes beyond its share is added where it was measured (`outcore.spatial.part_costs`).
"""

from __future__ import annotations

import math
from collections.abc import Collection

from outcore.ops.region import elements
from outcore.planner.pipeline.call_weights import CallWeight, CallWeights
from outcore.program import Backward, Event, Forward
from outcore.program.simulator.links import Links, LinkSchedule
from outcore.program.simulator.part_time import (
    PartCompute,
    PartScript,
    PartSend,
    PartWait,
    perform_parts,
)
from outcore.spatial.layout import Exchange, SplitLayout
from outcore.spatial.part_costs import PartCosts
from outcore.stream.network import RegionNode
from outcore.stream.rules.normalise import Apply

__all__ = ["part_scripts", "step_s"]

POSTING_S = 20e-6
"""What a message takes of the host that sends it, and of the one that receives it, where the link does not say more."""

_Action = PartCompute | PartSend | PartWait


def part_scripts(
    layout: SplitLayout,
    weights: CallWeights,
    calls: Collection[str],
    fraction: float = 1.0,
    parts: PartCosts | None = None,
) -> tuple[PartScript, PartScript]:
    """The forward and the backward of a stage of these calls on a grid, for a part of the recorded batch; with what
    parts take beyond their share, where it was measured."""
    return _Scripts(layout, weights, fraction, parts or PartCosts()).of(calls)


def step_s(scripts: tuple[PartScript, PartScript], links: Links, count: int) -> tuple[float, list[Event]]:
    """Seconds of a forward and a backward on their own, and their events."""
    traffic, events = LinkSchedule(links), list[Event]()
    ranks, starts = range(count), [0.0] * count
    ends = perform_parts(scripts[0], Forward(0, 0), ranks, starts, traffic, events)
    ends = perform_parts(scripts[1], Backward(0, 0), ranks, ends, traffic, events)
    return max(ends), events


class _Scripts:
    def __init__(self, layout: SplitLayout, weights: CallWeights, fraction: float, parts: PartCosts) -> None:
        self.layout, self.weights, self.network = layout, weights, layout.network
        self.fraction, self.parts = fraction, parts
        self.count = len(layout.grid)

    def of(self, calls: Collection[str]) -> tuple[PartScript, PartScript]:
        forward: list[_Action] = []
        backward: list[_Action] = []  # in reverse
        for node in self.layout.extent.nodes:
            for value in self.layout.completed.get(node.output, ()):
                forward += [PartWait(value), *self._put_together(0)]
                backward += [*self._back(self.layout.exchanges[value]), *self._put_together(1)]
            made, back = self._node(node)
            exchange = self.layout.exchanges.get(node.output)
            if exchange is not None and node.output in self.layout.borders:
                ahead, ahead_back = self._borders(node)
                forward += [ahead, *self._sent(exchange.value, self._messages(exchange)), *made]
                backward += [ahead_back, PartWait(f"{exchange.value} back"), *reversed(back)]
                continue
            forward += made
            backward += reversed(back)
            if exchange is not None:
                forward += self._sent(exchange.value, self._messages(exchange))
                backward.append(PartWait(f"{exchange.value} back"))
        for gather in self.layout.gathers.values():
            forward += [*self._sent(f"{gather.value} whole", self._messages(gather)), PartWait(f"{gather.value} whole")]
            backward += [PartWait(f"{gather.value} back"), *self._back(gather)]
        split = self.layout.extent.calls
        rest = [self.weights.calls[c] for c in self.network.graph.calls if c in calls and c not in split]
        if rest:
            # All ranks run it, for buffers and random numbers; the first alone with gradients.
            ways = [[seconds_of_shares(r, [self.fraction], 1, backward=way)[0] for r in rest] for way in (False, True)]
            forward.append(PartCompute((sum(ways[0]),) * self.count))
            backward.append(PartCompute((sum(ways[1]), *(0.0,) * (self.count - 1))))
        return tuple(forward), tuple(reversed(backward))

    def _node(self, node: RegionNode) -> tuple[list[_Action], list[_Action]]:
        """What a node does forward, and backward in the order of doing."""
        if node.norm is not None:  # its cost is in the norm's call, its sum in backward comes there
            ways = self._beyond(node)
            taken, back = ([PartCompute((s,) * self.count)] if s > 0 else [] for s in ways)
            return [*taken, *self._sum(node, node.output)], [*back]
        cost, outputs = self.weights.calls[node.call], max(1, len(self.network.graph.calls[node.call].outputs))
        shares = [self.fraction * share for share in self.layout.shares(node)]
        beyond = self._beyond(node)
        forward: list[_Action] = [PartCompute(seconds_of_shares(cost, shares, outputs, beyond[0], backward=False))]
        backward: list[_Action] = [PartCompute(seconds_of_shares(cost, shares, outputs, beyond[1], backward=True))]
        if isinstance(node.rule, Apply) and self._graded(node.output):
            backward += self._sum(node, f"{node.output} back")
        elif node.kind == "reduction":
            forward += self._sum(node, node.output)
            backward = [*self._sum(node, f"{node.output} back"), *backward] if self._graded(node.output) else backward
        return forward, backward

    def _beyond(self, node: RegionNode) -> list[float]:
        """What a node takes beyond its share, forward and backward."""
        overlaps = self.layout.overlaps(node)
        return [self.parts.of(node.output, backward=way, overlaps=overlaps) for way in (False, True)]

    def _borders(self, node: RegionNode) -> tuple[PartCompute, PartCompute]:
        """What the strips of an early value take, forward and backward."""
        cost, whole = self.weights.calls[node.call], max(1, math.prod(node.shape))
        shares = [
            [self.fraction * elements(strip) / whole for strip in strips] for strips in self.layout.borders[node.output]
        ]
        ways = []
        for backward in (False, True):
            beyond = self.parts.exchange_s[backward]
            each = [seconds_of_shares(cost, strips, 1, beyond, backward=backward) for strips in shares]
            ways.append(PartCompute(tuple(sum(seconds) for seconds in each)))
        return ways[0], ways[1]

    def _put_together(self, way: int) -> list[_Action]:
        """What an exchange takes of every rank beside its messages."""
        seconds = self.parts.exchange_s[way]
        return [PartCompute((seconds,) * self.count)] if seconds else []

    def _sum(self, node: RegionNode, name: str) -> list[_Action]:
        """A row from every rank to every other."""
        ranks = range(self.count)
        if isinstance(node.rule, Apply):
            node = self.network.nodes[node.operands[1].name]
        nbytes = math.prod(node.shape) * node.dtype.itemsize
        rows = tuple((a, b, nbytes) for a in ranks for b in ranks if a != b)
        return [*self._sent(name, rows), PartWait(name)] if rows else []

    def _sent(self, name: str, messages: tuple[tuple[int, int, int], ...]) -> list[_Action]:
        """Messages, with what they take of the hosts at their ends at least."""
        return [PartSend(name, messages, POSTING_S)]

    def _messages(self, exchange: Exchange) -> tuple[tuple[int, int, int], ...]:
        size, ranks = self.network.dtypes[exchange.value].itemsize, range(self.count)
        pieces = ((a, b, exchange.piece(a, b)) for a in ranks for b in ranks if a != b)
        return tuple((a, b, round(self.fraction * elements(p) * size)) for a, b, p in pieces if p is not None)

    def _back(self, exchange: Exchange) -> list[_Action]:
        """The gradients of what was received, to where it came from."""
        if not self._graded(exchange.value):
            return []
        sent = tuple((b, a, n) for a, b, n in self._messages(exchange) if b in exchange.graded)
        return list(reversed(self._sent(f"{exchange.value} back", sent)))  # in the reverse order of doing

    def _graded(self, value: str) -> bool:
        values = self.network.graph.values
        return values[value].requires_grad if value in values else True


def seconds_of_shares(
    cost: CallWeight, shares: list[float], outputs: int, beyond_s: float = 0.0, *, backward: bool
) -> tuple[float, ...]:
    """What shares of a call take on every rank; beyond its share what was measured of a part, else what is known to be
    the same for a part of the batch."""
    whole_s, host_s, fixed_s = (
        (cost.backward_s, cost.host_backward_s, cost.fixed_backward_s)
        if backward
        else (cost.forward_s, cost.host_forward_s, cost.fixed_forward_s)
    )

    def seconds(share: float) -> float:
        more_s = beyond_s or (1 - share) * fixed_s / outputs
        return max(share * whole_s / outputs + more_s, host_s / outputs)

    return tuple(seconds(share) if share else 0.0 for share in shares)
