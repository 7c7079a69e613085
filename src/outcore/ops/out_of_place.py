"""The form of a function that writes a new tensor instead of its argument.

torch names in-place forms by a rule: ``relu_`` is ``relu``, ``Tensor.__iadd__`` is ``Tensor.__add__``. A few live in a
hidden module (``torch._C._nn.silu_``); these have their other form in ``torch.nn.functional``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["out_of_place"]

_OWNERS: tuple[Any, ...] = (torch.Tensor, torch, F)


def out_of_place(function: Any) -> Any:
    """The same function without writing into its argument, where torch has it; else the function itself.

    >>> out_of_place(torch.relu_) is torch.relu, out_of_place(torch.Tensor.add_) is torch.Tensor.add
    (True, True)
    """
    name = getattr(function, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return getattr(torch.Tensor, f"__{name[3:]}", function)
    if not name.endswith("_") or name.endswith("__"):
        return function
    plain = name.removesuffix("_")
    owner = next((o for o in _OWNERS if getattr(o, name, None) is function), None)
    found = getattr(owner, plain, None) if owner is not None else getattr(F, plain, None)
    if found is None and owner is F:
        found = getattr(torch, plain, None)
    return found or function
