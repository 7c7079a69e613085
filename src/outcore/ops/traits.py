"""Traits of operations: which only rearrange, share memory, do no work, draw random numbers, or are cast by autocast.

Three questions are asked of one that rearranges. Does the network compute anything with it? `REARRANGES` says no:
versions of torch and of a model's code differ in how often they reshape, so fingerprints of graphs leave these out.
Does it take time? `FREE`, which contains them, says no: it moves no data worth counting. May its result be the memory
that it was given? `SHARES_MEMORY` says yes.

`AUTOCAST` is what autocast does with an operation on a GPU: torch's lists for CUDA (those for a CPU differ). Matrix
work is done in the small type, so its operands are cast down; norms, softmax, losses and some functions are computed in
float32, so their inputs are cast up. Everything else takes what it is given.

`out_of_place` is the form of a function that writes a new tensor instead of its argument. torch names in-place forms by
a rule: ``relu_`` is ``relu``, ``Tensor.__iadd__`` is ``Tensor.__add__``. A few live in a
hidden module (``torch._C._nn.silu_``); these have their other form in ``torch.nn.functional``.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from outcore.ops.registry import Facet, kinds

REARRANGES: Facet[bool] = Facet(
    "rearranges", "has the elements of its input, in another shape or order, or some of them"
)
REARRANGES.add(
    True,
    *"T mT view reshape contiguous transpose permute swapaxes squeeze unsqueeze flatten".split(),
    *"unflatten expand getitem".split(),
)

FREE: Facet[bool] = Facet("free", "moves no data worth counting")
FREE.add(
    True,
    *kinds("view", "detaching", "identity"),
    *"contiguous to type_as size tensor arange zeros ones empty full zeros_like new_zeros".split(),
)

SHARES_MEMORY: Facet[bool] = Facet("shares memory", "may return the memory it is given")
SHARES_MEMORY.add(True, *kinds("view", "cast", "detaching"), "contiguous", "unfold", "positive")

REARRANGING = REARRANGES.where()
"""Names of operations whose result has the elements of their input."""
WITHOUT_WORK = FREE.where()
"""Names of operations that move no data worth counting (a `contiguous` or `reshape` that does copy is counted as a
copy)."""
SHARING = SHARES_MEMORY.where()
"""Names of operations that may return the memory they are given."""


DRAWS: Facet[bool] = Facet("random", "draws random numbers")
DRAWS.add(True, *kinds("random", "dropout", "alpha dropout", "random activation", "random pool"))
RANDOM = DRAWS.where()
"""Names of operations that draw random numbers."""


AUTOCAST: Facet[Literal["down", "up"]] = Facet("autocast", "the direction in which autocast casts its operands")
AUTOCAST.add("down", *kinds("convolution", "transposed convolution"), "linear", "transposed_linear")
AUTOCAST.add("down", "matmul", "bmm", "baddbmm", "mm", "scaled_dot_product_attention")
AUTOCAST.add("up", "layer_norm", "group_norm", "rms_norm", "softmax", "log_softmax", "softplus")
AUTOCAST.add("up", "cross_entropy", "nll_loss", "mse_loss", "l1_loss")
AUTOCAST.add("up", "pow", "exp", "log", "sum", "prod", "norm", "cumsum")


def _cast(wanted: str) -> frozenset[str]:
    """Names under which they are recorded, but for in-place forms, which write the type they are given."""
    return frozenset(type_ for type_ in AUTOCAST.where(lambda way: way == wanted) if not type_.endswith("_"))


CAST_DOWN = _cast("down")
"""Names of operations whose operands are cast to the small type."""
CAST_UP = _cast("up")
"""Names of operations that are computed in float32."""


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
