"""Convolutions of all members as one.

``[B, N, C, ...]`` inputs and ``[B, out, in, ...]`` weights become one convolution of ``B`` times the groups on ``[N,
B * C, ...]`` (HFTA, arXiv 2102.02344). Three cases are better: members that see the same input (the first layer) are
one *dense* convolution with ``B`` times the output channels, 1x1 convolutions are a batched matrix product, and
depthwise ones on a GPU can run by kernels of our own (`rules.depthwise`). On maps smaller than the window, taps that
only ever see padding are left out. Grouped convolutions are not always faster than one convolution per member, or than
one product of unfolded maps, so on a GPU all are timed for each layer shape
(`outcore.fusion.program.autotune`), and `way` says which to take.

As one product of unfolded maps (im2col): on maps of a few positions with many channels, grouped kernels are at their
worst and unfolding costs little: every window becomes a row, and the members' weights are applied to all rows of a
member at once. Rows are recomputed in backward instead of being saved, so that it takes no more memory than the
convolution, except temporarily.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outcore.fusion.program.values import Stacked, UnjoinedConcat, fold_channels, unfold_channels
from outcore.fusion.rules.depthwise import depthwise, is_depthwise
from outcore.fusion.rules.matmul import lowered, pointwise, pointwise_joined, pointwise_shared, product

_FUNCTIONS: dict[tuple[int, bool], Callable[..., torch.Tensor]] = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}


@dataclass(frozen=True, slots=True)
class MemberConvolution:
    """The settings of one convolution of one member."""

    dims: int
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] | None = None
    """Given for a transposed one."""

    @classmethod
    def of(
        cls, dims: int, stride: Any, padding: Any, dilation: Any, groups: int, output_padding: Any = None
    ) -> MemberConvolution:
        """Settings as torch takes them: one number stands for all dimensions."""

        def wide(value: Any) -> Any:
            if isinstance(value, int):
                return (value,) * dims
            return value if isinstance(value, str) else tuple(value) * (dims if len(value) == 1 else 1)

        extra = None if output_padding is None else wide(output_padding)
        return cls(dims, wide(stride), wide(padding), wide(dilation), groups, extra)

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return self.output_padding is not None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, times: int = 1) -> Any:
        """The convolution itself, its groups taken `times` times."""
        function = _FUNCTIONS[self.dims, self.transposed]
        if self.transposed:
            return function(
                x, weight, bias, self.stride, self.padding, self.output_padding, self.groups * times, self.dilation
            )
        return function(x, weight, bias, self.stride, self.padding, self.dilation, self.groups * times)

    def is_pointwise(self, kernel: Sequence[int]) -> bool:
        """Whether every output position sees one input position."""
        plain = all(k == 1 for k in kernel) and all(s == 1 for s in self.stride) and self.groups == 1
        return plain and not self.transposed and (self.padding in ("same", "valid") or not any(self.padding))

    def fused(self, x: Any, weight: Any, bias: Any) -> Any:
        """For all members; NotImplemented where there is nothing to fuse."""
        if isinstance(x, UnjoinedConcat):
            return pointwise_joined(x, weight.tensor.flatten(2), None if bias is None else bias.tensor)
        value = x.rank if isinstance(x, Stacked) else x.dim()
        if value != self.dims + 2 or (isinstance(weight, Stacked) and not isinstance(bias, Stacked | None)):
            return NotImplemented
        if not isinstance(weight, Stacked):
            if bias is not None and isinstance(bias, Stacked):
                return NotImplemented
            members, batch = x.tensor.shape[:2]
            return Stacked(self(x.tensor.flatten(0, 1), weight, bias).unflatten(0, (members, batch)))
        w, b = weight.tensor, None if bias is None else bias.tensor
        flat = None if b is None else b.flatten()
        if not isinstance(x, Stacked):
            if self.groups > 1 or self.transposed:
                x = Stacked(x.unsqueeze(0).expand(w.shape[0], *x.shape))
            elif self.is_pointwise(w.shape[3:]):
                return pointwise_shared(x, w.flatten(2), b)
            else:
                return unfold_channels(self(x, w.flatten(0, 1), flat), w.shape[0])
        conv, w = self.cropped(x.tensor.shape[3:], w)
        if (given := conv.as_product(x, w)) is not None:
            return pointwise(*given, b)
        return conv.stacked(way(conv, x, w), x, w, b)

    def ways(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[str, ...]:
        """How it can run: as one grouped convolution, one by one, by a kernel for depthwise ones, or unfolded."""
        depthwise = ("depthwise",) if self.groups > 1 and weight.shape[2] == 1 else ()
        return ("grouped", "members", *depthwise, *(("unfolded",) if can_unfold(self, x, weight) else ()))

    def cropped(self, size: Sequence[int], weight: torch.Tensor) -> tuple[MemberConvolution, torch.Tensor]:
        """Without the taps that on a map of this size only ever see padding: of 3x3 on 1x1 the middle is left."""
        if self.transposed or isinstance(self.padding, str):
            return self, weight
        spans: list[slice] = []
        for length, k, s, p, d in zip(size, weight.shape[3:], self.stride, self.padding, self.dilation, strict=True):
            count = (length + 2 * p - d * (k - 1) - 1) // s + 1
            met = range(k)
            if length < d * (k - 1) + 1:
                met = range(*_span([t for t in range(k) if any(0 <= o * s - p + t * d < length for o in range(count))]))
            again = length + 2 * (p - met.start * d) - d * (len(met) - 1) - 1
            kept = met and p >= met.start * d and again // s + 1 == count
            spans.append(slice(met.start, met.stop) if kept else slice(0, k))
        padding = tuple(p - at.start * d for p, at, d in zip(self.padding, spans, self.dilation, strict=True))
        if padding == self.padding and tuple(at.stop - at.start for at in spans) == weight.shape[3:]:
            return self, weight
        return replace(self, padding=padding), _Crop.apply(weight, spans)  # type: ignore[no-untyped-call]

    def as_product(self, x: Stacked, weight: torch.Tensor) -> tuple[Stacked, torch.Tensor] | None:
        """Input and weights of the equivalent matrix product: of single positions, or of a window as large as the
        map."""
        plain = self.groups == 1 and not self.transposed and set(self.dilation) == {1}
        if not plain or not (self.padding in ("same", "valid") or not any(self.padding)):
            return None
        if all(k == 1 for k in weight.shape[3:]) and (self.padding != "same" or set(self.stride) == {1}):
            seen = x.tensor[(..., *(slice(None, None, s) for s in self.stride))]  # type: ignore[index]
            return Stacked(seen), weight.flatten(2)
        if self.padding != "same" and x.tensor.shape[3:] == weight.shape[3:]:
            rows, own = (t.movedim(2, -1).flatten(2) for t in (x.tensor, weight))
            return Stacked(rows.view(*rows.shape, *[1] * self.dims)), own
        return None

    def stacked(self, how: str, x: Stacked, w: torch.Tensor, b: torch.Tensor | None) -> Stacked:
        """Inputs and weights of the members in one of the `ways`."""
        if how == "members":
            slices = zip(x.tensor, w, b if b is not None else [None] * len(w), strict=True)
            return unfold_channels(torch.cat([self(*each) for each in slices], 1), w.shape[0])
        if how == "unfolded":
            return unfolded(self, x, w, b)
        folded, weight, bias = fold_channels(x), w.flatten(0, 1), None if b is None else b.flatten()
        if how == "depthwise" and is_depthwise(self, folded, weight):
            return unfold_channels(depthwise(self, folded, weight, bias), w.shape[0])
        return unfold_channels(self(folded, weight, bias, w.shape[0]), w.shape[0])


class _Crop(torch.autograd.Function):
    """A part of the weights; its gradient has their layout, to which optimizers would copy it otherwise."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, spans: list[slice]) -> torch.Tensor:
        ctx.like, ctx.spans = (weight.shape, weight.stride()), spans
        return weight[(..., *spans)]  # type: ignore[index]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = torch.empty_strided(*ctx.like, dtype=grad.dtype, device=grad.device).zero_()
        whole[(..., *ctx.spans)] = grad
        return whole, None


def _span(found: Sequence[int]) -> tuple[int, int]:
    return (found[0], found[-1] + 1) if found else (0, 0)


_WAYS: dict[Any, str] = {}
"""Measured, per shape."""
_SEEN: list[dict[Any, tuple[MemberConvolution, torch.Tensor, torch.Tensor]]] = []


def signature(convolution: MemberConvolution, x: Stacked, weight: torch.Tensor) -> Any:
    """What the time of a fused convolution depends on."""
    device = x.tensor.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.tensor.dtype
    return convolution, tuple(x.tensor.shape), x.tensor.stride()[-1] == 1, tuple(weight.shape), low, device


def way(convolution: MemberConvolution, x: Stacked, weight: torch.Tensor) -> str:
    """How to run it: as measured, grouped otherwise."""
    if _SEEN:
        low = signature(convolution, x, weight)[4]
        _SEEN[-1][signature(convolution, x, weight)] = (
            convolution,
            x.tensor.detach().to("meta", low),
            weight.detach().to("meta", low),
        )
    return _WAYS.get(signature(convolution, x, weight), "grouped") if _WAYS else "grouped"


def decide(shape: Any, chosen: str) -> None:
    """Run convolutions of this signature this way from now on."""
    _WAYS[shape] = chosen


@contextlib.contextmanager
def collecting(seen: dict[Any, tuple[MemberConvolution, torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Note every convolution that runs inside."""
    _SEEN.append(seen)
    try:
        yield
    finally:
        _SEEN.pop()


_MOST = 2**24
"""Elements of the rows of all members: beyond, writing them takes longer than it saves."""


def can_unfold(conv: MemberConvolution, x: Tensor, weight: Tensor) -> bool:
    """Whether ``[B, N, C, *space]`` by ``[B, out, C, *kernel]`` can be, and is small enough."""
    plain = not conv.transposed and conv.groups == 1 and set(conv.dilation) == {1} and not isinstance(conv.padding, str)
    return plain and x.numel() * weight[0, 0, 0].numel() <= _MOST


def unfolded(conv: MemberConvolution, x: Stacked, weight: Tensor, bias: Tensor | None) -> Stacked:
    """The convolution, in autocast's precision."""
    value, own, added = lowered(x.tensor, weight.movedim(2, -1).flatten(2), bias)
    made: Tensor = _Unfolded.apply(value, own, conv, tuple(weight.shape[3:]))  # type: ignore[no-untyped-call]
    y = made.movedim(-1, 2)
    return Stacked(y if added is None else y + added.view(y.shape[0], 1, -1, *[1] * conv.dims))


def _rows(conv: MemberConvolution, x: Tensor, kernel: tuple[int, ...]) -> Tensor:
    """Every window of ``[B, N, C, *space]`` as a row: ``[B, N, *out, window * C]``."""
    assert not isinstance(conv.padding, str)
    windows = F.pad(x, [p for pad in reversed(conv.padding) for p in (pad, pad)])
    for dim, (size, stride) in enumerate(zip(kernel, conv.stride, strict=True)):
        windows = windows.unfold(3 + dim, size, stride)
    return windows.movedim(2, -1).flatten(2 + conv.dims)


class _Unfolded(torch.autograd.Function):
    """``rows(x) @ weight [B, out, window * C]^T``, laid out as ``[N, *out, B, channels]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, conv: MemberConvolution, kernel: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.conv, ctx.kernel = conv, kernel
        rows = _rows(conv, x, kernel)
        y: Tensor = product(rows.flatten(1, -2), weight.transpose(1, 2), None).unflatten(1, rows.shape[1:-1])
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(1, -2)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            rows = _rows(ctx.conv, leaf, ctx.kernel)
        to_weight = torch.bmm(flat.transpose(1, 2), rows.detach().flatten(1, -2)) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, to_weight, None, None
        back = torch.bmm(flat, weight).unflatten(1, rows.shape[1:-1])
        return torch.autograd.grad(rows, leaf, back)[0], to_weight, None, None
