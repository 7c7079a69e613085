"""Element-wise operations, and those that only rearrange.

Functions of one tensor, element by element, take the stacked tensor as it is. Functions of several broadcast; members
come first, so a value of fewer dimensions gets ones after the member dimension. In-place forms become out-of-place
ones: the recording was checked to have no other reader of the memory they write (`outcore.fusion.program.aliasing`),
and writing into a view of a stacked tensor would make autograd copy all of it. ``view`` becomes ``reshape``, since a
member's slice may have another layout than the member's own tensor would.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from outcore.fusion.program.call import FusedCall
from outcore.fusion.program.values import Stacked, fold_channels, unfold_channels


def unary(call: FusedCall) -> Any:
    """One tensor, element by element."""
    x = call.args[0] if call.args else call.kwargs.get("input")
    rest = (*call.args[1:], *(v for k, v in call.kwargs.items() if k != "input"))
    if not isinstance(x, Stacked) or any(isinstance(v, Stacked | torch.Tensor) for v in rest):
        return NotImplemented
    call.note("fused")
    args = (x.tensor, *call.args[1:]) if call.args else ()
    kwargs = {k: x.tensor if k == "input" else v for k, v in call.kwargs.items()}
    return Stacked(call.target(*args, **kwargs))


def binary(call: FusedCall) -> Any:
    """Several tensors, broadcast, element by element."""
    if call.kwargs and any(isinstance(v, Stacked | torch.Tensor) for v in call.kwargs.values()):
        return NotImplemented
    given = [a for a in call.args if isinstance(a, Stacked | torch.Tensor)]
    kinds = {a.tensor.dtype if isinstance(a, Stacked) else a.dtype for a in given} - {torch.bool}
    if len(call.args) < 2 or len(kinds) > 1:  # a scalar per member does not decide the dtype; stacked it would
        return NotImplemented
    rank = max(a.rank if isinstance(a, Stacked) else a.dim() for a in given)
    call.note("fused")
    return Stacked(call.target(*(_aligned(a, rank) for a in call.args), **call.kwargs))


def _aligned(value: Any, rank: int) -> Any:
    if not isinstance(value, Stacked) or value.rank == rank:
        return value.tensor if isinstance(value, Stacked) else value
    tensor = value.tensor
    return tensor.reshape(tensor.shape[0], *[1] * (rank - value.rank), *tensor.shape[1:])


def reshape(call: FusedCall) -> Any:
    """``view``, ``reshape`` and the like, with the members in front."""
    x, *rest = call.args
    sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list | torch.Size) else tuple(rest)
    if not isinstance(x, Stacked) or call.kwargs or not all(type(n) is int for n in sizes):
        return NotImplemented
    count = math.prod(x.tensor.shape[1:])
    known = math.prod(n for n in sizes if n != -1)
    call.note("fused")
    return Stacked(x.tensor.reshape(x.members, *(count // max(1, known) if n == -1 else n for n in sizes)))


def contiguous(call: FusedCall) -> Any:
    """The value as it is: its layout is ours to choose, unless another call writes into it."""
    x = call.args[0]
    if not isinstance(x, Stacked) or call.outputs[0] in call.written:
        return NotImplemented
    call.note("fused")
    return x


def per_channel(call: FusedCall, dims: int) -> Any:
    """Run what treats each channel of each sample independently (pooling, resizing) on the channels of all members at
    once."""
    x = call.args[0] if call.args else call.kwargs.get("input")
    if not isinstance(x, Stacked) or x.rank != dims + 2:
        return NotImplemented
    given = {k: v for k, v in call.kwargs.items() if k != "input"}
    if any(isinstance(v, Stacked) for v in (*call.args[1:], *given.values())):
        return NotImplemented
    call.note("fused")
    if call.modules:
        if not call.alike():
            return NotImplemented
        result = call.module.forward(fold_channels(x))
    else:
        result = call.target(fold_channels(x), *call.args[1:], **given)
    if isinstance(result, torch.Tensor):
        return unfold_channels(result, x.members)
    return tuple(unfold_channels(part, x.members) for part in result)
