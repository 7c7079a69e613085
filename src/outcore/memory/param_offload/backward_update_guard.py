"""Whether a training loop allows that parameters are updated in backward.

It does if nothing happens to gradients between ``backward()`` and ``step()``, if no second backward adds to them, and
if nobody writes to parameters between a step and the next forward pass. The first two steps are done in
``optimizer.step()`` and checked: torch counts writes to gradients, and the off-device copies of parameters are
compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from outcore.memory.param_offload.buckets import Bucket

_STEPS = 2


class BackwardUpdateGuard:
    """Checks the first steps of a loop; `allowed` is None until it knows."""

    def __init__(self) -> None:
        self.steps = 0
        self.allowed: bool | None = None
        self.seen: dict[int, tuple[int, int]] = {}
        """Parameter (id) -> how often its gradient was accumulated, and its version then."""
        self.last: dict[int, int] = {}
        """Bucket -> the parameter (id) whose gradient was accumulated last."""
        self.snapshots: dict[int, torch.Tensor] = {}
        """Bucket -> a copy of its off-device storage after the last step."""

    def gradient(self, bucket: Bucket, p: torch.Tensor) -> None:
        """Note that a gradient was accumulated."""
        assert p.grad is not None
        self.last[bucket.number] = id(p)
        self.seen[id(p)] = (self.seen.get(id(p), (0, 0))[0] + 1, p.grad._version)

    def before_step(self, buckets: Iterable[Bucket]) -> None:
        """Check the gradients when ``optimizer.step()`` is called."""
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
        """Decide after enough steps, or keep a copy of all parameters, which are off the device now."""
        if self.allowed is None and self.steps >= _STEPS:
            self.allowed, self.snapshots = True, {}
        elif self.allowed is None:
            self.snapshots = {
                bucket.number: bucket.weights.off_device.clone() for bucket in buckets if bucket.weights is not None
            }

    def before_forward(self, buckets: Iterable[Bucket]) -> None:
        """Check that the parameters are still what the last step left."""
        for bucket in buckets:
            snapshot = self.snapshots.pop(bucket.number, None)
            if (
                snapshot is not None
                and bucket.weights is not None
                and not torch.equal(snapshot, bucket.weights.off_device)
            ):
                self.refuse("parameters are changed between step() and the next forward pass")

    def refuse(self, why: str) -> None:
        """Stay with updates in ``optimizer.step()``, and warn why."""
        self.allowed, self.snapshots = False, {}
        warnings.warn(
            f'outcore: updates stay in optimizer.step() although update="backward" was asked for: {why}', stacklevel=5
        )
