"""Fused norms against the library's, by measurement.

Whether fusing pays is predicted (`outcore.memory.op_fusion.profitability`), and the host's part of that is an estimate.
Where the first steps are slower than they should be with the library's norms, those are timed for as many steps, and
the faster way stays.
"""

from __future__ import annotations

from collections.abc import Hashable

from outcore.machine.units import format_time
from outcore.memory.saved_tensors.peak_monitor import MeasuredStep
from outcore.memory.saved_tensors.settings import PlannedCall

__all__ = ["AbTest"]

_SLOWER = 1.05
"""Fused norms are tested if a step takes so many times as long as it should with the library's."""


class AbTest:
    """For each way of calling a model, which norms are faster."""

    def __init__(self) -> None:
        self.waiting: dict[Hashable, tuple[PlannedCall, float]] = {}
        """Calls with fused norms, and their time, while the library's norms are timed."""
        self.times: dict[Hashable, tuple[float, float]] = {}
        """Seconds of a step with fused norms and with the library's, where both were timed."""

    def wanted(self, entry: PlannedCall, seen: MeasuredStep) -> bool:
        """Whether steps with fused norms are slower than predicted, so that a test is wanted."""
        return entry.merged and seen.step_s > _SLOWER * entry.library_s

    def begin(self, key: Hashable, entry: PlannedCall, seen: MeasuredStep) -> None:
        """Keep the time with fused norms and switch to the library's."""
        self.waiting[key] = entry, seen.step_s

    def end(self, key: Hashable, entry: PlannedCall, seen: MeasuredStep) -> PlannedCall:
        """Compare with the time of the library's norms; returns the entry that stays."""
        fused, fused_s = self.waiting.pop(key)
        self.times[key] = fused_s, seen.step_s
        return fused if fused_s < seen.step_s else entry

    def outcome(self, key: Hashable) -> str:
        """The outcome in words, for the plan's explanation."""
        fused, library = map(format_time, self.times[key])
        return f"fused norms take {fused} a step, the library's {library}; the faster ones stay"
