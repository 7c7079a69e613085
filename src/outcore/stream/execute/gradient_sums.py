"""Gradients added up over tiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outcore.stream.rules.reduce import wide


class GradientSums:
    """One running sum per parameter, in float32 or better."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Add what one tile gives."""
        old: list[torch.Tensor] = []
        new: list[torch.Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            if (total := self._sums.get(id(parameter))) is None:
                self._sums[id(parameter)] = gradient.to(wide(gradient.dtype), copy=True)  # it may be shared
            else:
                old.append(total)
                new.append(gradient)
        if old:
            torch._foreach_add_(old, [g.to(t.dtype) for g, t in zip(new, old, strict=True)])

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The sum, in the parameter's own precision."""
        total = self._sums.get(id(parameter))
        return None if total is None else total.to(parameter.dtype)

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all sums."""
        self._sums = {key: total * factor.to(total.dtype) for key, total in self._sums.items()}
