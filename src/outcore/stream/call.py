"""One recorded call, as a rule for streaming looks at it.

A rule answers two questions about an operation: which region of each operand a region of the output depends on
(`needs`), and how to compute that region of the output from exactly those regions (`run`). Operands are all tensors
of the call alike: values of the graph, parameters, constants. Rules are found by the name of a torch.nn class or of a
function; what has no rule is *opaque* and never tiled.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from outcore.graph.record.recording import Ref
from outcore.graph.structure import leaves, substitute
from outcore.ops.region import Region
from outcore.ops.registry import Facet, find
from outcore.ops.signature import SIGNATURES
from outcore.ops.traits import out_of_place
from outcore.stream.execute.border_padding import WidenedInput


class NotStreamable(Exception):  # noqa: N818 - a signal to whoever binds, who turns it into a reason
    """This call cannot be streamed; says why."""


@dataclass(frozen=True)
class RuleContext:
    """What a rule may read while it runs, beside its operands."""

    seed: int = 0
    """The seed of this step; random masks are functions of it, of the call and of the position."""


class RegionRule(Protocol):
    """How one output of a call is computed region by region."""

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The tensors it takes."""

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The region of each operand that a region of the output depends on."""

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """A region of the output from exactly the regions it needs."""

    def follow(self, operand: int, dim: int) -> int | None:
        """The output's dimension that an operand's dimension becomes; None where all of it is needed."""

    def place(self, out: Region) -> Any:
        """A key of what the result depends on beside the contents of the operands: its absolute position, as far as it
        matters."""


class PlainRule:
    """A rule whose output has the dimensions of its operands, and that computes the same wherever a region lies."""

    def follow(self, operand: int, dim: int) -> int | None:
        """The output's dimension that an operand's dimension becomes: the same one."""
        return dim

    def place(self, out: Region) -> Any:
        """Nothing: the result depends on the contents of the operands alone."""
        return None


@runtime_checkable
class WideningRule(Protocol):
    """A rule that can also run on more of its first operand than it needs, and then gives more than is wanted."""

    def widened(self, held: Region, out: Region) -> WidenedInput | None:
        """How it runs on all that is held; None if what is wanted would be wrong, or the excess not worth it."""

    def run_widened(self, crops: Sequence[torch.Tensor], widened: WidenedInput) -> torch.Tensor:
        """The whole output, from all that is held of the first operand."""


def widening_rule(rule: object) -> WideningRule | None:
    """The rule, if it can run on more than it needs."""
    kind: type = type(rule)
    return cast(WideningRule, rule) if _can_overhang(kind) else None


@functools.cache
def _can_overhang(kind: type) -> bool:
    return issubclass(kind, WideningRule)


class Reduction(Protocol):
    """A call whose output needs all of its first operand, but as a sum of terms that tiles give one by one."""

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The tensors it takes, the one it is over first."""

    def start(self) -> Any:
        """The state before any tile."""

    def add(self, state: Any, crop: torch.Tensor, at: Region, times: int) -> Any:
        """Add one more part of the operand, which occurs `times` times, to the state."""

    def finish(self, state: Any) -> torch.Tensor:
        """The output, after all parts."""

    def share(self, crop: torch.Tensor, at: Region, result: torch.Tensor, state: Any, times: int) -> torch.Tensor:
        """A tensor whose sum over all parts, of which this one occurs `times` times, has the output's derivative."""


@dataclass(frozen=True)
class StreamCall:
    """A recorded call with everything that is known about it."""

    name: str
    type: str
    """Class of torch.nn or name of the function."""
    path: str
    """The path of the module; empty for a function."""
    module: nn.Module | None
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: str
    index: int
    """Which output of the call."""
    lengths: tuple[int, ...]
    """The sizes of all outputs, along the dimension they differ in."""
    shape: tuple[int, ...]
    """The shape of the output."""
    dtype: torch.dtype
    shapes: Callable[[Ref], tuple[int, ...]]
    streamed: Callable[[Ref], frozenset[int]]
    """The dimensions of an operand that tiles run along."""
    maker: Callable[[Ref], Any] = lambda ref: None
    """The rule that an operand is made by; None for what has none."""

    @property
    def operation(self) -> str:
        """The operation's name in the catalogue; empty if it is opaque."""
        op = find(self.type)
        return op.name if op is not None else ""

    def bound(self, names: str, **defaults: Any) -> dict[str, Any]:
        """The arguments by name, given the order in which the function takes them."""
        order = names.split()
        known = dict(defaults)
        known.update(zip(order, self.args, strict=False))
        known.update(self.kwargs)
        if len(self.args) > len(order):
            raise NotStreamable(f"{self.type} has more arguments than expected")
        return known

    def given(self) -> dict[str, Any]:
        """The arguments by the operation's own names: attributes of a layer, its parameters as references; or what a
        function was called with, and the defaults of what was left out."""
        signature = SIGNATURES.find(self.type)
        assert signature is not None
        if self.module is None:
            if len(self.args) > len(signature.names):
                raise NotStreamable(f"{self.type} has more arguments than expected")
            return signature.bound(self.args, self.kwargs)
        own = {name: getattr(self.module, name, signature.defaults.get(name)) for name in signature.names}
        own |= {name: self.state(name) for name, value in own.items() if isinstance(value, torch.Tensor)}
        return own | {signature.names[0]: self.input()}

    def state(self, name: str) -> Ref | None:
        """The module's parameter or buffer of that name."""
        return Ref("state", f"{self.path}.{name}") if getattr(self.module, name, None) is not None else None

    def input(self) -> Ref:
        """The first argument, which must be a tensor."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        if not isinstance(first, Ref):
            raise NotStreamable(f"{self.type} is called without a tensor")
        return first

    def tensors(self) -> tuple[Ref, ...]:
        """All references to tensors in the arguments, in order."""
        return tuple(r for _, r in leaves((self.args, self.kwargs), Ref) if r.kind != "module")

    def recall(self) -> Callable[[Sequence[torch.Tensor]], Any]:
        """A function that makes the call again on other tensors, never in place and without the module's hooks."""
        if self.module is not None:
            module = copy.copy(self.module)
            if hasattr(module, "inplace"):
                module.inplace = False  # type: ignore[assignment]
            function: Any = module.forward
        else:
            function = out_of_place(self.target)
        keywords = {k: v for k, v in self.kwargs.items() if k != "inplace"}

        def again(tensors: Sequence[torch.Tensor]) -> Any:
            left = iter(tensors)
            args, kwargs = substitute((self.args, keywords), Ref, lambda _: next(left))
            return function(*args, **kwargs)

        return again


Bind = Callable[[StreamCall], Any]
rule: Facet[Bind] = Facet("tile", "how a region of its output is computed from regions of its operands")
"""Registers how calls of operations are bound."""
