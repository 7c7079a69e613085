"""A Keras model as a torch module.

A `Twin` holds one module per Keras layer, under the layer's name, and a list of steps that says which module is called
with which values. It takes and returns values as the Keras model does, channels last; inside, a value that a
convolution works on lies with channels first, and the steps say where it is permuted. A permuted view of an image whose
channels are last in memory is what torch calls channels-last memory, so nothing is copied.

Values are dropped after their last use. Steps, slots and the record of carried weights are plain data: a twin can be
copied, pickled, recorded, split over ranks and streamed like any other module, and it does not import Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outcore.errors import ModelError
from outcore.keras.carried import Carried

__all__ = ["Constant", "Slot", "Step", "Twin", "with_channels_first"]


@dataclass(frozen=True)
class Slot:
    """A value, by its number."""

    number: int


@dataclass(frozen=True)
class Constant:
    """A tensor that is no value of the graph: a buffer or a parameter of the twin, by its name."""

    name: str


@dataclass(frozen=True)
class Step:
    """One call of a module; without one, a permutation."""

    module: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    drop: tuple[int, ...] = ()
    """Values that nothing needs afterwards."""
    to_first: bool = False
    """For a permutation: to channels first, or else to channels last."""


def substitute(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A structure of lists, tuples and dicts with every other thing in it changed."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([substitute(item, change) for item in tree])
    if isinstance(tree, dict):
        return {key: substitute(item, change) for key, item in tree.items()}
    return change(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """What is in a structure; the entries of a dict by their keys, as Keras orders them."""
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    elif isinstance(tree, dict):
        for key in sorted(tree):
            yield from leaves(tree[key])
    else:
        yield tree


class Fixed(nn.Module):
    """A module that stays in one mode, because the Keras model calls it with ``training=`` given."""

    def __init__(self, inner: nn.Module, mode: bool) -> None:
        super().__init__()
        self.inner, self.mode = inner, mode
        self.train(mode)

    def train(self, mode: bool = True) -> Fixed:
        """Keep the mode."""
        super().train(self.mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.inner(*args, **kwargs)


class Twin(nn.Module):
    """A Keras model carried over to torch; made by `to_torch`."""

    carried: tuple[Carried, ...] = ()
    """Every weight, in Keras and here."""
    config: str | None = None
    """The Keras model's configuration as JSON, where it has one."""
    channels_first = False
    """Whether images come and go as (batch, channels, pixels...), as torch and files of slides have them."""

    def __init__(self, inputs: dict[str, tuple[int, str]], single: bool) -> None:
        super().__init__()
        self.inputs, self.single = inputs, single
        self.steps: list[Step] = []
        self.result: Any = None

    def forward(self, *given: Any, **named: torch.Tensor) -> Any:
        """Inputs as Keras takes them: one by one, as a list, or by name; outputs as Keras gives them."""
        values: dict[int, torch.Tensor] = dict(self._arrived(given, named))

        def value(item: Any) -> Any:
            if isinstance(item, Slot):
                return values[item.number]
            return getattr(self, item.name) if isinstance(item, Constant) else item

        for step in self.steps:
            args = substitute(step.args, value)
            if step.module is None:
                x = args[0]
                dims = (0, x.ndim - 1, *range(1, x.ndim - 1)) if step.to_first else (0, *range(2, x.ndim), 1)
                values[step.outputs[0]] = x.permute(dims)
            else:
                made = self._modules[step.module](*args, **substitute(step.kwargs, value))  # type: ignore[misc]
                for number, tensor in zip(step.outputs, leaves(made), strict=True):
                    values[number] = tensor
            del args
            for number in step.drop:
                del values[number]
        made = substitute(self.result, value)
        return substitute(made, lambda x: _channels(x, -1, 1)) if self.channels_first else made

    def _arrived(self, given: tuple[Any, ...], named: dict[str, torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """The inputs by their numbers."""
        only = given[0] if len(given) == 1 else None
        if isinstance(only, dict):
            named = {**only, **named}
        flat = [] if isinstance(only, dict) else list(leaves(given))
        names = list(self.inputs)
        unknown = set(named) - set(names)
        if unknown or len(flat) + len(named) != len(names):
            shown = [*(tuple(x.shape) for x in flat), *named]
            raise ModelError(f"this model takes {len(names)} inputs ({', '.join(names)}); given were {shown}")
        for name, tensor in [*zip(names, flat, strict=False), *named.items()]:
            number, dtype = self.inputs[name]
            wanted = getattr(torch, dtype)
            if wanted.is_floating_point and not tensor.is_floating_point():
                tensor = tensor.to(self._float_dtype(wanted))
            yield number, _channels(tensor, 1, -1) if self.channels_first else tensor

    def _float_dtype(self, otherwise: torch.dtype) -> torch.dtype:
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), otherwise)


def with_channels_first(model: nn.Module) -> nn.Module:
    """A twin that takes and gives images with channels first from now on; everything else as it is."""
    if isinstance(model, Twin):
        model.channels_first = True
    return model


def _channels(x: Any, source: int, to: int) -> Any:
    """An image or volume with its channels moved; what has no two dimensions of pixels is left alone."""
    return x.movedim(source, to) if isinstance(x, torch.Tensor) and x.ndim > 3 else x
