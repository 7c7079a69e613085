"""A few of many cases, others with every change: over time all of them run, and each commit can repeat its own."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

__all__ = ["drawn", "one_in", "quarter", "rotating", "sometimes", "state"]

T = TypeVar("T")


@cache
def state() -> str:
    """A digest of the sources and tests as committed: what else a commit changes, a log or a page, draws no others.

    OUTCORE_SAMPLE=<commit> draws those of another commit, any other word those of the word. Nothing where there is no
    repository.
    """
    told = os.environ.get("OUTCORE_SAMPLE", "")
    command = ["git", "ls-tree", "-r", told or "HEAD", "src", "tests"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    except OSError:
        return told
    files = [line for line in done.stdout.splitlines() if "\ttests/logs/" not in line]
    return hashlib.sha256("\n".join(files).encode()).hexdigest() if files else told


def rotating(cases: Sequence[T], count: int) -> list[T]:
    """So many of the cases, drawn by the commit."""
    return random.Random(state()).sample(list(cases), min(count, len(cases)))


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
    first = random.Random(state()).randrange(count)
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*row, marks=() if (i + i // count + first) % count == 0 else pytest.mark.slow)
        for i, row in enumerate(rows)
    ]


def drawn(name: str, count: int) -> bool:
    """Whether one of so many commits is this one, for a test of that name."""
    return random.Random(state() + name).randrange(count) == 0


def sometimes(test: Callable[..., None]) -> Callable[..., None]:
    """A test that starts many processes or takes many seconds: quick with one commit in three, slow with the others."""
    return test if drawn(test.__qualname__, 3) else pytest.mark.slow(test)
