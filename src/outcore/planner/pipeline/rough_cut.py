"""Rough cuts, for ranking many candidates: few places of the recorded order, and figures straight from the tables."""

from __future__ import annotations

import numpy as np

from outcore.planner.partition.dp_dispatch import cut_line
from outcore.planner.partition.interval_tables import IntervalTables
from outcore.planner.partition.strategies import Balance
from outcore.planner.partition.topological_orders import coarse_places
from outcore.planner.partition.weighted_units import WeightedUnits
from outcore.planner.pipeline.schedule_model import Pipeline, RankLink

__all__ = ["RoughCut"]


class RoughCut:
    """Rough cuts of the same pieces; tables are kept between them."""

    def __init__(self, pieces: WeightedUnits) -> None:
        self.pieces = pieces
        self._lines: dict[int, IntervalTables] = {}

    def cut(
        self, count: int, balance: Balance, pipeline: Pipeline, cap: float | None, route: RankLink, replicas: int
    ) -> tuple[float, int] | None:
        """Seconds of a step and peak of the largest rank, or None if no cut at these places fits."""
        line = self._line(max(2 * count, 24 if pipeline.paired else 64))
        if count > line.size:
            return None
        cuts = cut_line(line, count, balance, pipeline, cap, route)
        return min((self._figures(line, ends, pipeline, route, replicas) for ends in cuts), default=None)

    def _line(self, most: int) -> IntervalTables:
        if most not in self._lines:
            order = tuple(range(len(self.pieces)))
            self._lines[most] = IntervalTables(self.pieces, order, coarse_places(self.pieces, order, most))
        return self._lines[most]

    def _figures(
        self, line: IntervalTables, ends: list[int], pipeline: Pipeline, route: RankLink, replicas: int
    ) -> tuple[float, int]:
        count, at = len(ends), ([0, *ends[:-1]], ends)
        forward, messages = line.forward_s[at].tolist(), line.message_s(route)[at].tolist()
        backward = (line.time_s[at] - line.forward_s[at]).tolist()
        weights = line.weight_bytes[at]
        update_s = (3 + 2 * self.pieces.state_per_parameter) * float(weights.max()) / self.pieces.update_bytes_per_s
        time_s = pipeline.pass_s(forward, backward, messages)
        time_s += pipeline.update_s(weights.tolist(), update_s, route, replicas)
        moving = np.array(
            [line.moving_bytes(pipeline, k, count)[a, b] for k, (a, b) in enumerate(zip(*at, strict=True))]
        )
        always = line.always_bytes()[at]
        if pipeline.paired:
            return time_s, int(max(always + always[::-1] + np.maximum(moving, moving[::-1])))
        return time_s, int(max(always + moving))
