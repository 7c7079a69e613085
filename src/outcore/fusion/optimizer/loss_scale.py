"""Loss scaling for half precision, a scale per member.

Every member has an `outcore.loss_scale.LossScale` of its own: one whose gradients overflow skips the step and halves
its scale, and the others do not notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outcore.loss_scale import LossScale


@dataclass
class MemberLossScale:
    """Scales of all members."""

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    scales: list[float] = field(default_factory=list)
    """To start with, if not the same for all; then what they are now."""
    _each: list[LossScale] = field(default_factory=list)

    def fill(self, members: int) -> MemberLossScale:
        """Start with the same scale for all."""
        self.scales = self.scales or [self.initial] * members
        self._each = [LossScale(scale, self.growth, self.backoff, self.interval) for scale in self.scales]
        return self

    def only(self, members: Sequence[int]) -> MemberLossScale:
        """For some of the members, as they are now."""
        kept = [replace(self._each[i]) for i in members]
        return replace(self, scales=[each.scale for each in kept], _each=kept)

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
            self._each[i].update(not good)
            self.scales[i] = self._each[i].scale
        return usable
