"""In which order a plan has images in memory, and why.

Plain training takes images as they come; a plan may turn them (`outcore.graph.memory_format`). What it takes is then
held against plain training as images come, whose time and peak are kept here.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.graph.memory_format import ChannelsLast

CHANNELS_LAST = "channels_last"
"""What it is called in a plan."""


@dataclass(frozen=True)
class MemoryFormat:
    """The order of images inside a network."""

    inside: ChannelsLast | None = None
    """How the network is recorded; none for the order in which images come."""
    why: str = ""
    """In words; nothing where there was nothing to choose."""
    plain_s: float | None = None
    """Predicted time of plain training, where its order is another."""
    plain_bytes: int | None = None
    """Its predicted peak."""

    @property
    def name(self) -> str | None:
        """As it stands in a plan."""
        return CHANNELS_LAST if self.inside is not None else None

    def __str__(self) -> str:
        return f"{'channels last' if self.inside is not None else 'as given'} ({self.why})"
