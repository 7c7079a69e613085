"""Layer norms and scaled sums of ConvNeXt-T by themselves: torch's operations and ours, in bytes per second.

    python benchmarks/within-frontier/passes.py --out results/FILE.json [--seconds 20] [--sizes]

Each is run at the four sizes that ConvNeXt-T has on one image of 4096 px, between a convolution and a linear layer
under bf16 autocast, and in float32. The rate is that of the bytes that have to move (inputs read once, outputs written
once), the same for both, so the ratio of two rates is that of two times. With `--sizes` the kernels are also run with
other tiles, warps and numbers of programs. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from outcore.kernels import layer_norm as layer_norm_triton_kernels
from outcore.kernels import layer_scale
from outcore.memory.op_fusion.layer_norm_cast import _LayerNorm
from outcore.memory.op_fusion.layer_scale_sum import LayerScaleSum

SHAPES = [(1, 1024, 1024, 96), (1, 512, 512, 192), (1, 256, 256, 384), (1, 128, 128, 768)]
Made = Callable[[], torch.Tensor]
Ways = dict[str, tuple[Made, list[torch.Tensor], torch.Tensor, int, int]]
"""How -> what runs, the inputs it has gradients of, the output's gradient, and the bytes of forward and backward."""


def timed(run: Callable[[], Any], times: int = 10) -> float:
    """Median seconds."""
    for _ in range(2):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    torch.cuda._sleep(3_000_000)  # the host gets ahead
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / 1e3


def both_ways(make: Made, inputs: list[torch.Tensor], g: torch.Tensor) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    forward = timed(make)
    out = make()
    backward = timed(lambda: torch.autograd.grad(out, inputs, g, retain_graph=True))
    return forward, backward


def layer_norm(shape: tuple[int, ...], half: bool) -> Ways:
    """Torch's and ours."""
    kind, width = (torch.bfloat16 if half else torch.float32), shape[-1]
    x = torch.randn(shape, device="cuda", dtype=kind, requires_grad=True)
    w, b = (torch.randn(width, device="cuda", requires_grad=True) for _ in range(2))
    g = torch.randn(shape, device="cuda", dtype=kind)

    def theirs() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            return F.layer_norm(x, (width,), w, b, 1e-6).to(kind)

    ours = _LayerNorm(None, kind)
    sizes = (2 * x.nbytes, 3 * x.nbytes)
    return {
        "torch": (theirs, [x, w, b], g, *sizes),
        "ours": (lambda: ours(x, (width,), w, b, 1e-6), [x, w, b], g, *sizes),
    }


def scaled_sum(shape: tuple[int, ...], half: bool) -> Ways:
    """The same for a residual whose branch is scaled."""
    kind, width = (torch.bfloat16 if half else torch.float32), shape[-1]
    x, residual = (
        torch.randn(shape, device="cuda", dtype=t).permute(0, 3, 1, 2).requires_grad_() for t in (kind, torch.float32)
    )
    scale = torch.randn(width, 1, 1, device="cuda", requires_grad=True)
    noise, g = torch.rand(1, 1, 1, 1, device="cuda"), torch.randn(shape, device="cuda").permute(0, 3, 1, 2)
    ours = LayerScaleSum(1, torch.float32)
    sizes = (x.nbytes + 2 * residual.nbytes, 2 * x.nbytes + g.nbytes)
    return {
        "torch": (lambda: (scale * x * noise).add_(residual), [x, scale, residual], g, *sizes),
        "ours": (lambda: ours(x, scale, noise, residual), [x, scale, residual], g, *sizes),
    }


def variants(rows: list[dict[str, Any]], write: Callable[[], None], end: float) -> None:
    """Our kernels cut otherwise."""
    modules: tuple[Any, ...] = (layer_norm_triton_kernels, layer_scale)
    tried = [(2048, 4, 1056), (2048, 4, 2112), (4096, 4, 1056), (4096, 8, 528), (8192, 8, 1056), (8192, 16, 528)]
    for cut in tried:
        for make in (layer_norm, scaled_sum):
            for shape in SHAPES[::2]:
                if time.time() > end:
                    return
                for m in modules:
                    m.TILE, m._WARPS, m.programs = cut[0], cut[1], partial(min, cut[2])
                rows.append(measured(make, shape, True, "ours") | {"tile, warps, programs": cut})
                write()


def measured(make: Callable[..., Any], shape: tuple[int, ...], half: bool, how: str) -> dict[str, Any]:
    run, inputs, g, forward_bytes, backward_bytes = make(shape, half)[how]
    forward, backward = both_ways(run, inputs, g)
    row = {
        "operation": make.__name__,
        "shape": list(shape),
        "precision": "bf16" if half else "float32",
        "how": how,
        "forward_ms": round(forward * 1e3, 4),
        "backward_ms": round(backward * 1e3, 4),
        "forward_TBps": round(forward_bytes / forward / 1e12, 2),
        "backward_TBps": round(backward_bytes / backward / 1e12, 2),
    }
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--sizes", action="store_true", help="other tiles, warps and numbers of programs too")
    given = parser.parse_args()
    end, rows = time.time() + given.seconds, []
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}

    def write() -> None:
        given.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")

    for half in (True, False):
        for shape in SHAPES:
            for make in (layer_norm, scaled_sum):
                for how in ("torch", "ours"):
                    if time.time() < end:
                        rows.append(measured(make, shape, half, how))
                        write()
    if given.sizes:
        variants(rows, write, end)


if __name__ == "__main__":
    main()
