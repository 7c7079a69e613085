"""Units in a row, and what every run of neighbours in it would take as a stage.

If units stand in a linear order that respects the data flow, any cut of the row is a valid partition, and what a
stage takes depends only on where it begins and ends. So tables over all pairs (begin, end) hold everything a dynamic
program needs. Sums over distinct memory look expensive (a run of units holds a value once, however many of them keep
it) but each value contributes constants on a few rectangles of the table; those are written as corner differences and
summed once, so all tables together cost one pass over the graph and a few over n squared numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outcore.planner.partition.stage_memory import INPUT, Parameter
from outcore.planner.partition.weighted_units import WeightedUnits
from outcore.planner.pipeline.schedule_model import Pipeline, RankLink

Table = NDArray[np.float64]
"""Entry [i, j]: a figure of the stage made of positions i to j - 1; infinite where j is not after i."""


class IntervalTables:
    """The tables of one linear order, optionally cut at some places only."""

    def __init__(self, pieces: WeightedUnits, order: Sequence[int], places: Sequence[int] | None = None) -> None:
        self.pieces, self.order = pieces, tuple(order)
        n = len(pieces)
        self.places = np.arange(n + 1) if places is None else np.array(sorted({0, n, *places}))
        """Positions between which stages may begin and end."""
        self._where = [0] * n
        for position, unit in enumerate(self.order):
            self._where[unit] = position
        # Which of the places a position comes after: all table entries are in places, not positions.
        self._place = np.searchsorted(self.places, np.arange(n), side="right") - 1
        self.size = len(self.places) - 1
        self.valid = np.triu(np.ones((self.size + 1, self.size + 1), dtype=bool), 1)
        self.forward_s = self._sums(pieces.forward_s)
        self.time_s = self._sums(pieces.time_s)
        self.weight_bytes = self._weights(pieces.parameters)
        self.fixed_bytes = self._weights(pieces.fixed)
        self.workspace_bytes = self._largest(pieces.workspace_bytes)
        self.update_bytes = self._update()
        self.held_bytes = self._held()
        self._flows()

    def message_s(self, route: RankLink) -> Table:
        """Seconds for what a stage receives, values and their gradients going back."""
        # What no stage can be is infinite, also over a link without latency.
        each_s = max(route.latency_s + 2 * route.host_s, np.finfo(np.float64).tiny)
        return self.messages * each_s + self.message_bytes / route.bytes_per_s

    def always_bytes(self) -> Table:
        """Parameters, gradients and optimizer state."""
        table: Table = self.fixed_bytes + 2 * self.weight_bytes
        if self.pieces.state_per_parameter:  # none of what is infinite, where nothing can be cut, is not a number
            table = table + np.rint(self.pieces.state_per_parameter * self.weight_bytes)
        return table

    def single_bytes(self) -> Table:
        """Bytes of one micro-batch in its backward: activations, workspace, temporary gradients."""
        table: Table = self.held_bytes + self.workspace_bytes + self.arriving_bytes + self.leaving_bytes
        return table

    def moving_bytes(self, pipeline: Pipeline, stage: int, count: int) -> Table:
        """The most beside what is always there: in the passes, or in the optimizer's step after them."""
        return np.maximum(self.passing_bytes(pipeline, stage, count), self.update_bytes)

    def passing_bytes(self, pipeline: Pipeline, stage: int, count: int) -> Table:
        """Activations in flight, workspace, temporary gradients, and buffers for what comes next.

        A gradient that comes from several stages is counted as coming from one: from how many is not known here.
        """
        table = self.single_bytes() + (pipeline.in_flight(stage, count) - 1) * self._finite(self.held_bytes)
        gradient, value = pipeline.waits_for(stage, count)
        if gradient and value:
            return table + np.maximum(self._finite(self.leaving_bytes), self._finite(self.incoming_bytes))
        if gradient or value:
            table = table + self._finite(self.leaving_bytes if gradient else self.incoming_bytes)
        return table

    def _finite(self, table: Table) -> Table:
        return np.where(self.valid, table, 0.0)

    def stage_of(self, ends: Sequence[int]) -> list[int]:
        """The stage of every unit, given the places where stages end."""
        bounds = [int(self.places[e]) for e in ends]
        found = [0] * len(self.pieces)
        begin = 0
        for k, end in enumerate(bounds):
            for position in range(begin, end):
                found[self.order[position]] = k
            begin = end
        return found

    def _at(self, units: Iterable[int]) -> list[int]:
        return sorted({int(self._place[self._where[u]]) for u in units})

    def _sums(self, figures: Sequence[float]) -> Table:
        n = len(self.pieces)
        total = np.concatenate(([0.0], np.cumsum([figures[self.order[p]] for p in range(n)])))[self.places]
        return self._only(total[None, :] - total[:, None])

    def _largest(self, figures: Sequence[float]) -> Table:
        best = np.zeros(self.size)
        for unit, figure in enumerate(figures):
            place = self._place[self._where[unit]]
            best[place] = max(best[place], figure)
        table = np.zeros((self.size + 1, self.size + 1))
        table[: self.size, 1:] = np.tile(best, (self.size, 1))
        table[~self.valid] = 0.0
        return self._only(np.maximum.accumulate(table, axis=1))

    def _weights(self, parameters: Sequence[Parameter]) -> Table:
        corners = _Corners(self.size)
        for _, nbytes, users in parameters:
            corners.touched(INPUT, self._at(users), nbytes)
        return self._only(corners.table())

    def _update(self) -> Table:
        """What the optimizer's step needs on top."""
        of_all, of_largest = self.pieces.update_workspace
        largest = [0.0] * len(self.pieces)
        for _, nbytes, users in self.pieces.parameters:
            for unit in users:
                largest[unit] = max(largest[unit], nbytes)
        table = of_all * self._finite(self.weight_bytes) + of_largest * self._finite(self._largest(largest))
        return self._only(np.rint(table))

    def _held(self) -> Table:
        corners = _Corners(self.size)
        for memory_use in self.pieces.memory_uses:
            users = self._at(memory_use.users) + ([self.size - 1] if memory_use.to_loss else [])
            savers = self._at(memory_use.savers)
            touches = sorted({*users, *savers})
            producer = INPUT if memory_use.producer == INPUT else self._at([memory_use.producer])[0]
            corners.touched(producer, touches, memory_use.bytes)
            if producer != INPUT:
                # Held by its own stage while a user lies beyond the end, or as soon as a saver lies inside.
                last = max(users, default=producer)
                first = min(savers, default=self.size)
                corners.add(0, producer, producer + 1, last, memory_use.bytes)
                corners.add(0, producer, max(first, last) + 1, self.size, memory_use.bytes)
        return self._only(corners.table())

    def _flows(self) -> None:
        messages, moved, incoming = _Corners(self.size), _Corners(self.size), _Corners(self.size)
        arriving, leaving = _Corners(self.size), _Corners(self.size)
        for flow in self.pieces.flows:
            producer = self._at([flow.producer])[0]
            users = sorted({*self._at(flow.users), *([self.size - 1] if flow.to_loss else [])})
            ways = 2 if flow.has_gradient else 1
            messages.touched(producer, users, ways)
            moved.touched(producer, users, ways * flow.bytes)
            incoming.touched(producer, users, flow.bytes)
            if flow.has_gradient:
                arriving.touched(producer, users, flow.bytes)
                leaving.add(0, producer, producer + 1, max(users, default=producer), flow.bytes)
        self.messages = self._only(messages.table())
        self.message_bytes = self._only(moved.table())
        self.incoming_bytes = self._only(incoming.table())
        self.arriving_bytes, self.leaving_bytes = self._only(arriving.table()), self._only(leaving.table())

    def _only(self, table: Table) -> Table:
        return np.where(self.valid, table, np.inf)


class _Corners:
    """Adds constants on rectangles of a table, all at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.differences = np.zeros((size + 2, size + 2))

    def add(self, first_i: int, last_i: int, first_j: int, last_j: int, amount: float) -> None:
        """Add on begins first_i..last_i and ends first_j..last_j, both inclusive."""
        if first_i > last_i or first_j > last_j:
            return
        self.differences[first_i, first_j] += amount
        self.differences[last_i + 1, first_j] -= amount
        self.differences[first_i, last_j + 1] -= amount
        self.differences[last_i + 1, last_j + 1] += amount

    def touched(self, producer: int, touches: Sequence[int], amount: float) -> None:
        """Add where a stage begins after `producer` and has one of the touched places inside: each such stage once."""
        previous = producer
        for touch in touches:
            if touch > producer:
                self.add(previous + 1, touch, touch + 1, self.size, amount)
                previous = touch

    def table(self) -> Table:
        summed: Table = self.differences.cumsum(axis=0).cumsum(axis=1)[: self.size + 1, : self.size + 1]
        return summed
