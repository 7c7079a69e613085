"""One number to differentiate, from whatever a model returns."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def scalar(output: Any) -> Tensor:
    """The sum of the mean squares of every differentiable tensor in an output of any structure.

    Walks tuples, lists, mappings (so also Hugging Face's ModelOutput), dataclasses and plain objects such as
    key-value caches. A tensor that occurs twice counts once.
    """
    parts = [tensor.square().mean() for tensor in differentiable(output)]
    if not parts:
        raise ValueError(f"no differentiable tensor in an output of type {type(output).__name__}")
    return torch.stack([part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]).sum()


def differentiable(output: Any) -> list[Tensor]:
    """The non-empty floating tensors of an output that require grad, in the order of a depth-first walk."""
    return [
        tensor
        for tensor in tensors(output)
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel() > 0
    ]


def tensors(output: Any) -> list[Tensor]:
    """Every tensor of an output once, in the order of a depth-first walk."""
    return list(_tensors(output, set()))


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        seen.add(id(value))
        yield value
        return
    for part in _parts(value):
        seen.add(id(value))
        yield from _tensors(part, seen)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | set):
        return list(value)
    if isinstance(value, type | nn.Module) or callable(value):
        return []
    return list(getattr(value, "__dict__", {}).values())
