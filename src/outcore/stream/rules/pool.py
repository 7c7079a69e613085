"""Pools over sliding windows, and adaptive pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from outcore.graph.record.recording import Ref
from outcore.ops.region import AdaptiveWindow, Interval, Region, SlidingWindow
from outcore.ops.registry import kinds, spatial_dims
from outcore.stream.call import NotStreamable, PlainRule, Reduction, RegionRule, RuleContext, StreamCall, rule
from outcore.stream.execute.border_padding import WidenedInput, windows_excess
from outcore.stream.rules.border import BorderedRegion
from outcore.stream.rules.convolve import each
from outcore.stream.rules.reduce import Largest, Mean

MAX_POOLS: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@dataclass(frozen=True)
class _Sliding(PlainRule):
    operands: tuple[Ref, ...]
    windows: tuple[SlidingWindow, ...]
    reading: BorderedRegion

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The pixels under the windows; as many channels as are wanted."""
        return ((*out[: -len(self.windows)], *self.reading.needs(self._reach(out))),)

    def place(self, out: Region) -> Any:
        """The padding."""
        return self.reading.beyond(self._reach(out))

    def pads(self, out: Region) -> bool:
        """Whether this region reaches beyond the image."""
        return any(low or high for low, high in self.reading.beyond(self._reach(out)))

    def _reach(self, out: Region) -> tuple[Interval, ...]:
        return tuple(w.reach(i) for w, i in zip(self.windows, out[-len(self.windows) :], strict=True))


@dataclass(frozen=True)
class MaxPool(_Sliding):
    """The largest under each window; nothing beyond the border counts."""

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Pool the crop, padded with minus infinity where the image ends."""
        return self._pool(self.reading.read(crops[0], self._reach(out)), (0,) * len(self.windows))

    def widened(self, held: Region, out: Region) -> WidenedInput | None:
        """How to run on all that is held, if the pool's own padding does."""
        count = len(self.windows)
        found = windows_excess(self.windows, held, out) if held[:-count] == out[:-count] else None
        fits = found is not None and all(2 * p <= w.kernel for p, w in zip(found.padding, self.windows, strict=True))
        return found if fits else None

    def run_widened(self, crops: Sequence[torch.Tensor], widened: WidenedInput) -> torch.Tensor:
        """Pool all of the crop, padded on both sides."""
        return self._pool(crops[0], widened.padding)

    def _pool(self, x: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
        kernel, stride = [w.kernel for w in self.windows], [w.stride for w in self.windows]
        made: torch.Tensor = MAX_POOLS[len(kernel)](x, kernel, stride, padding, [w.dilation for w in self.windows])
        return made


@dataclass(frozen=True)
class AveragePool(_Sliding):
    """The mean under each window; what counts beyond the border is the user's choice."""

    high: tuple[int, ...]
    """Padding after the last element."""
    counts_padding: bool
    divisor: int | None

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Pool the crop; at a border, the sum by the number of elements that count there."""
        x = self.reading.read(crops[0], self._reach(out))
        kernel, stride = [w.kernel for w in self.windows], [w.stride for w in self.windows]
        mean: torch.Tensor = _AVERAGE[len(kernel)](x, kernel, stride, 0)
        full = math.prod(kernel)
        if self.divisor is not None:
            return mean * (full / self.divisor)
        counts = [self._counts(w, i, h) for w, i, h in zip(self.windows, out[-len(kernel) :], self.high, strict=True)]
        if all(c == w.kernel for w, row in zip(self.windows, counts, strict=True) for c in row):
            return mean
        for dim, row in enumerate(counts):
            shape = [1] * mean.dim()
            shape[mean.dim() - len(kernel) + dim] = -1
            factor = torch.tensor([kernel[dim] / c for c in row], dtype=mean.dtype, device=mean.device)
            mean = mean * factor.view(shape)
        return mean

    def _counts(self, window: SlidingWindow, wanted: Interval, high: int) -> list[int]:
        """How many elements count under each window."""
        found = []
        for i in range(*wanted):
            start, stop = window.reach((i, i + 1))
            if self.counts_padding:
                found.append(min(stop, window.size + high) - start)
            else:
                found.append(min(stop, window.size) - max(start, 0))
        return found

    def place(self, out: Region) -> Any:
        """The padding, and the end of the image."""
        counts = [self._counts(w, i, h) for w, i, h in zip(self.windows, out[2:], self.high, strict=False)]
        return (super().place(out), str(counts))


@dataclass(frozen=True)
class AdaptiveAverage(PlainRule):
    """Means over bins whose sizes differ by one."""

    operands: tuple[Ref, ...]
    bins: tuple[AdaptiveWindow, ...]

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The elements of the bins."""
        n = len(self.bins)
        return ((*out[:-n], *(b.needs(i) for b, i in zip(self.bins, out[-n:], strict=True))),)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """Average along one dimension after the other."""
        x = crops[0]
        first = x.dim() - len(self.bins)
        for i, bins in enumerate(self.bins):
            wanted = out[first + i]
            start = bins.needs(wanted)[0]
            parts = [bins.bin(k) for k in range(*wanted)]
            means = [x.narrow(first + i, a - start, b - a).mean(first + i, keepdim=True) for a, b in parts]
            x = torch.cat(means, first + i)
        return x

    def place(self, out: Region) -> Any:
        """Bins differ from place to place."""
        return out


def _windows(call: StreamCall, count: int) -> tuple[Ref, tuple[SlidingWindow, ...], dict[str, Any]]:
    given = call.given()
    source: Ref = given["input"]
    kernel = each(given["kernel_size"], count)
    stride = each(given["stride"], count) if given["stride"] not in (None, [], ()) else kernel
    low = each(given["padding"], count)
    dilation = each(given.get("dilation", 1), count)
    pixels = call.shapes(source)[-count:]
    return source, tuple(SlidingWindow(*w) for w in zip(pixels, kernel, stride, dilation, low, strict=True)), given


def max_windows(call: StreamCall) -> tuple[tuple[Ref, ...], tuple[SlidingWindow, ...], BorderedRegion]:
    """What a maximum pool is bound to."""
    source, windows, _ = _windows(call, spatial_dims(call.type))
    return (source,), windows, BorderedRegion(tuple(w.size for w in windows), "constant", float("-inf"))


@rule(*kinds("average pool"))
def _average_pool(call: StreamCall) -> AveragePool:
    source, windows, given = _windows(call, spatial_dims(call.type))
    return AveragePool(
        (source,),
        windows,
        BorderedRegion(tuple(w.size for w in windows)),
        tuple(w.low for w in windows),
        given["count_include_pad"],
        given.get("divisor_override"),
    )


@rule(*kinds("adaptive average pool", "adaptive max pool"))
def _adaptive(call: StreamCall) -> RegionRule | Reduction:
    source = call.input()
    count = spatial_dims(call.type)
    shape = call.shapes(source)
    dims = tuple(range(len(shape) - count, len(shape)))
    bins = tuple(AdaptiveWindow(n, m) for n, m in zip(shape[-count:], call.shape[-count:], strict=True))
    maximum = call.operation in kinds("adaptive max pool")
    if getattr(call.module, "return_indices", False) or "return_indices" in call.kwargs:
        raise NotStreamable("it returns indices")
    if all(b.bins == 1 for b in bins):
        return (Largest if maximum else Mean)((source,), shape, dims, True, call.dtype)
    if maximum:
        raise NotStreamable("an adaptive maximum with several bins has no rule; use MaxPool with a kernel")
    return AdaptiveAverage((source,), bins)
