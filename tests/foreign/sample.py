"""A few of many cases, others with every commit: over time all of them run, and each commit can repeat its own."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

__all__ = ["commit", "drawn", "one_in", "quarter", "rotating", "sometimes"]

T = TypeVar("T")


@cache
def commit() -> str:
    """The commit that is checked out, OUTCORE_SAMPLE if it is set; nothing where there is no repository."""
    if told := os.environ.get("OUTCORE_SAMPLE"):
        return told
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def rotating(cases: Sequence[T], count: int) -> list[T]:
    """So many of the cases, drawn by the commit."""
    return random.Random(commit()).sample(list(cases), min(count, len(cases)))


def quarter(cases: Iterable[T]) -> list[T]:
    """A quarter of the cases of a large sweep, by the commit, in their order; all of them with OUTCORE_SWEEPS=all."""
    every = list(cases)
    if os.environ.get("OUTCORE_SWEEPS") == "all":
        return every
    return [every[n] for n in sorted(rotating(range(len(every)), -(-len(every) // 4)))]


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """All cases as parameters of a test: one of every so many in a row, drawn by the commit; the others are slow.

    Of the next row another one: of a product with two values last, half of the cases have the one and half the other.
    """
    first = random.Random(commit()).randrange(count)
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*row, marks=() if (i + i // count + first) % count == 0 else pytest.mark.slow)
        for i, row in enumerate(rows)
    ]


def drawn(name: str, count: int) -> bool:
    """Whether one of so many commits is this one, for a test of that name."""
    return random.Random(commit() + name).randrange(count) == 0


def sometimes(test: Callable[..., None]) -> Callable[..., None]:
    """A test that starts many processes or takes many seconds: quick with one commit in three, slow with the others."""
    return test if drawn(test.__qualname__, 3) else pytest.mark.slow(test)
