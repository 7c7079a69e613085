"""How one weight of a Keras model lies in its twin, and how it goes back.

Keras keeps a convolution's kernel as (height, width, in, out) and a dense layer's as (in, out); torch keeps (out, in,
height, width) and (out, in). Some weights are one array there and two here (a GRU's bias), or have their gates in
another order. Every such change is the same four moves, each of which can be undone: take a row, give the array a
shape, put the entries of one axis in another order, permute the axes, and give it the final shape. A `Carried` weight
names both sides and holds the moves, as plain data, so that a twin can be copied, saved and sent to other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

__all__ = ["Carried", "Weight"]


@dataclass(frozen=True)
class Weight:
    """One weight of a Keras layer and its place in the module that stands for the layer."""

    variable: Any
    name: str
    row: int | None = None
    split: tuple[int, ...] | None = None
    order: tuple[int, tuple[int, ...]] | None = None
    permute: tuple[int, ...] | None = None
    merge: tuple[int, ...] | None = None

    def within(self, prefix: str) -> Weight:
        """The same, where the module is part of another."""
        return replace(self, name=f"{prefix}.{self.name}")

    def carried(self, index: int, prefix: str) -> Carried:
        """The same as plain data, for the variable at a position of ``model.weights``."""
        return Carried(
            index,
            str(self.variable.path),
            tuple(int(n) for n in self.variable.shape),
            prefix + self.name,
            self.row,
            self.split,
            self.order,
            self.permute,
            self.merge,
        )


@dataclass(frozen=True)
class Carried:
    """A weight at position `index` of ``model.weights``, called `path` by Keras and `name` in the twin's state dict."""

    index: int
    path: str
    shape: tuple[int, ...]
    name: str
    row: int | None = None
    split: tuple[int, ...] | None = None
    order: tuple[int, tuple[int, ...]] | None = None
    permute: tuple[int, ...] | None = None
    merge: tuple[int, ...] | None = None

    def to_torch(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """Keras' array as the twin keeps it."""
        if self.row is not None:
            array = array[self.row]
        if self.split is not None:
            array = array.reshape(self.split)
        if self.order is not None:
            array = np.take(array, self.order[1], axis=self.order[0])
        if self.permute is not None:
            array = array.transpose(self.permute)
        if self.merge is not None:
            array = array.reshape(self.merge)
        return torch.from_numpy(np.array(array, order="C"))

    def into_keras(self, tensor: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
        """Write the twin's tensor into an array of Keras' shape."""
        back = tensor.detach().cpu().numpy()
        inner = self.split or (self.shape if self.row is None else self.shape[1:])
        if self.permute is not None:
            back = back.reshape(tuple(inner[axis] for axis in self.permute)).transpose(np.argsort(self.permute))
        back = back.reshape(inner)
        if self.order is not None:
            back = np.take(back, np.argsort(self.order[1]), axis=self.order[0])
        if self.row is None:
            array[...] = back.reshape(self.shape)
        else:
            array[self.row] = back.reshape(self.shape[1:])
