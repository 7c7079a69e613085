"""Whether a training loop allows that parameters are updated in backward.

It does if nothing happens to gradients between ``backward()`` and ``step()``, if no second backward adds to them, and
if nobody writes to parameters between a step and the next forward pass. The first two steps are done the careful way
and looked at: torch counts writes to gradients, and what homes hold is compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from outcore.memory.param_offload.buckets import Bucket

__all__ = ["BackwardUpdateGuard"]

_STEPS = 2


class BackwardUpdateGuard:
    """Looks at the first steps of a loop."""

    def __init__(self) -> None:
        self.steps = 0
        self.verdict: bool | None = None
        self.seen: dict[int, tuple[int, int]] = {}
        """Parameter -> how often its gradient arrived, and its version then."""
        self.last: dict[int, int] = {}
        """Bucket -> the parameter (id) whose gradient arrived last."""
        self.homes: dict[int, torch.Tensor] = {}
        """What the homes of buckets held after the last step."""

    def gradient(self, bucket: Bucket, p: torch.Tensor) -> None:
        """A gradient arrived."""
        assert p.grad is not None
        self.last[bucket.number] = id(p)
        self.seen[id(p)] = (self.seen.get(id(p), (0, 0))[0] + 1, p.grad._version)

    def before_step(self, buckets: Iterable[Bucket]) -> None:
        """``optimizer.step()`` is called."""
        for p in (p for bucket in buckets for p in bucket.trained):
            times, version = self.seen.get(id(p), (0, 0))
            if times > 1:
                return self.refuse("gradients of several passes are added up")
            if times and (p.grad is None or p.grad._version != version):
                return self.refuse("gradients are changed between backward() and step() (clipped, unscaled)")
        self.seen = {}
        self.steps += 1
        return None

    def after_step(self, buckets: Iterable[Bucket]) -> None:
        """The step is over and everything is at home."""
        if self.verdict is None and self.steps >= _STEPS:
            self.verdict, self.homes = True, {}
        elif self.verdict is None:
            self.homes = {
                bucket.number: bucket.weights.home.clone() for bucket in buckets if bucket.weights is not None
            }

    def before_forward(self, buckets: Iterable[Bucket]) -> None:
        """The next pass begins."""
        for bucket in buckets:
            home = self.homes.pop(bucket.number, None)
            if home is not None and bucket.weights is not None and not torch.equal(home, bucket.weights.home):
                self.refuse("parameters are changed between step() and the next forward pass")

    def refuse(self, why: str) -> None:
        """Stay with the careful way."""
        self.verdict, self.homes = False, {}
        warnings.warn(
            f'outcore: updates stay in optimizer.step() although update="backward" was asked for: {why}', stacklevel=5
        )
