"""What the file of a calibration holds: checked before any of it is computed with.

Regressions are arrays that index each other (a tree's nodes, a process's columns), so beside the kinds of their values
their lengths are compared here too; what a schema cannot say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outcore.cost.predicted.roofline import Ceiling
from outcore.documents.schema import Anything, ListOf, MapOf, Maybe, Number, OneOf, Problem, Record, Schema, Text, Whole
from outcore.documents.typed_schema import schema_of


class _Numbers(ListOf):
    """A list of numbers; of a good one, of which a calibration has a million, at the speed of the interpreter."""

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        if isinstance(value, list) and set(map(type, value)) <= {float}:
            return None if all(map(math.isfinite, value)) else super().problem(value, place)
        return super().problem(value, place)


_NUMBERS = _Numbers(Number())


class _Regression(Schema):
    """One of the methods, by its name."""

    expected = "a regression with its method"

    def problem(self, value: Any, place: str) -> Problem | None:
        """What is wrong with a value, if something is."""
        if not isinstance(value, Mapping):
            return self._wrong(value, place)
        method = value.get("method")
        if not isinstance(method, str) or method not in _METHODS:
            return OneOf(tuple(_METHODS)).problem(method, f"{place}.method")
        found = _METHODS[method].problem(value, place)
        return found if found is not None else _lengths(value, place)


def _lengths(value: Mapping[str, Any], place: str) -> Problem | None:
    """Arrays of one regression that must be equally long, and places in them that must exist."""
    together = {"polynomial": ("mean", "scale"), "trees": ("feature", "threshold", "right", "value")}
    together |= {"gaussian": ("columns", "mean", "scale")}
    first, *others = together.get(value["method"], ("method",))
    for name in others:
        if len(value[name]) != len(value[first]):
            return f"{place}.{name}", f"a list of {len(value[name])}", f"{len(value[first])} numbers, as {first} has"
    if value["method"] == "gaussian" and len(value["points"]) != len(value["weights"]):
        return (
            f"{place}.weights",
            f"a list of {len(value['weights'])}",
            f"one for each of {len(value['points'])} points",
        )
    if value["method"] == "gaussian" and any(len(point) != len(value["columns"]) for point in value["points"]):
        return f"{place}.points", "a list with points of other lengths", f"{len(value['columns'])} numbers in each"
    if value["method"] == "trees":
        nodes = len(value["feature"])
        for name in ("roots", "right"):
            if any(not 0 <= node < nodes for node in value[name] if node != -1):
                return f"{place}.{name}", "a list with places that do not exist", f"places of {nodes} nodes"
    return None


_METHODS: dict[str, Schema] = {
    "polynomial": Record({"method": Text(), "mean": _NUMBERS, "scale": _NUMBERS, "coefficients": _NUMBERS}),
    "trees": Record(
        {"method": Text(), "start": Number(), "threshold": _NUMBERS, "value": _NUMBERS}
        | dict.fromkeys(("roots", "feature", "right"), ListOf(Whole(least=-1)))
    ),
    "gaussian": Record(
        {"method": Text(), "centre": Number(), "points": ListOf(_NUMBERS), "columns": ListOf(Number(least=0))}
        | dict.fromkeys(("mean", "scale", "weights"), _NUMBERS)
    ),
    "blend": Record({"method": Text(), "parts": ListOf(_Regression(), least=1)}),
}
_ERRORS = MapOf(Number())


def calibration_schema() -> Record:
    """The document that `Calibration.to_json` makes."""
    model = Record(
        {
            "ceiling": schema_of(Ceiling),
            "method": Text(),
            "regression": Maybe(_Regression()),
            "low": _NUMBERS,
            "high": _NUMBERS,
            "least": Number(),
            "median": Number(),
            "samples": Whole(least=0),
            "errors": _ERRORS,
            "spread": ListOf(Number(), 2, 2),
            "dispatch_s": Number(least=0),
        },
        {"rate": Number(least=0)},
    )
    usage = Record({"regression": _METHODS["gaussian"], "samples": Whole(least=0), "errors": _ERRORS})
    named = {"device": Text(), "dtype": Text(), "about": MapOf(), "base": ListOf(Number(least=0), 4, 4)}
    rest = {"version": Anything(), "features": Anything(), "models": MapOf(model)}
    return Record({**named, **rest}, {"usage": MapOf(usage)})
