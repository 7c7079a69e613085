"""Which dimensions of an input are its pixels.

In torch an image is (batch, channels, pixels...). A model that takes it with channels last, as all Keras models do, or
in any other order, permutes it before the first layer that knows of pixels: a convolution, a pool, a norm over
channels, a resampling. So the input's dimensions are followed through permutations and operations that keep the number
of dimensions, up to the first such layer; those that arrive in its last places are the pixels. An input that reaches
none, or whose samples have moved, is taken to have channels first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from outcore.graph import Graph
from outcore.graph.record.recording import Ref, Step
from outcore.graph.structure import leaves, substitute
from outcore.ops.registry import find

__all__ = ["has_channels_last", "pixel_dims"]

_BY_PIXEL = {
    "convolution", "transposed convolution", "norm with statistics", "average pool", "max pool",
    "adaptive average pool", "adaptive max pool", "unpool", "resampling",
}  # fmt: skip


def pixel_dims(graph: Graph, steps: Iterable[Step], name_of: Callable[[Step], str]) -> dict[str, tuple[int, ...]]:
    """The pixel dimensions of each input, in the order in which layers see them.

    Args:
        graph: of the model.
        steps: of its recording.
        name_of: the operation of a step.
    """
    found: dict[str, tuple[int, ...]] = {}
    ranks = {name: len(graph.values[name].shape) for name in graph.inputs}
    followed = {name: (name, tuple(range(rank))) for name, rank in ranks.items()}
    for step in steps:
        given = [r.name for _, r in leaves((step.args, step.kwargs), Ref) if r.kind == "value" and r.name in followed]
        if not given or step.kind == "guard":
            continue
        kind, (source, dims) = name_of(step), followed[given[0]]
        op = find(kind)
        if op is not None and op.kind in _BY_PIXEL:
            if dims[0] == 0 and len(dims) > 2:
                found.setdefault(source, dims[2:])
            continue
        if op is not None and op.kind == "view":
            dims = tuple(dims[d] for d in _order(step, len(dims)))
        followed |= {name: (source, dims) for name in step.outputs if len(graph.values[name].shape) == len(dims)}
    return {name: found.get(name, tuple(range(2, rank))) for name, rank in ranks.items()}


def _order(step: Step, rank: int) -> list[int]:
    """Where a view takes the dimensions of its operand from: sizes that no other has show it. Of one that is no
    permutation, or takes no other sizes than its own, every dimension stays."""
    numbered = torch.empty([d + 2 for d in range(rank)], device="meta")
    args: Any
    args, kwargs = substitute((step.args, step.kwargs), Ref, lambda _: numbered)
    try:
        found = [n - 2 for n in step.target(*args, **kwargs).shape]
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        found = []
    return found if sorted(found) == list(range(rank)) else list(range(rank))


def has_channels_last(axes: tuple[int | None, ...]) -> bool:
    """Whether a map, by the axes of its dimensions, is (batch, pixels..., channels)."""
    return len(axes) > 2 and axes[1] is not None and axes[-1] is None
