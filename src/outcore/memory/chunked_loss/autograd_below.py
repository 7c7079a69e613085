"""Autograd inside of `__torch_dispatch__`.

Who asks for the numbers of a lazy tensor below autograd has switched it off for this thread by excluding its dispatch
keys. To make a gradient there, which takes a backward of its own, they are admitted again for as long as that takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["autograd_below"]

_torch_c: Any = torch._C
_KEYS = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")


@contextlib.contextmanager
def autograd_below() -> Iterator[None]:
    """Let autograd record again."""
    included = _torch_c._dispatch_tls_local_include_set()
    excluded = _torch_c._dispatch_tls_local_exclude_set()
    for key in _KEYS:
        excluded = excluded.remove(getattr(_torch_c.DispatchKey, key))
    with _torch_c._ForceDispatchKeyGuard(included, excluded):
        yield
