"""What a sweep varies: settings and their values, as one types them.

    lr=1e-4,3e-4,1e-3      these values
    lr=1e-5:1e-1:log       anything between, evenly in the logarithm
    width=16:64            whole numbers between
    dropout=0.0:0.5        anything between

Where a setting goes follows from its name: an argument of the job's ``model()``, an argument of its ``optimizer()``,
an entry of the optimizer's parameter groups (``lr``, ``weight_decay``, ``momentum``, …; ``wd``, ``beta1`` and
``beta2`` are understood), or ``batch`` and ``seed``.
"""

from __future__ import annotations

import ast
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outcore.errors import FuseError

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SearchDimension:
    """One thing that varies: a list of values, or a range."""

    name: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @property
    def is_range(self) -> bool:
        """Whether it is a range, which a grid cannot cover."""
        return not self.values

    @classmethod
    def parse(cls, text: str) -> SearchDimension:
        """Read one ``--set``."""
        name, equals, right = text.partition("=")
        if not equals or not name.strip().isidentifier() or not right.strip():
            raise FuseError(f"--set {text!r} must be name=values, for example --set lr=1e-4,3e-4 or lr=1e-5:1e-1:log")
        name, parts = name.strip(), right.split(":")
        if len(parts) == 1:
            return cls(name, tuple(_literal(v) for v in _split(right)))
        low, high = (_literal(p) for p in parts[:2])
        if len(parts) > 3 or (len(parts) == 3 and parts[2] != "log") or not _numbers(low, high) or low >= high:
            raise FuseError(
                f"--set {text!r} is no range; write low:high or low:high:log, for example {name}=1e-5:1e-1:log"
            )
        log = len(parts) == 3
        if log and low <= 0:
            raise FuseError(f"--set {text!r}: a logarithmic range must begin above 0, not at {low}")
        return cls(name, (), float(low), float(high), log, isinstance(low, int) and isinstance(high, int))

    def draw(self, generator: random.Random) -> Any:
        """A value at random."""
        if self.values:
            return generator.choice(self.values)
        if self.whole:
            return generator.randint(int(self.low), int(self.high))
        if self.log:
            return math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return generator.uniform(self.low, self.high)


def parse_settings(texts: Sequence[str]) -> list[SearchDimension]:
    """Read all of them; each name once."""
    found = [SearchDimension.parse(text) for text in texts]
    names = [s.name for s in found]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise FuseError(f"--set {twice} is given twice; write its values once, with commas")
    if not found:
        raise FuseError("a sweep needs something to vary: --set lr=1e-4,3e-4,1e-3")
    return found


def grid(settings: Sequence[SearchDimension]) -> list[Settings]:
    """Every combination."""
    if open_ended := next((s.name for s in settings if s.is_range), None):
        raise FuseError(f"{open_ended} is a range; say how many to try: --trials 32 [--search tpe]")
    names = [s.name for s in settings]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(s.values for s in settings))]


def _split(text: str) -> list[str]:
    """Commas between values, but not inside brackets."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [p.strip() for p in parts if p.strip()]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _numbers(*values: Any) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
