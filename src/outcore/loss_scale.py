"""The loss scale of half precision: the rule by which it moves.

The loss is multiplied before backward and the gradients divided after, so that float16 gradients do not vanish. As in
`torch.amp.GradScaler`, a step whose gradients overflow is skipped and the scale halved; after a while without one it is
doubled.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LossScale:
    """The factor that keeps float16 gradients from vanishing; halved after an overflow, doubled after a quiet while."""

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    quiet: int = 0

    def update(self, overflowed: bool) -> None:
        """Learn from a step, as torch's GradScaler does."""
        if overflowed:
            self.scale, self.quiet = self.scale * self.backoff, 0
            return
        self.quiet += 1
        if self.quiet == self.interval:
            self.scale, self.quiet = self.scale * self.growth, 0
