"""Fused norms against the library's, by the clock.

Whether fusing pays is predicted (`outcore.memory.op_fusion.profitability`), and the host's part of that is an estimate.
Where the first steps are slower than they should be with the library's norms, those are watched for as many steps, and
the faster way stays.
"""

from __future__ import annotations

from collections.abc import Hashable

from outcore.machine.units import format_time
from outcore.memory.saved_tensors.peak_monitor import MeasuredStep
from outcore.memory.saved_tensors.settings import PlannedCall

__all__ = ["AbTest"]

_SLOWER = 1.05
"""Fused norms are put to the test if a step takes so much longer than it should with the library's."""


class AbTest:
    """Per way of calling a model, which norms are faster."""

    def __init__(self) -> None:
        self.waiting: dict[Hashable, tuple[PlannedCall, float]] = {}
        """Ways with fused norms, and their time, while the library's norms are watched."""
        self.times: dict[Hashable, tuple[float, float]] = {}
        """Seconds of a step with fused norms and with the library's, where both were watched."""

    def wanted(self, entry: PlannedCall, seen: MeasuredStep) -> bool:
        """Whether fused norms disappoint."""
        return entry.merged and seen.step_s > _SLOWER * entry.library_s

    def begin(self, key: Hashable, entry: PlannedCall, seen: MeasuredStep) -> None:
        """Fused norms were watched; now the library's are."""
        self.waiting[key] = entry, seen.step_s

    def end(self, key: Hashable, entry: PlannedCall, seen: MeasuredStep) -> PlannedCall:
        """The library's norms were watched too; the way that stays."""
        fused, fused_s = self.waiting.pop(key)
        self.times[key] = fused_s, seen.step_s
        return fused if fused_s < seen.step_s else entry

    def told(self, key: Hashable) -> str:
        """How it ended."""
        fused, library = map(format_time, self.times[key])
        return f"fused norms take {fused} a step, the library's {library}; the faster ones stay"
