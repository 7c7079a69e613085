"""Convolutions and transposed convolutions of one to three dimensions.

The epilogue of a convolution (add the shift, add the skip, apply ReLU) is one pass. After folding
(`outcore.stream.execute.fold_batch_norm`) a residual block is convolutions with a shift per channel, a sum and ReLUs.
Written out, these are three passes over memory that the convolution has just written, and they cost more than the
convolution. On a GPU they are one Triton kernel, in place; backward masks the gradient and sums it per channel in one
more. Elsewhere the same is done by torch's own operations.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from outcore.graph.record.recording import Ref
from outcore.ops.region import Region, SlidingWindow, TransposedWindow, whole
from outcore.ops.registry import kinds
from outcore.stream.call import NotStreamable, RuleContext, StreamCall, rule
from outcore.stream.execute.border_padding import WidenedInput, windows_excess, worthwhile
from outcore.stream.rules.border import BorderedRegion, sliced

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def each(value: Any, count: int) -> tuple[int, ...]:
    """One number for all dimensions, or one for each."""
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)


@dataclass(frozen=True)
class Kernel:
    """What moves a kernel over pixels: samples stay samples (if there are any), and all channels are needed."""

    operands: tuple[Ref, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def dims(self) -> int:
        """The number of pixel dimensions."""
        return len(self.shapes[1]) - 2

    def pixels(self, region: Region) -> Region:
        """The last sides of a region."""
        return region[-self.dims :]

    def beside(self, out: Region, pixels: Region) -> tuple[Region, ...]:
        """The needed regions of every operand, given the pixels of the first; weight and bias whole."""
        channels = (0, self.shapes[0][-self.dims - 1])
        return ((*out[: -self.dims - 1], channels, *pixels), *(whole(s) for s in self.shapes[1:]))

    def holds(self, held: Region, out: Region) -> bool:
        """Whether samples and channels are held as they are needed, no more."""
        return held[: -self.dims] == (*out[: -self.dims - 1], (0, self.shapes[0][-self.dims - 1]))

    def follow(self, operand: int, dim: int) -> int | None:
        """Pixels become pixels and samples samples; weights are needed whole."""
        return dim if operand == 0 and dim != len(self.shapes[0]) - self.dims - 1 else None


@dataclass(frozen=True)
class ConvolutionRule(Kernel):
    """A sliding window with a weight; the crop is padded only where the image ends."""

    windows: tuple[SlidingWindow, ...]
    reading: BorderedRegion
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The pixels under the windows, of all channels; weight and bias whole."""
        return self.beside(out, self.reading.needs(self._reach(out)))

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Convolve the crop, copied into one with the padding of this border."""
        return self._convolve(self.reading.read(crops[0], self._reach(out)), *crops[1:], padding=(0,) * self.dims)

    def widened(self, held: Region, out: Region) -> WidenedInput | None:
        """How to run on all that is held, if zeros on both sides do."""
        found = windows_excess(self.windows, held, out) if self.holds(held, out) else None
        return found if found is not None and (self.reading.border == "zeros" or not any(found.padding)) else None

    def run_widened(self, crops: Sequence[torch.Tensor], widened: WidenedInput) -> torch.Tensor:
        """Convolve all of the crop, padded on both sides."""
        return self._convolve(*crops, padding=widened.padding)

    def _convolve(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, padding: tuple[int, ...]
    ) -> torch.Tensor:
        made: torch.Tensor = _CONVOLVE[self.dims](x, weight, bias, self.stride, padding, self.dilation, self.groups)
        return made

    def place(self, out: Region) -> Any:
        """The padding."""
        return self.reading.beyond(self._reach(out))

    def pads(self, out: Region) -> bool:
        """Whether this region reaches beyond the image."""
        return any(low or high for low, high in self.reading.beyond(self._reach(out)))

    def _reach(self, out: Region) -> tuple[tuple[int, int], ...]:
        return tuple(w.reach(i) for w, i in zip(self.windows, self.pixels(out), strict=True))


@dataclass(frozen=True)
class Finished(ConvolutionRule):
    """A convolution with what follows it: the shift, a sum with a skip, a ReLU."""

    relu: bool = False
    residual: bool = False
    """Whether the last operand is added."""

    def needs(self, out: Region) -> tuple[Region, ...]:
        """As a convolution; of the skip, the same place."""
        if not self.residual:
            return super().needs(out)
        return (*replace(self, residual=False, shapes=self.shapes[:-1]).needs(out), out)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Convolve, then finish in one pass."""
        x, weight, shift, *residual = crops
        return finish(super().run((x, weight), out, given), shift, residual[0] if residual else None, self.relu)

    def run_widened(self, crops: Sequence[torch.Tensor], widened: WidenedInput) -> torch.Tensor:
        """The same, padded on both sides."""
        x, weight, shift, *residual = crops
        made = super().run_widened((x, weight), widened)
        return finish(made, shift, residual[0] if residual else None, self.relu)

    def follow(self, operand: int, dim: int) -> int | None:
        """The skip's dimensions stay."""
        return dim if operand == 3 else super().follow(operand, dim)


@dataclass(frozen=True)
class TransposedConvolution(Kernel):
    """Each input pixel adds to a window of the output."""

    spreads: tuple[TransposedWindow, ...]
    groups: int

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The pixels that add to the wanted ones."""
        return self.beside(out, tuple(s.needs(i) for s, i in zip(self.spreads, self.pixels(out), strict=True)))

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Run on the whole crop, then cut out what is wanted; a missing end is bias alone."""
        x, weight, *bias = crops
        wanted = self.pixels(out)
        given_pixels = self.pixels(self.needs(out)[0])
        starts = [s.start(g) for s, g in zip(self.spreads, given_pixels, strict=True)]
        more = []
        for s, (_, hi), start, (a, b) in zip(self.spreads, wanted, starts, given_pixels, strict=True):
            more.append(max(0, hi - start - ((b - a - 1) * s.stride + s.dilation * (s.kernel - 1) + 1)))
        spread = self._spread(x, weight, *bias, more=tuple(more))
        whole = tuple((0, n) for n in spread.shape[: -self.dims])
        held = zip(starts, spread.shape[-self.dims :], strict=True)
        return sliced(spread, (*whole, *((a, a + n) for a, n in held)), (*whole, *wanted))

    def widened(self, held: Region, out: Region) -> WidenedInput | None:
        """How to run on all that is held, without cutting."""
        sides = []
        if not self.holds(held, out):
            return None
        for s, given, wanted in zip(self.spreads, self.pixels(held), self.pixels(out), strict=True):
            start = s.start(given)
            stop = start + (given[1] - given[0] - 1) * s.stride + s.dilation * (s.kernel - 1) + 1
            if wanted[0] < start or stop < wanted[1]:
                return None
            sides.append((start, stop))
        made = (*out[: -self.dims], *sides)
        return WidenedInput((0,) * self.dims, made) if worthwhile(made, out) else None

    def run_widened(self, crops: Sequence[torch.Tensor], widened: WidenedInput) -> torch.Tensor:
        """Run on the whole crop."""
        return self._spread(*crops, more=(0,) * self.dims)

    def _spread(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, more: tuple[int, ...]
    ) -> torch.Tensor:
        stride, dilation = tuple(s.stride for s in self.spreads), tuple(s.dilation for s in self.spreads)
        made: torch.Tensor = _TRANSPOSE[self.dims](x, weight, bias, stride, 0, more, self.groups, dilation)
        return made

    def place(self, out: Region) -> Any:
        """Where the wanted outputs lie among the windows, and which inputs there are."""
        pixels, wanted = self.pixels(self.needs(out)[0]), self.pixels(out)
        return tuple((i[0] - s.start(g), g[1] - g[0]) for s, g, i in zip(self.spreads, pixels, wanted, strict=True))


@rule(*kinds("convolution"))
def _convolution(call: StreamCall) -> ConvolutionRule:
    given = call.given()
    border: Any = getattr(call.module, "padding_mode", "zeros")
    operands = tuple(r for r in (given[n] for n in ("input", "weight", "bias")) if r is not None)
    shapes = tuple(call.shapes(r) for r in operands)
    kernel = shapes[1][2:]
    count = len(kernel)
    stride, dilation = each(given["stride"], count), each(given["dilation"], count)
    padding = given["padding"]
    if padding == "same":
        low = tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    elif padding == "valid":
        low = (0,) * count
    else:
        low = each(padding, count)
    pixels = shapes[0][-count:]
    windows = tuple(SlidingWindow(*w) for w in zip(pixels, kernel, stride, dilation, low, strict=True))
    return ConvolutionRule(operands, shapes, windows, BorderedRegion(pixels, border), stride, dilation, given["groups"])


@rule(*kinds("transposed convolution"))
def _transposed(call: StreamCall) -> TransposedConvolution:
    if call.module is not None and (len(call.args) > 1 or "output_size" in call.kwargs):
        raise NotStreamable("it is told its output size")
    given = call.given()
    operands = tuple(r for r in (given[n] for n in ("input", "weight", "bias")) if r is not None)
    shapes = tuple(call.shapes(r) for r in operands)
    kernel = shapes[1][2:]
    count = len(kernel)
    stride, dilation = each(given["stride"], count), each(given["dilation"], count)
    low = each(given["padding"], count)
    spreads = tuple(TransposedWindow(*w) for w in zip(shapes[0][-count:], kernel, stride, dilation, low, strict=True))
    return TransposedConvolution(operands, shapes, spreads, given["groups"])


@functools.cache
def _triton() -> Any:
    try:
        from outcore.kernels import bias_relu
    except ImportError:
        return None
    return bias_relu


def is_fused(y: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether the kernel takes these: 2-D images on a GPU, channels last."""
    if not (y.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") or y.dim() != 4 or _is_fake(y) or _triton() is None:
        return False
    if y.shape[1] == 1 or not y.is_contiguous(memory_format=torch.channels_last):
        return False
    return residual is None or (residual.shape == y.shape and residual.stride(1) == 1 and residual.dtype == y.dtype)


def finish(y: torch.Tensor, shift: torch.Tensor, residual: torch.Tensor | None, relu: bool) -> torch.Tensor:
    """relu(y + shift + residual); y may be overwritten."""
    if is_fused(y, residual):
        made: torch.Tensor = _Finish.apply(y, shift, residual, relu)  # type: ignore[no-untyped-call]
        return made
    y = y + shift.to(y.dtype).reshape(1, -1, *(1,) * (y.dim() - 2))
    y = y + residual if residual is not None else y
    return F.relu(y) if relu else y


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, shift: torch.Tensor, residual: torch.Tensor | None, relu: bool
    ) -> torch.Tensor:
        _triton().biased(y, shift, residual, relu=relu, rounded=False)
        ctx.mark_dirty(y)
        ctx.relu, ctx.has_residual, ctx.dtype = relu, residual is not None, shift.dtype
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (z,) = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        result, summed = _triton().gradients(gradient, z, ctx.dtype, relu=ctx.relu)
        return result, summed, result if ctx.has_residual else None, None


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
