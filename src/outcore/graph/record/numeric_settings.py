"""Settings of the process that decide which numbers an operation gives, as they were when a call ran.

A forward may set them for some of its lines alone (``with torch.backends.mkldnn.flags(enabled=False):``, full precision
for one product of matrices, another default dtype), and they are put back before backward runs those calls again: with
the settings of backward, the same call gives other bits, or another dtype. A recording that is run again has to
set them as the forward did, where they are not those around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

_torch_c: Any = torch._C
Setting = tuple[Callable[[], Any], Callable[[Any], None]]
"""How it is read, and how it is written."""


@cache
def _settings() -> tuple[Setting, ...]:
    """The settings that matter to the devices that are here."""
    found: list[Setting] = [
        (torch.get_default_dtype, torch.set_default_dtype),
        (_torch_c._get_mkldnn_enabled, _torch_c._set_mkldnn_enabled),
    ]
    if torch.cuda.is_available():
        found += [
            (_torch_c._get_cudnn_enabled, _torch_c._set_cudnn_enabled),
            (_torch_c._get_cudnn_deterministic, _torch_c._set_cudnn_deterministic),
            _precision(torch.backends.cuda.matmul),
            _precision(torch.backends.cudnn.conv),  # type: ignore[attr-defined]
        ]
    return tuple(found)


def _precision(backend: Any) -> Setting:
    """In which precision operations on float32 are computed (TF32 or not)."""
    return lambda: backend.fp32_precision, lambda value: setattr(backend, "fp32_precision", value)


@cache
def _readers() -> tuple[Callable[[], Any], ...]:
    return tuple(read for read, _ in _settings())


def numeric_settings() -> tuple[Any, ...]:
    """The settings in force here and now."""
    return tuple([read() for read in _readers()])


def changed_settings(since: tuple[Any, ...]) -> tuple[tuple[int, Any], ...]:
    """The settings that are others than they were: which, and what they are now."""
    now = numeric_settings()
    return tuple((i, new) for i, (new, old) in enumerate(zip(now, since, strict=True)) if new != old)


def with_changes(changes: Iterable[tuple[int, Any]]) -> tuple[Any, ...]:
    """The settings here and now, but for some."""
    values = list(numeric_settings())
    for i, value in changes:
        values[i] = value
    return tuple(values)


@contextlib.contextmanager
def under_settings(values: tuple[Any, ...]) -> Iterator[None]:
    """A context with these settings in force."""
    now = numeric_settings()
    rows = zip(_settings(), values, now, strict=True)
    changed = [(write, value, old) for (_, write), value, old in rows if value != old]
    try:
        for write, value, _ in changed:
            write(value)
        yield
    finally:
        for write, _, old in changed:
            write(old)
