"""Schemas of documents: what a value that was read must look like, and a refusal that says where it does not.

A schema is a value made of a few others, all small. `check` compares: what comes out has the promised shape, so code
behind it need not look again. A refusal names the file, the place inside it, what was found there and what was
expected:

    plan.json: placement[1] is -1; expected a whole number of at least 0

The error class is the caller's, so a bad plan stays a `PlanError`.
"""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError

_SHOWN = 60

Problem = tuple[str, str, str]
"""The place inside the document, what was found there, and what was expected."""


class Schema:
    """What a value must look like."""

    expected = "anything"

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        return None

    def _wrong(self, value: Any, place: str) -> Problem:
        return place, shown(value), self.expected


class Anything(Schema):
    """Any value: nothing is checked."""


@dataclass(frozen=True)
class Text(Schema):
    """Characters; `least` of them."""

    least: int = 0

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The schema in words, for messages."""
        return "text" if not self.least else "text that is not empty"

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        return None if isinstance(value, str) and len(value) >= self.least else self._wrong(value, place)


@dataclass(frozen=True)
class Number(Schema):
    """A finite number within bounds."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    whole = False

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The schema in words, for messages."""
        words = "a whole number" if self.whole else "a finite number"
        bounds = [f"of at least {self.least:,}"] if self.least is not None else []
        bounds += [f"above {self.above:,}"] if self.above is not None else []
        bounds += [f"of at most {self.most:,}"] if self.most is not None else []
        return f"{words} {' and '.join(bounds)}".strip()

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        kind = int if self.whole else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool):
            return self._wrong(value, place)
        if isinstance(value, float) and not math.isfinite(value):
            return self._wrong(value, place)
        if not self.whole and abs(value) > sys.float_info.max:  # a whole number that no float can hold
            return self._wrong(value, place)
        low = (self.least is not None and value < self.least) or (self.above is not None and value <= self.above)
        return self._wrong(value, place) if low or (self.most is not None and value > self.most) else None


class Whole(Number):
    """A whole number within bounds."""

    whole = True


class Flag(Schema):
    """True or false."""

    expected = "true or false"

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        return None if isinstance(value, bool) else self._wrong(value, place)


@dataclass(frozen=True)
class OneOf(Schema):
    """One of some values."""

    among: Sequence[Any]

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The schema in words, for messages."""
        words = ", ".join(str(one) if isinstance(one, str) else json.dumps(one) for one in self.among)
        return words if len(self.among) == 1 else f"one of {words}"

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        good = any(type(value) is type(one) and value == one for one in self.among)
        return None if good else self._wrong(value, place)


@dataclass(frozen=True)
class ListOf(Schema):
    """A list of values of one kind."""

    item: Schema = field(default_factory=Anything)
    least: int = 0
    most: int | None = None
    """Lengths."""

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The schema in words, for messages."""
        if self.least and self.least == self.most:
            return f"a list of {self.least}"
        return "a list" + (f" of at least {self.least}" if self.least else "")

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        if not isinstance(value, (list, tuple)) or not self.least <= len(value) <= (self.most or len(value)):
            return self._wrong(value, place)
        found = (self.item.problem(one, f"{place}[{i}]") for i, one in enumerate(value))
        return next((problem for problem in found if problem is not None), None)


@dataclass(frozen=True)
class MapOf(Schema):
    """An object with any names, whose values are of one kind."""

    value: Schema = field(default_factory=Anything)
    expected = "an object with named values"

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        if not isinstance(value, Mapping):
            return self._wrong(value, place)
        for name, inner in value.items():
            if not isinstance(name, str):
                return f"{place} has the name {shown(name)}".strip(), "", "names that are text"
            if (problem := self.value.problem(inner, _inside(place, name))) is not None:
                return problem
        return None


@dataclass(frozen=True)
class Record(Schema):
    """An object with these names: `needed` ones, ones that `may` be there, and no others unless `open`."""

    needed: Mapping[str, Schema] = field(default_factory=dict)
    may: Mapping[str, Schema] = field(default_factory=dict)
    open: bool = False
    expected = "an object with named values"

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        if not isinstance(value, Mapping):
            return self._wrong(value, place)
        known = {**self.needed, **self.may}
        if missing := [name for name in self.needed if name not in value]:
            return _inside(place, missing[0]), "not there", known[missing[0]].expected
        for name, inner in value.items():
            if name in known:
                if (problem := known[name].problem(inner, _inside(place, name))) is not None:
                    return problem
            elif not self.open:
                near = difflib.get_close_matches(str(name), known, n=1)
                meant = f"{near[0]}?" if near else f"one of {', '.join(sorted(known))}"
                return _inside(place, str(name)), "not a name that is known here", meant
        return None


@dataclass(frozen=True)
class Maybe(Schema):
    """Of a kind, or nothing."""

    inner: Schema

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The schema in words, for messages."""
        return f"{self.inner.expected}, or null"

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        found = None if value is None else self.inner.problem(value, place)
        return found if found is None or found[0] != place else (*found[:2], self.expected)


@dataclass(frozen=True)
class Either(Schema):
    """Of one of several kinds."""

    kinds: Sequence[Schema]

    @property
    def expected(self) -> str:  # type: ignore[override]
        """The schema in words, for messages."""
        return " or ".join(kind.expected for kind in self.kinds)

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value; of several kinds, the one that came deepest into it says so."""
        found = [kind.problem(value, place) for kind in self.kinds]
        if any(problem is None for problem in found):
            return None
        deepest = max((p for p in found if p is not None), key=lambda p: len(p[0]))
        return deepest if len(deepest[0]) > len(place) else self._wrong(value, place)


def check(value: Any, schema: Schema, source: str | Path, error: type[OutcoreError]) -> Any:
    """The value, if it is what the schema says; raises the error otherwise.

    >>> check({"size": "4"}, Record({"size": Whole(least=1)}), "a.json", OutcoreError)
    Traceback (most recent call last):
    outcore.errors.OutcoreError: a.json: size is '4'; expected a whole number of at least 1
    """
    try:
        problem = schema.problem(value, "")
    except RecursionError:
        raise error(f"{source}: nested deeper than a document of this kind can be") from None
    if problem is not None:
        place, found, expected = problem
        raise error(f"{source}: {place or 'the document'}{f' is {found}' if found else ''}; expected {expected}")
    return value


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, (list, tuple)) and len(repr(value)) > _SHOWN:
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object with {len(value)} names" if value else "an empty object"
    text = "null" if value is None else repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
