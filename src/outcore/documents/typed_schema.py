"""The schema of a dataclass, read off its annotations, so that what is saved and what is accepted cannot drift apart.

    str → Text    int → Whole    float → Number    bool → Flag    Literal → Choice    X | None → Maybe
    tuple[X, ...], Sequence[X] → ListOf    Mapping[str, X] → MapOf    a dataclass → Record    a NamedTuple → Row

Fields with a default may be left out. A field of another type is refused when the schema is made, not when a document
is read.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from outcore.documents.schema import Flag, ListOf, MapOf, Maybe, Number, OneOf, Problem, Record, Schema, Text, Whole

_PLAIN: dict[Any, type[Schema]] = {str: Text, bool: Flag, int: Whole, float: Number}


@dataclass(frozen=True)
class Row(Schema):
    """A list with a kind of value at each place; the last ones may be left out."""

    places: tuple[tuple[str, Schema], ...]
    least: int

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The schema in words, for messages."""
        return f"a list of {', '.join(name for name, _ in self.places)}"

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        if not isinstance(value, (list, tuple)) or not self.least <= len(value) <= len(self.places):
            return self._wrong(value, place)
        pairs = enumerate(zip(value, self.places, strict=False))
        found = (schema.problem(one, f"{place}[{n}]") for n, (one, (_, schema)) in pairs)
        return next((problem for problem in found if problem is not None), None)


def record_of(kind: Any, *without: str) -> Record:
    """What a document must hold for a dataclass, some of its fields left out."""
    return _record(kind, without)


@cache
def _record(kind: Any, without: tuple[str, ...]) -> Record:
    hints = get_type_hints(kind)
    chosen = [field for field in fields(kind) if field.name not in without]
    made = {field.name: schema_of(hints[field.name]) for field in chosen}
    may = {f.name for f in chosen if f.default is not MISSING or f.default_factory is not MISSING}
    return Record({n: s for n, s in made.items() if n not in may}, {n: s for n, s in made.items() if n in may})


@cache
def schema_of(kind: Any) -> Schema:
    """What a document must hold for a value of a type.

    >>> from typing import NamedTuple
    >>> class Point(NamedTuple):
    ...     x: int
    ...     name: str = ""
    >>> schema_of(Point).problem(["left"], "point")
    ('point[0]', "'left'", 'a whole number')
    """
    if kind in _PLAIN:
        return _PLAIN[kind]()
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return OneOf(inside)
    if origin in (Union, types.UnionType) and len(inside) == 2 and type(None) in inside:
        return Maybe(schema_of(next(one for one in inside if one is not type(None))))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return MapOf(schema_of(inside[1]))
    if isinstance(origin, type) and issubclass(origin, Sequence) and inside[1:] in ((), (...,)):
        return ListOf(schema_of(inside[0]))
    if isinstance(kind, type) and is_dataclass(kind):
        return record_of(kind)
    if hasattr(kind, "_field_defaults"):
        hints = get_type_hints(kind)
        return Row(tuple((name, schema_of(hints[name])) for name in hints), len(hints) - len(kind._field_defaults))
    raise TypeError(f"no schema for {kind}")
