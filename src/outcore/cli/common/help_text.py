"""Help that is read by people who never saw a type annotation.

Left to itself typer shows ``--batch <int range>``, ``<list[str]>`` and ``{JOB}``, and breaks paragraphs where the
source does. Here an option has a word for what is typed (N, X, TEXT, PATH), an argument its name and nothing else, and
paragraphs are broken by the terminal while examples keep their lines.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

__all__ = ["flowing", "plain_usage", "word_for", "worded"]

_WORDS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def worded(params: Iterable[Any], function: Callable[..., Any] | None = None) -> Any:
    """The parameters of a command, each with a word for its values: flags with none."""
    hints = get_type_hints(function) if function is not None else {}
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":
            param.display_type_rich = _nothing  # its name says it
        elif param.metavar is None:
            param.metavar = word_for(hints.get(param.name))
    return params


def _nothing(ctx: Any) -> None:
    """No type beside the name."""


def word_for(hint: Any) -> str | None:
    """What stands for the value of an option of a type: ``int | None`` is N."""
    kinds = {hint, *get_args(hint), *(inner for outer in get_args(hint) for inner in get_args(outer))}
    return next((word for kind, word in _WORDS.items() if kind in kinds), None)


def plain_usage(pieces: list[str]) -> list[str]:
    """A line of usage in which what must be given is bare: JOB, not {JOB}."""
    return [piece[1:-1] if piece.startswith("{") and piece.endswith("}") else piece for piece in pieces]


def flowing(text: str) -> str:
    """Help whose paragraphs are broken by the terminal, not where the source is; examples keep their lines, all of them
    at the margin, where rich puts the first in any case."""
    lines = inspect.cleandoc(text).split("\n")
    made = lines[:1]
    for before, line in pairwise(lines):
        example = [bool(re.match(r" {4}|outcore ", either)) for either in (before, line)]
        if before and line and not any(example):
            made[-1] += f" {line}"
        else:
            made.append(line.strip())
    return "\n".join(made)
