"""The memory format of images in a network, as a choice.

Fast convolutions read the channels of a pixel contiguously. Given images channel by channel, as PyTorch makes them, the
library converts every convolution's input, output and gradient in a workspace of that size, around each of them: at 64
channels of 4096 x 4096 pixels that is 8 to 12 GiB, and a fifth to 30 % of the step. Converted once, at the entrance,
the whole network runs with channels last: convolutions, norms, pools and sums return the format of their inputs.

    images ─▶ to(channels last) ─▶ the network as it is ─▶ contiguous() ─▶ what plain training returns

Both conversions are recorded as calls of the network like its own, so they are measured, counted, planned (the
converted images can be recomputed) and run like any other. Nothing of the model changes: weights keep their strides
(the library converts each where it uses it, which is little beside images), and with them state_dict, optimizers and
their state, copies and what is wrapped around the model. Without gradients the model runs as it always did.

Other kernels sum in another order, so this needs ``exact="reassociated"``; and it is taken only where the calls as
measured in both formats say that it is faster, or where nothing else meets the budget. Some networks cannot: those that
call ``view`` on what is no longer contiguous, that write into their input, or that read data while they run. Random
numbers are drawn in memory order, so a network that draws them for images would draw others (`drawn`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn

from outcore.graph import Graph, capture
from outcore.graph.parts import Value
from outcore.graph.record.capture import arguments_as_called
from outcore.graph.record.recording import Ref
from outcore.graph.strides import CHANNELS_LAST
from outcore.graph.structure import leaves, substitute
from outcore.ops.recompute_encode import again
from outcore.ops.registry import kinds, names, spatial_dims

_CONVOLUTIONS = {
    type_: spatial_dims(name) + 2
    for name in kinds("convolution", "transposed convolution")
    for type_ in names(name)
    if spatial_dims(name) > 1
}
"""Type of a block -> dimensions of its images."""
_BY_CHANNEL = names("dropout2d", "dropout3d", "feature_alpha_dropout")
"""Functions that draw one number for a channel of an image, whatever its layout."""
_NEW = names("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
"""Functions that make a contiguous tensor, whatever their arguments."""


@dataclass(frozen=True)
class ChannelsLast:
    """How a model is recorded so that images are channels last inside."""

    dims: frozenset[int]
    """Dimensions of the images: 4, or 5 for volumes."""
    outputs: tuple[tuple[int, ...] | None, ...]
    """For every output the dimension order in which plain training gives it, the innermost dimension last; None for one
    that has gaps or repeats itself."""

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """A context in which images are converted where they enter the model, and back where they leave it."""
        before = model.__dict__.get("forward")
        model.__dict__["forward"] = self.turned(model.forward)
        try:
            yield
        finally:
            del model.__dict__["forward"]
            if before is not None:
                model.__dict__["forward"] = before

    def turned(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A model's forward with images converted where they enter and back where they leave."""

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = substitute((args, kwargs), torch.Tensor, self._turned)
            wanted = chain(self.outputs, repeat(None))
            return substitute(inner(*args, **kwargs), torch.Tensor, lambda t: _in_order(t, next(wanted)))

        return forward

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() not in self.dims or not tensor.is_floating_point():
            return tensor
        return tensor.to(memory_format=CHANNELS_LAST[tensor.dim()])  # unlike contiguous, it turns a single channel too


def recorded(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, order: ChannelsLast | None) -> Graph:
    """A model as a graph, in its own format or another.

    Raises:
        CaptureError: it cannot be recorded so.
    """
    if order is None:
        return capture(model, args, kwargs)
    args, kwargs = arguments_as_called(model, args, kwargs)
    args, kwargs = substitute((args, kwargs), torch.Tensor, _without_content)  # what fails must not run on real data
    with order.around(model):
        return capture(model, args, kwargs)


def channels_last(graph: Graph) -> ChannelsLast | str:
    """How a network runs with channels last; or why it stays as it is, in words, empty if there are no images."""
    used = {_CONVOLUTIONS.get(graph.blocks[call.block].type) for call in graph.calls.values()}
    images = [graph.values[name] for name in graph.inputs]
    images = [v for v in images if len(v.shape) in used and getattr(torch, v.dtype).is_floating_point]
    if all(_is_turned(image) for image in images):
        return ""
    recording = graph.recording
    if graph.notes or recording.uses_data or recording.volatile:
        return "the network looks at numbers while it runs"
    given = {image.name for image in images}
    written = {value for call in graph.calls.values() for value in call.mutates}
    if any(graph.values[name].base in given for name in (*written, *graph.outputs)):
        return "the network writes into its input, or returns it"
    outputs = [graph.values[ref.name] for _, ref in leaves(recording.result, Ref) if ref.kind == "value"]
    return ChannelsLast(frozenset(len(image.shape) for image in images), tuple(map(_order_of, outputs)))


def drawn(graph: Graph, turned: Graph) -> str | None:
    """A call that may draw other random numbers where the format changes: it is random, or nothing is known of it."""
    for name, call in graph.calls.items():
        type_ = graph.blocks[call.block].type
        if again(type_) in ("pure", "statistics") or type_ in _BY_CHANNEL | _NEW or name not in turned.calls:
            continue
        there = turned.calls[name]
        pairs = [*zip(call.inputs, there.inputs, strict=False), *zip(call.outputs, there.outputs, strict=False)]
        if any(_nesting(graph.values[a]) != _nesting(turned.values[b]) for a, b in pairs):
            return name
    return None


def _nesting(value: Value) -> list[int]:
    """The dimensions of a value that have a length, the innermost last."""
    return [i for i in sorted(range(len(value.stride)), key=lambda i: -value.stride[i]) if value.shape[i] > 1]


def _is_turned(image: Value) -> bool:
    """Whether an image is channels last, also where it has only one channel."""
    strides = [image.stride[i] for i in (1, *range(len(image.shape) - 1, 1, -1), 0)]
    return strides == sorted(strides) and strides[0] < strides[-1]


def _order_of(value: Value) -> tuple[int, ...] | None:
    """The dimensions of a value, the innermost last; None where it has gaps or repeats itself."""
    if len(value.stride) != len(value.shape):
        return None
    order = tuple(sorted(range(len(value.shape)), key=lambda i: -value.stride[i]))
    strided = torch.empty_strided(value.shape, value.stride, device="meta")
    return order if strided.permute(order).is_contiguous() else None


def _in_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """A tensor with its dimensions in this order in memory."""
    if order is None or len(order) != tensor.dim():
        return tensor
    if order == tuple(range(tensor.dim())):
        return tensor if tensor.is_contiguous() else tensor.contiguous()
    if tensor.is_contiguous() or not torch.empty_like(tensor, device="meta").permute(order).is_contiguous():
        inverse = tuple(order.index(i) for i in range(len(order)))
        return tensor.permute(order).contiguous().permute(inverse)
    return tensor


def _without_content(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)
