"""Interpolation to another size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from outcore.graph.record.recording import Ref
from outcore.ops.region import AdaptiveWindow, InterpolationWindow, Interval, Region
from outcore.stream.call import NotStreamable, PlainRule, RegionRule, RuleContext, StreamCall, rule
from outcore.stream.rules.pool import AdaptiveAverage

_KINDS: dict[str, Any] = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}


@dataclass(frozen=True)
class Interpolation(PlainRule):
    """Weighted sums of a few neighbours, at positions that follow from the size of the whole image."""

    operands: tuple[Ref, ...]
    along: tuple[InterpolationWindow, ...]
    mode: str

    def needs(self, out: Region) -> tuple[Region, ...]:
        """The neighbours."""
        n = len(self.along)
        return ((*out[:-n], *(r.needs(i) for r, i in zip(self.along, out[-n:], strict=True))),)

    def run(self, crops: Sequence[torch.Tensor], out: Region, given: RuleContext) -> torch.Tensor:
        """torch's own where positions repeat with the factor; else weighted sums along one dimension after the
        other."""
        n = len(self.along)
        factors = [r.factor for r in self.along]
        held = self.needs(out)[0][-n:]
        if None not in factors:
            aligned = False if self.mode not in ("nearest", "nearest-exact") else None
            size = [f * (b - a) for f, (a, b) in zip(factors, held, strict=True) if f is not None]
            made: torch.Tensor = F.interpolate(crops[0], size, mode=self.mode, align_corners=aligned)
            for i, (f, (a, _), (lo, hi)) in enumerate(zip(factors, held, out[-n:], strict=True)):
                assert f is not None
                made = made.narrow(made.dim() - n + i, lo - a * f, hi - lo)
            return made
        x = crops[0]
        for i, (r, (start, _), wanted) in enumerate(zip(self.along, held, out[-n:], strict=True)):
            x = _along(x, x.dim() - n + i, r, start, wanted)
        return x

    def place(self, out: Region) -> Any:
        """Where among the repeating positions; everywhere different if they do not repeat."""
        n = len(self.along)
        found: list[Any] = []
        for r, (lo, hi), (a, b) in zip(self.along, out[-n:], self.needs(out)[0][-n:], strict=True):
            found.append((lo - a * r.factor, hi - lo, a == 0, b == r.size) if r.factor is not None else (lo, hi))
        return tuple(found)


def _along(x: torch.Tensor, dim: int, resample: InterpolationWindow, start: int, wanted: Interval) -> torch.Tensor:
    taps = [resample.taps(i) for i in range(*wanted)]
    shape = [1] * x.dim()
    shape[dim] = -1
    made: torch.Tensor | None = None
    for k in range(len(taps[0])):
        index = torch.tensor([t[k][0] - start for t in taps], device=x.device)
        part = x.index_select(dim, index)
        if len(taps[0]) > 1:
            weight = torch.tensor([t[k][1] for t in taps], dtype=x.dtype, device=x.device)
            part = part * weight.view(shape)
        made = part if made is None else made + part
    assert made is not None
    return made


@rule("interpolate")
def _interpolation(call: StreamCall) -> RegionRule:
    source, given = call.input(), call.given()
    if given["antialias"]:
        raise NotStreamable("antialiased interpolation has no rule; leave out antialias=True")
    shape = call.shapes(source)
    count = len(shape) - 2
    pairs = list(zip(shape[2:], call.shape[2:], strict=True))
    if given["mode"] == "area":
        return AdaptiveAverage((source,), tuple(AdaptiveWindow(n, m) for n, m in pairs))
    scales = given["scale_factor"]
    if scales is None or given["recompute_scale_factor"] or given["size"] is not None:
        scales = (None,) * count
    scales = tuple(scales) if isinstance(scales, (tuple, list)) else (float(scales),) * count
    kind = _KINDS.get(given["mode"], given["mode"])
    align = bool(given["align_corners"])
    along = tuple(InterpolationWindow(n, m, kind, align, s) for (n, m), s in zip(pairs, scales, strict=True))
    return Interpolation((source,), along, given["mode"])
