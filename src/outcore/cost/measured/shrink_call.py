"""Smaller versions of a call that does not fit on the device.

Half of the batch as long as there is one, then half of the image, again and again: what is left out is the same work on
other numbers, so the time is multiplied by the ratio of sizes. Weights stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from outcore.graph import Graph

__all__ = ["smaller"]

_LEAST = 32
"""Length of an image's side below which a layer no longer works as it does on large ones."""
_TRIED = 3


def smaller(graph: Graph, name: str, need: int, limit: int) -> list[tuple[dict[str, tuple[int, ...]], float]]:
    """Shapes of a call's inputs at which it fits, with the factor for its time; the largest first.

    Args:
        graph: where the call is.
        name: its name.
        need: bytes it takes, without weights.
        limit: bytes it may take.
    """
    values = [graph.values[v] for v in graph.calls[name].inputs]
    largest = max((v for v in values if len(v.shape) > 1), key=lambda v: v.bytes, default=None)
    if largest is None:
        return []
    shape, scale, found = list(largest.shape), 1.0, []
    movable = [0] if shape[0] > 1 else []
    movable += range(2, len(shape)) if len(shape) > 2 else []
    for _ in range(40):
        dim = max(movable, key=lambda d: (d == 0 and shape[0] > 1, shape[d]), default=None)
        if dim is None or shape[dim] < (2 if dim == 0 else _LEAST):
            break
        half = shape[dim] // 2
        scale, shape[dim] = scale * shape[dim] / half, half
        if need / scale <= limit:
            changed = {d: n for d, n in enumerate(shape) if n != largest.shape[d]}
            found.append(({v.name: _resized(v.shape, largest.shape, changed) for v in values}, scale))
            if len(found) == _TRIED:
                break
    return found


def _resized(shape: tuple[int, ...], model: tuple[int, ...], changed: Mapping[int, int]) -> tuple[int, ...]:
    """A shape with the same changes as the largest one, where it agrees with it."""
    if len(shape) != len(model):
        return shape
    return tuple(changed[d] if d in changed and n == model[d] else n for d, n in enumerate(shape))
