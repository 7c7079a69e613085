"""How large a call of a model is, so that a plan for a larger one serves it.

A plan is aligned with a running forward by name, so one made for a batch of 64 holds for the last batch of 17 as it is:
every buffer is smaller, every policy still right. What decides is therefore not which call it is but how large: the
shapes of the tensors that make up most of its input, what autocast computes in, and which parameters are trained. The
number of boxes in a detection target, a step counter or a flag do not matter.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_SHARE = 0.02
"""Tensors of less than this share of the input are not looked at."""


@dataclass(frozen=True)
class CallSize:
    """The large tensors among a call's arguments, and what else decides how much is saved."""

    shapes: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """Shape, dtype and whether it requires a gradient, in the order of the arguments."""
    autocast: tuple[tuple[str, torch.dtype], ...]
    trained: int
    """Parameters that require a gradient."""

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any], trained: int, device: str) -> CallSize:
        """The size of a call with these arguments.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            trained: how many of the model's parameters require a gradient.
            device: type of the device the model is on.
        """
        found: list[torch.Tensor] = []
        _collect(args, found)
        _collect(kwargs, found)
        least = _SHARE * sum(t.numel() for t in found)
        shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in found if t.numel() >= least)
        devices = dict.fromkeys(("cpu", device))
        autocast = tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))
        return cls(shapes, autocast, trained)

    @property
    def elements(self) -> int:
        """How many elements the large tensors of the call have in all."""
        return sum(math.prod(shape) for shape, _, _ in self.shapes)

    def covers(self, other: CallSize) -> bool:
        """Whether a plan for this call serves another: nothing of it is larger."""
        if self == other:
            return True
        if self.autocast != other.autocast or len(self.shapes) < len(other.shapes) or self.trained < other.trained:
            return False
        pairs = zip(self.shapes, other.shapes, strict=False)
        return all(
            len(mine) == len(theirs)
            and all(a >= b for a, b in zip(mine, theirs, strict=True))
            and my_type.itemsize >= their_type.itemsize
            and (my_grad or not their_grad)
            for (mine, my_type, my_grad), (theirs, their_type, their_grad) in pairs
        )


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    """Add the tensors of a nested argument to `found`."""
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _collect(value, found)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            _collect(value, found)
    elif (attributes := getattr(tree, "__dict__", None)) and not isinstance(tree, nn.Module):
        for value in attributes.values():
            if isinstance(value, (torch.Tensor, tuple, list, Mapping)):
                _collect(value, found)


class RememberedParameters:
    """Remembers the parameters of a model, because walking over its modules takes as long as many of its calls."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[nn.Parameter]] = []

    def of(self, model: nn.Module) -> list[nn.Parameter]:
        """All parameters of the model, from memory; looked up again when one of them no longer exists."""
        found = [p for reference in self._known if (p := reference()) is not None]
        if not found or len(found) < len(self._known):
            found = list(model.parameters())
            self._known = [weakref.ref(p) for p in found]
        return found

    def trained(self, model: nn.Module) -> int:
        """How many parameters require a gradient."""
        if self._known:
            with contextlib.suppress(AttributeError):  # one of them is gone
                return sum([reference().requires_grad for reference in self._known])  # type: ignore[union-attr]
        return sum([p.requires_grad for p in self.of(model)])

    def first(self) -> nn.Parameter | None:
        """The first remembered parameter, if there is one: it tells where the model is."""
        return self._known[0]() if self._known else None
