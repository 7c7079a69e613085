"""The autocast state of a call, to run it again in the same types when another state is in force."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

__all__ = ["AutocastState"]


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Whether autocast was on for a device, and in which type."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, device: torch.device) -> AutocastState:
        """The state that is in force now."""
        kind = device.type
        if kind == "meta":
            return cls(kind, False, torch.float32)
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def restored(self) -> contextlib.AbstractContextManager[object]:
        """The same state again, without its cache of casts: what it would hold is gone."""
        if self.device == "meta":
            return contextlib.nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)
