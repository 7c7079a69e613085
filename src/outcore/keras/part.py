"""What a converter gets and what it gives.

A converter makes, for one Keras layer or operation, a `Part`: a module, the layout in which the module takes and
returns images, and its weights. Values of rank three or more lie either as Keras has them or with channels first, as
torch's convolutions want them; the twin's graph permutes a value where a part wants it otherwise, once per value.

A layer that has no exact counterpart is refused with `Site.refuse`, which names its path in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import nn

from outcore.errors import ModelError

__all__ = ["CONVERTERS", "Part", "Site", "converts"]


@dataclass(frozen=True)
class Site:
    """Where a layer stands: its path, and how its inputs arrive."""

    path: str
    kind: str
    ranks: tuple[int, ...]
    """Ranks of the tensors it is called with."""
    first: bool
    """Whether an input of rank three or more arrives with channels first."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    convert: Callable[[Any, Site], Part] | None = None
    """Converts a layer inside this one."""

    @property
    def rank(self) -> int:
        """The rank of the first input."""
        return self.ranks[0] if self.ranks else 0

    def keeps_layout(self) -> bool:
        """Whether an operation on single elements may run with channels first."""
        return self.first and len(set(self.ranks)) == 1

    def refuse(self, why: str, do: str = "") -> NoReturn:
        """Say that this layer cannot be carried over."""
        advice = do or (
            "replace it by layers that can, or pass to_torch(model, layers={...}) a function that makes its module"
        )
        raise ModelError(f"{self.path} ({self.kind}) cannot be carried over to torch: {why}; {advice}")


@dataclass(frozen=True)
class Part:
    """A module that computes what a Keras layer does."""

    module: nn.Module
    first: bool = False
    """It takes and returns images with channels first."""
    weights: Sequence[Any] = ()


Converter = Callable[[Any, Site], Part]
CONVERTERS: dict[str, Converter] = {}
"""By the name of the Keras class, ``layers.`` or ``ops.`` before it."""


def converts(*names: str) -> Callable[[Converter], Converter]:
    """Enter a converter for Keras classes."""

    def enter(function: Converter) -> Converter:
        for name in names:
            CONVERTERS[name] = function
        return function

    return enter
