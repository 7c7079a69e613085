"""When a recording may be used again.

While recording, Python sees shapes, dtypes, devices, flags and plain arguments, and may act on any of them. A recording
is therefore stored under a key of all of it, and only replayed under the same key.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from outcore.graph.record.recording import Context
from outcore.graph.structure import leaves, substitute


def key_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None = None
) -> Hashable:
    """A key of everything Python could have read, except the data in tensors.

    Args:
        model: the model.
        args: of the call.
        kwargs: of the call.
        device: where the model computes, if its parameters are offloaded in between.
    """
    flags: list[tuple[int, bool]] = []
    frozen: list[bool] = []
    hooks: list[Hashable] = []
    for module in model.modules():  # once: a walk over a large model takes as long as many of its calls
        flags.append((id(module), module.training))
        frozen += [p.requires_grad for p in module._parameters.values() if p is not None]
        if module._modules and module is not model and (found := hooks_of(module)):
            hooks.append((id(module), found))
    if device is None:
        first = next(itertools.chain(model.parameters(), model.buffers()), None)
        device = first.device if first is not None else None
    devices = {"cpu", device.type if device is not None else "cpu"} - {"meta"}
    return (
        _signature((args, kwargs)),
        tuple(flags),
        tuple(frozen),
        tuple(hooks),
        str(device) if device is not None else "",
        Context.current(sorted(devices)),
    )


def hooks_of(module: nn.Module, *, backward: bool = True) -> tuple[int, ...]:
    """The user's hooks on a module: not ours, which fetch its parameters."""
    kinds = [module._forward_pre_hooks, module._forward_hooks]
    kinds += [module._backward_pre_hooks, module._backward_hooks] if backward else []
    ours = "outcore."
    return tuple(
        k for kind in kinds for k, hook in kind.items() if not getattr(hook, "__module__", "").startswith(ours)
    )


def _signature(tree: Any) -> Hashable:
    tensors = [(path, _tensor(t)) for path, t in leaves(tree, torch.Tensor)]
    rest = substitute(tree, torch.Tensor, lambda _: "tensor")
    return tuple(tensors), repr(rest)


def _tensor(tensor: torch.Tensor) -> Hashable:
    stride = tuple(tensor.stride()) if tensor.layout is torch.strided else None
    return tuple(tensor.shape), stride, tensor.dtype, str(tensor.device), tensor.requires_grad
