"""One record per operation, and the facets under which packages add what they know of it.

An operation is recorded under several names: a class of ``torch.nn``, a function, its in-place form, a reflected
method. All of them lead to one `Op`, so a rule is written for the operation and holds under each of its names:

    "ReLU"   ─┐              ┌─ again      may run twice                 (ops.recompute_encode)
    "relu"   ─┼─▶ Op("relu") ┼─ saved      what its backward keeps       (ops.saved)
    "relu_"  ─┘              ├─ cost       sizes of its work             (cost.predicted.describe)
                             └─ tile       how a region is computed      (stream.rules)

Which operations there are stands in `outcore.ops.catalogue` and nowhere else. A package that knows something about
them makes a `Facet` and adds its facts; a name that is not in the catalogue, or a second fact of the same facet, is an
error when the package is imported. An operation that is not in the catalogue is opaque: still correct, kept or
offloaded, never tiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from outcore.ops.catalogue import CATALOGUE

Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation, and all that is known of it."""

    name: str
    kind: str
    """What it is: ``"convolution"``, ``"activation"``, ``"view"``, …"""
    modules: tuple[str, ...] = ()
    """Classes of layers that compute it."""
    functions: tuple[str, ...] = ()
    """Functions, methods and operators that do, as a recording names them."""
    in_place: tuple[str, ...] = ()
    """Those that write into their first argument."""
    aten: tuple[str, ...] = ()
    """Names of the operations below autograd that it becomes, where they differ from its own."""
    facts: dict[str, Any] = field(default_factory=dict, repr=False)
    """By facet."""

    @property
    def types(self) -> tuple[str, ...]:
        """All names under which it is recorded."""
        return (*self.modules, *self.functions, *self.in_place)

    @property
    def dims(self) -> int | None:
        """How many spatial dimensions it is for; none where it takes any, or has none."""
        return int(self.name[-2]) if self.name[-2:] in ("1d", "2d", "3d") else None


def _records() -> Iterator[Op]:
    for kind, text in CATALOGUE.items():
        for row in text.split():
            names = row.split("/")
            aten = tuple(n.removeprefix("aten.") for n in names if n.startswith("aten."))
            names = [n for n in names if not n.startswith("aten.")]
            modules = tuple(n for n in names if n[:1].isupper() and len(n) > 1)
            in_place = tuple(n for n in names if n.endswith("_"))
            functions = tuple(n for n in names if n not in modules and n not in in_place)
            yield Op(names[0], kind, modules, functions, in_place, aten)


_OPS = {op.name: op for op in _records()}
_BY_TYPE = {type_: op for op in _OPS.values() for type_ in op.types}
_ATEN_KIND = {name: op.kind for op in reversed(_OPS.values()) for name in (*op.aten, *op.functions)}


def operations() -> tuple[Op, ...]:
    """All operations of the catalogue, kind by kind."""
    return tuple(_OPS.values())


def operation(name: str) -> Op:
    """The operation of this name."""
    try:
        return _OPS[name]
    except KeyError:
        known = _BY_TYPE.get(name)
        hint = f"; it is recorded as part of {known.name!r}" if known is not None else ""
        raise KeyError(f"no operation is called {name!r} in outcore.ops.catalogue{hint}") from None


def find(type_: str) -> Op | None:
    """The operation that is recorded under a name; none if it is opaque.

    >>> find("Conv2d") is find("conv2d"), find("conv2d").kind, find("SomethingElse")
    (True, 'convolution', None)
    """
    return _BY_TYPE.get(type_)


def of_layer(module: object) -> Op | None:
    """The operation that a layer computes; none for what is not a class of torch.nn itself, whatever its name."""
    kind = type(module)
    return _BY_TYPE.get(kind.__name__) if kind.__module__.startswith("torch.nn.") else None


def spatial_dims(type_: str) -> int:
    """How many spatial dimensions an operation is for, by a name it is recorded under; 0 where it takes any number."""
    op = _BY_TYPE.get(type_)
    return op.dims or 0 if op is not None else 0


def kinds(*wanted: str) -> tuple[str, ...]:
    """The names of all operations of some kinds."""
    unknown = set(wanted) - CATALOGUE.keys()
    if unknown:
        raise KeyError(f"no kind of operation is called {', '.join(sorted(unknown))}")
    return tuple(op.name for op in _OPS.values() if op.kind in wanted)


def names(*wanted: str) -> frozenset[str]:
    """All names under which some operations are recorded.

    >>> sorted(names("relu"))
    ['ReLU', 'relu', 'relu_']
    """
    return frozenset(type_ for name in wanted for type_ in operation(name).types)


def aten_kind(name: str) -> str:
    """The kind of an operation below autograd (``"_unsafe_view"``); empty where it is not known."""
    return _ATEN_KIND.get(name, "")


class Facet(Generic[Fact]):
    """One kind of knowledge about operations, which one package adds.

    >>> rounds = Facet[str]("doc-example", "Whether it rounds.")
    >>> rounds.add("it does", "floor", "ceil")
    >>> rounds.find("floor_"), rounds.find("relu")
    ('it does', None)
    >>> rounds.withdraw()
    """

    def __init__(self, name: str, question: str) -> None:
        if name in FACETS:
            raise ValueError(f"there is a facet {name!r} already")
        self.name, self.question = name, question
        FACETS[name] = self

    def add(self, fact: Fact, *operations: str) -> None:
        """Note a fact about operations, by their names in the catalogue."""
        for name in operations:
            facts = operation(name).facts
            if self.name in facts:
                raise ValueError(f"{self.name!r} of {name} is said twice")
            facts[self.name] = fact

    def __call__(self, *operations: str) -> Callable[[Fact], Fact]:
        """Note a function as the fact about operations: a decorator."""

        def register(fact: Fact) -> Fact:
            self.add(fact, *operations)
            return fact

        return register

    def find(self, type_: str) -> Fact | None:
        """What is known of the operation that is recorded under a name; none if nothing is."""
        op = _BY_TYPE.get(type_)
        return op.facts.get(self.name) if op is not None else None

    def where(self, holds: Callable[[Fact], bool] = bool) -> frozenset[str]:
        """The names under which operations are recorded of which something holds."""
        return frozenset(
            t for op in _OPS.values() if self.name in op.facts and holds(op.facts[self.name]) for t in op.types
        )

    def withdraw(self) -> None:
        """Forget the facet and its facts."""
        del FACETS[self.name]
        for op in _OPS.values():
            op.facts.pop(self.name, None)


FACETS: dict[str, Facet[Any]] = {}
"""All facets, in the order in which packages were imported."""


def _check(ops: Iterable[Op]) -> None:
    """Every name leads to one operation."""
    seen: dict[str, str] = {}
    for op in ops:
        for type_ in op.types:
            if seen.setdefault(type_, op.name) != op.name:
                raise ValueError(f"{type_!r} is in the catalogue as {seen[type_]} and as {op.name}")


_check(_OPS.values())
