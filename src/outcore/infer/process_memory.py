"""What the process holds: anonymous memory, as the system counts it.

A budget on a CPU is about tensors and about what reading takes; Python and torch themselves come on top. Pages of
files that are mapped are not counted: the system takes them back when it needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ProcessMemory", "anonymous_bytes"]


def anonymous_bytes() -> int | None:
    """Anonymous memory of this process that is resident; none where the system does not say."""
    try:
        with Path("/proc/self/status").open() as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


@dataclass
class ProcessMemory:
    """The most that was held, as far as it was looked at, and what was held before."""

    before_bytes: int | None = field(default_factory=anonymous_bytes)
    peak_bytes: int | None = None

    def look(self) -> None:
        """Compare with what is held now."""
        now = anonymous_bytes()
        if now is not None:
            self.peak_bytes = max(self.peak_bytes or 0, now)
