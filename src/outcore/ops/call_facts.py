"""One call of an operation as rules look at it, and a tensor that its backward keeps.

`KeptTensor` is one tensor that autograd holds between forward and backward. It is either something the graph knows (an
input, the output, a parameter) or *derived*: made by the operation for its backward alone, with a size that follows
from the shapes of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

What = Literal["input", "output", "parameter", "derived"]


class Operand(Protocol):
    """A tensor that goes in or comes out, as a graph describes it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""

    @property
    def dtype(self) -> str:
        """As torch spells it, e.g. "float32"."""

    @property
    def bytes(self) -> int:
        """Elements times their size."""

    @property
    def requires_grad(self) -> bool:
        """Whether backward computes its gradient."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a rule may look at: one call of an operation."""

    is_module: bool
    """A layer of torch.nn, not a function."""
    settings: str
    """Arguments that are not tensors, as one would print them."""
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    parameters: tuple[str, ...] = ()
    training: bool = True
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """One thing that is kept."""

    what: What
    index: int | None = None
    """Which input; none for all of them."""
    name: str = ""
    """Of a parameter ("weight"), or what a derived tensor is ("indices")."""
    bytes: Callable[[CallFacts], int] | None = None
    """Size of a derived tensor."""
    when: Callable[[CallFacts], bool] | None = None
    """None for always."""

    def applies(self, facts: CallFacts) -> bool:
        """Whether it is kept in this call."""
        return self.when is None or self.when(facts)
