"""Loss scaling for half precision, a scale per member.

As `torch.amp.GradScaler`: the loss is multiplied before backward, the gradients divided after; a member whose
gradients overflow skips the step and halves its scale, one that has not for a while doubles it. The others do not
notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

__all__ = ["MemberLossScale"]


@dataclass
class MemberLossScale:
    """Scales of all members."""

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    scales: list[float] = field(default_factory=list)
    _good: list[int] = field(default_factory=list)

    def fill(self, members: int) -> MemberLossScale:
        """Start with the same scale for all."""
        self.scales = self.scales or [self.initial] * members
        self._good = [0] * members
        return self

    def only(self, members: Sequence[int]) -> MemberLossScale:
        """For some of the members, as they are now."""
        kept = replace(self, scales=[self.scales[i] for i in members])
        kept._good = [self._good[i] for i in members]
        return kept

    def of(self, first: int, count: int, device: torch.device) -> Tensor:
        """The scales of consecutive members."""
        return torch.tensor(self.scales[first : first + count], device=device)

    def unscale(self, grads: Mapping[str, Tensor], first: int) -> Tensor:
        """Divide the gradients, adjust the scales, and return which members may step."""
        some = next(iter(grads.values()))
        scale = self.of(first, some.shape[0], some.device)
        usable = torch.ones_like(scale, dtype=torch.bool)
        for grad in grads.values():
            grad.div_(scale.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1)))
            usable &= grad.flatten(1).isfinite().all(1)
        for i, good in enumerate(usable.tolist(), first):
            self._good[i] = self._good[i] + 1 if good else 0
            if not good:
                self.scales[i] *= self.backoff
            elif self._good[i] == self.interval:
                self.scales[i] *= self.growth
                self._good[i] = 0
        return usable
