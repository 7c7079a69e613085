"""What may end a chain of row operations: sums over all rows, and a few numbers of every row.

A sum is added up chunk by chunk. Its gradient with respect to the rows is the incoming gradient, one number, times
something that is known when the chunk is made; so gradients are made in forward, in the same chunk, and backward
multiplies them. Numbers per row have a gradient each, which is known in backward alone: the chunk is made again there.

Means are sums over a divisor that does not depend on the rows: the number of elements, of targets that are not ignored,
or the weights of their classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from outcore.memory.chunked_loss.row_ops import AutocastState, RowLayout

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RowReduction:
    """One reduction of a lazy tensor."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """As it was called, without the tensor, which comes first."""
    on_chunk: Callable[..., torch.Tensor]
    """A chunk and its rows of `beside` -> numbers that are summed, or the numbers of its rows."""
    autocast: AutocastState
    beside: tuple[torch.Tensor, ...] = ()
    """Other tensors, a row each."""
    divisor: torch.Tensor | float | None = None
    """Of a sum."""
    sums: bool = True
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The numbers of all rows, in the shape of the result."""
    flatten: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The other way round."""
    differentiable: bool = True

    def of_chunk(self, chunk: torch.Tensor, at: slice) -> torch.Tensor:
        """The numbers of a chunk: those that are summed, or those of its rows."""
        with self.autocast.restored():
            return self.on_chunk(chunk, *(t[at] for t in self.beside))

    def factor(self, like: torch.Tensor) -> torch.Tensor:
        """What gradients of a sum are multiplied with; nothing where nothing is counted, as in plain PyTorch."""
        if self.divisor is None:
            return torch.ones_like(like)
        divisor = torch.as_tensor(self.divisor, dtype=like.dtype, device=like.device)
        return torch.where(divisor == 0, torch.zeros_like(divisor), 1 / divisor)

    def as_called(self, tensor: torch.Tensor) -> Any:
        """Do it to the whole tensor, as the user did."""
        with self.autocast.restored():
            return self.func(tensor, *self.args, **self.kwargs)


def reduction(
    name: str,
    func: Callable[..., Any],
    tensor: torch.Tensor,
    layout: RowLayout,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> RowReduction | None:
    """What a call makes of a lazy tensor, if that is a reduction of its rows."""
    others = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    if any(t.requires_grad for t in others) or any(t.device != tensor.device for t in others):
        return None
    if type(tensor) in [type(t) for t in others] or tensor.dim() < 2 or not tensor.numel():
        return None
    make = _MAKERS.get(name)
    return make(name, func, tensor, layout, args, kwargs) if make is not None else None


def _bound(
    func: Callable[..., Any], tensor: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a function of torch.nn.functional by name."""
    try:
        call = inspect.signature(func).bind(tensor, *args, **kwargs)
    except (TypeError, ValueError):
        return None
    call.apply_defaults()
    return call.arguments


def _classes(
    name: str, func: Callable[..., Any], tensor: torch.Tensor, layout: RowLayout, args: tuple[Any, ...], kwargs: Any
) -> RowReduction | None:
    """Cross entropy and negative log likelihood."""
    given = _bound(func, tensor, args, kwargs)
    if given is None or given["size_average"] is not None or given["reduce"] is not None:
        return None
    target, weight, how = given["target"], given["weight"], given["reduction"]
    if layout.dim != 1 or not isinstance(target, torch.Tensor) or how not in ("mean", "sum", "none"):
        return None
    if (by_index := not target.is_floating_point()) != (tuple(target.shape) == layout.leading):
        return None
    rest: dict[str, Any] = {"weight": weight, "reduction": "none"}
    if name == "cross_entropy":
        rest["label_smoothing"] = given["label_smoothing"]
    if by_index:
        rest["ignore_index"] = given["ignore_index"]
        rows = target.reshape(-1)
    elif name != "cross_entropy" or target.shape != tensor.shape:
        return None
    else:
        rows = layout.columns_last(target)
    loss: Any = getattr(F, name)

    def on_chunk(chunk: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = loss(chunk, wanted, **rest)
        return made

    divisor: torch.Tensor | float | None = None
    if how == "mean" and not by_index:
        divisor = float(layout.count)
    elif how == "mean":
        counted = rows != given["ignore_index"]
        if weight is None:
            divisor = counted.sum()
        else:
            of = weight[torch.where(counted, rows, 0)]
            divisor = torch.where(counted, of, 0).sum(dtype=torch.float32 if of.dtype in _HALF else of.dtype)
    return RowReduction(
        func,
        args,
        kwargs,
        on_chunk,
        AutocastState.of(tensor.device),
        (rows,),
        divisor,
        sums=how != "none",
        arrange=lambda flat: flat.view(layout.leading),
        flatten=lambda grad: grad.reshape(-1),
    )


def _elements(
    name: str, func: Callable[..., Any], tensor: torch.Tensor, layout: RowLayout, args: tuple[Any, ...], kwargs: Any
) -> RowReduction | None:
    """Losses of every element beside its target."""
    given = _bound(func, tensor, args, kwargs)
    if given is None or any(given.get(k) is not None for k in ("size_average", "reduce", "weight", "pos_weight")):
        return None
    target, how = given["target"], given["reduction"]
    if not isinstance(target, torch.Tensor) or target.shape != tensor.shape or how not in ("mean", "sum", "batchmean"):
        return None
    if how == "batchmean" and name != "kl_div":
        return None
    rest = {key: given[key] for key in ("beta", "delta", "log_target") if key in given}
    loss: Any = getattr(F, name)

    def on_chunk(chunk: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = loss(chunk, wanted, reduction="none", **rest)
        return made

    divisor = {"mean": float(tensor.numel()), "sum": None, "batchmean": float(tensor.shape[0])}[how]
    rows = layout.columns_last(target)
    return RowReduction(func, args, kwargs, on_chunk, AutocastState.of(tensor.device), (rows,), divisor)


def _total(
    name: str, func: Callable[..., Any], tensor: torch.Tensor, layout: RowLayout, args: tuple[Any, ...], kwargs: Any
) -> RowReduction | None:
    """The sum or mean of everything."""
    if args or set(kwargs) - {"dtype"}:
        return None
    to = kwargs.get("dtype")
    if to is not None and not to.is_floating_point:
        return None

    def on_chunk(chunk: torch.Tensor) -> torch.Tensor:
        return chunk.to(to) if to is not None else chunk

    divisor = float(tensor.numel()) if name == "mean" else None
    return RowReduction(func, args, kwargs, on_chunk, AutocastState.of(tensor.device), (), divisor)


def _per_row(
    name: str, func: Callable[..., Any], tensor: torch.Tensor, layout: RowLayout, args: tuple[Any, ...], kwargs: Any
) -> RowReduction | None:
    """A few numbers of every row."""
    given = dict(zip(("dim", "index" if name == "gather" else "keepdim"), args, strict=False)) | kwargs
    dim = given.get("dim")
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if len(args) > 2 or set(given) - {"dim", "keepdim", "index"} or not isinstance(dim, int):
        return None
    if dim % tensor.dim() != layout.dim:
        return None
    keep = bool(given.get("keepdim", False))
    beside: tuple[torch.Tensor, ...] = ()
    call: Any = getattr(torch, name)
    if name == "gather":
        index = given["index"]
        whole = [s for d, s in enumerate(index.shape) if d != layout.dim] == list(layout.leading)
        if not whole or index.dim() != tensor.dim() or not index.shape[layout.dim]:
            return None
        beside, keep = (layout.columns_last(index),), True

    def on_chunk(chunk: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = call(chunk, -1, *rows)
        return made

    def arrange(flat: torch.Tensor) -> torch.Tensor:
        if flat.dim() == 1:
            flat = flat.unsqueeze(-1)
        made = flat.view(*layout.leading, flat.shape[-1]).movedim(-1, layout.dim)
        return made if keep else made.squeeze(layout.dim)

    def flatten(grad: torch.Tensor) -> torch.Tensor:
        rows = layout.columns_last(grad if keep else grad.unsqueeze(layout.dim))
        return rows if name == "gather" else rows.squeeze(-1)

    return RowReduction(
        func,
        args,
        kwargs,
        on_chunk,
        AutocastState.of(tensor.device),
        beside,
        sums=False,
        arrange=arrange,
        flatten=flatten,
        differentiable=not name.startswith("arg"),
    )


_MAKERS: dict[str, Callable[..., RowReduction | None]] = {
    "cross_entropy": _classes,
    "nll_loss": _classes,
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"), _elements),
    "binary_cross_entropy_with_logits": _elements,
    **dict.fromkeys(("sum", "mean"), _total),
    **dict.fromkeys(("argmax", "argmin", "logsumexp", "amax", "amin", "gather"), _per_row),
}
