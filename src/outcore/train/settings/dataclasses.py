"""Nested dataclasses from text: every name known, every value of its type, or an error that says what would be valid.

It is used by `outcore.train.settings.config` and knows nothing of training.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

import yaml

from outcore.errors import ConfigError, suggest

__all__ = ["copied", "flatten", "make", "override", "plain"]


def make(kind: Any, given: Any, where: str) -> Any:
    """A dataclass from a mapping, its fields checked one by one."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} is {given!r}; it holds settings, like  {where}: {{{_names(kind)[0]}: …}}")
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in given.items():
        dotted = f"{where}.{name}".strip(".")
        if name not in hints:
            meant = suggest(str(name), _names(kind), prefix=f"{where}." if where else "")
            raise ConfigError(f"no setting {dotted}; {meant}")
        if dataclasses.is_dataclass(hints[name]):
            values[name] = make(hints[name], {} if value is None else value, dotted)
        else:
            values[name] = _checked(hints[name], value, dotted)
    return kind(**values)


def _checked(hint: Any, value: Any, name: str) -> Any:
    """A value as the type of its setting; raises where it does not fit."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType or origin is typing.Union:
        if value is None and type(None) in inner:
            return None
        for option in (o for o in inner if o is not type(None)):
            try:
                return _checked(option, value, name)
            except ConfigError:
                continue
    elif origin is Literal:
        if value in inner:
            return value
    elif origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_checked(inner[0], item, name) for item in items)
    elif hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:  # YAML takes 1e-3 for a word
            return float(value)
        except ValueError:
            pass
    elif hint is str and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    elif origin is not None and isinstance(value, Mapping):
        return dict(value)
    elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{name}={value!r} was given; it must be {_described(hint)}")


def _described(hint: Any) -> str:
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, inner))
    if inner and typing.get_origin(hint) is not tuple and not issubclass(typing.get_origin(hint) or int, Mapping):
        return " or ".join("nothing" if i is type(None) else _described(i) for i in inner)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    return names.get(hint, "a list" if typing.get_origin(hint) is tuple else "named values")


def override(settings: dict[str, Any], word: str) -> None:
    """Put ``section.name=value`` into nested settings; the value is read as YAML."""
    name, equals, text = word.partition("=")
    if not equals or not name:
        raise ConfigError(f"{word!r} is not a setting; write for example plan.memory=20GiB")
    *path, last = name.split(".")
    inside = settings
    for part in path:
        if not isinstance(inside.get(part), dict):
            inside[part] = {}
        inside = inside[part]
    try:
        inside[last] = yaml.safe_load(text) if text else None
    except (yaml.YAMLError, ValueError):  # a date of month 13 is a ValueError
        inside[last] = text


def plain(value: Any) -> Any:
    """Dataclasses as dictionaries, tuples as lists: what YAML and JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def flatten(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            flat |= flatten(inner, f"{above}{name}.")
        else:
            flat[above + name] = inner
    return flat


def copied(value: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings as dictionaries of one's own."""
    return {k: copied(v) if isinstance(v, Mapping) else v for k, v in value.items()}


def _names(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)]
