"""Help that is read by people who never saw a type annotation.

Left to itself typer shows ``--batch <int range>``, ``<list[str]>`` and ``{JOB}``, and breaks paragraphs where the
source does. Here an option has a word for what is typed (N, X, TEXT, PATH), an argument its name and nothing else, and
paragraphs are broken by the terminal while examples keep their lines. A value that is no such thing is answered in the
same words. On a terminal too narrow for tables, which would cut the names of options, options are a list.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

__all__ = ["fitting", "flowing", "needed", "plain_usage", "word_for", "worded"]

_WORDS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_NAMES = {"N": "a whole number", "X": "a number"}
_TABLE_COLUMNS = 80
"""What the widest table of options needs without cutting a name."""


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
        if (wanted := needed(word_for(hints.get(param.name)), getattr(param, "type_descriptor", None))) is not None:
            param.process_value = partial(_converted, param, wanted)
    return params


def fitting(command: Any, formatter: Any) -> Any:
    """What formats the help of a command; on a terminal on which tables would be cut, without tables."""
    columns = shutil.get_terminal_size().columns
    if columns < _TABLE_COLUMNS:
        command.rich_markup_mode, formatter.width = None, columns
    return formatter


def needed(word: str | None, described: Any) -> str | None:
    """What the value of a numeric option must be, in words; None for other options.

    >>> from types import SimpleNamespace as Is
    >>> needed("N", Is(parameter_info=Is(min=1, max=None)))
    'a whole number of at least 1'
    """
    if word not in _NAMES or described is None:
        return None
    low, high = described.parameter_info.min, described.parameter_info.max
    if low is not None and high is not None:
        return f"{_NAMES[word]} from {low} to {high}"
    bound = f" of at least {low}" if low is not None else f" of at most {high}" if high is not None else ""
    return _NAMES[word] + bound


def _converted(param: Any, wanted: str, ctx: Any, value: Any) -> Any:
    """The value of an option, or what was given and what was needed."""
    try:
        return type(param).process_value(param, ctx, value)
    except typer.BadParameter as error:
        if value is not None:
            error.message = f"{value} was given; it must be {wanted}"
        raise


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
