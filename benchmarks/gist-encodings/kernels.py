"""What each kernel of the encodings costs, beside torch's own operations: time, and the rate at which bytes pass.

    python benchmarks/gist-encodings/kernels.py --out results/2026-11-16-h200-kernels.json

On the first ReLU and pool of VGG-19 at 64x224 (64 x 64 x 224 x 224 numbers); the best of 20 launches each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from outcore.kernels import bitmask as bits
from outcore.kernels import byte_index_pool as pools
from outcore.kernels import sparse_quantize as numbers
from outcore.kernels.pool_window import PoolWindow
from outcore.ops.recompute_encode import GROUP

SHAPE = (64, 64, 224, 224)
Row = tuple[str, Callable[[], Any], float]


def best_ms(work: Callable[[], Any], count: int = 20) -> float:
    found = []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # the host is ahead, so that its own time does not count
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return min(found)


def relus() -> Iterator[Row]:
    x = torch.randn(SHAPE, device="cuda")
    count, out = x.numel(), torch.empty_like(x)
    packed = torch.empty(count // 8, dtype=torch.uint8, device="cuda")
    yield "copy", lambda: out.copy_(x), 8 * count
    yield "ReLU, torch", lambda: torch.relu(x), 8 * count
    yield "ReLU with its bits", lambda: bits.rectify(x, out, packed), 8.125 * count
    yield "its backward, torch", lambda: torch.ops.aten.threshold_backward(x, out, 0), 12 * count
    yield "its backward by bits", lambda: bits.through(x, packed, out), 8.125 * count


def poolings() -> Iterator[Row]:
    for kernel, padding in ((2, 0), (3, 1)):
        for last in (False, True):
            form = torch.channels_last if last else torch.contiguous_format
            x = torch.randn(SHAPE, device="cuda").contiguous(memory_format=form)
            window = PoolWindow((kernel,) * 2, (2, 2), (padding,) * 2, (1, 1), SHAPE[2:])
            y, indices = F.max_pool2d(x, kernel, 2, padding, return_indices=True)
            places, back = torch.empty_like(y, dtype=torch.uint8), torch.empty_like(x)
            whole, part = 4 * x.numel(), y.numel()
            name = f"max pool {kernel} by 2{', channels last' if last else ''}"
            own = torch.ops.aten.max_pool2d_with_indices_backward
            shape = ([kernel] * 2, [2, 2], [padding] * 2, [1, 1], False, indices)
            yield f"{name}, torch", lambda: F.max_pool2d(x, kernel, 2, padding, return_indices=True), whole + 12 * part  # noqa: B023
            yield f"{name}, a byte each", lambda: pools.pool(x, y, places, window, last=last), whole + 5 * part  # noqa: B023
            yield f"{name}, backward, torch", lambda: own(y, x, *shape), whole + 12 * part  # noqa: B023
            unpool = partial(pools.unpool, y, places, back, window, last=last)
            yield f"{name}, backward by bytes", unpool, whole + 5 * part


def packings() -> Iterator[Row]:
    x = torch.randn(SHAPE, device="cuda").relu_().flatten()
    count, out = x.numel(), torch.empty_like(x)
    codes = torch.empty(count, dtype=torch.uint8, device="cuda")
    low, scale = torch.empty(2, count // GROUP, device="cuda").unbind(0)
    tiny = torch.finfo(torch.float32).tiny
    yield (
        "8 bits in groups",
        lambda: numbers.quantise(x, codes, low, scale, levels=255, group=GROUP, tiny=tiny),
        5 * count,
    )
    yield (
        "8 bits in groups, back",
        lambda: numbers.dequantise(codes, low, scale, out, levels=255, group=GROUP),
        5 * count,
    )
    quarter, some = codes[: count // 2], {"levels": 15, "group": GROUP}
    yield "4 bits in groups", lambda: numbers.quantise(x, quarter, low, scale, tiny=tiny, **some), 4.5 * count
    yield "4 bits in groups, back", lambda: numbers.dequantise(quarter, low, scale, out, **some), 4.5 * count
    half = x.half()
    yield "to half, torch", lambda: x.half(), 6 * count
    yield "from half, torch", lambda: half.float(), 6 * count
    yield "from half", lambda: numbers.widen(half, out), 6 * count
    words, packed = x.view(torch.int32), torch.empty(count // 8, dtype=torch.uint8, device="cuda")
    ends = numbers.survey(words, packed)
    values, target = words.new_empty(int(ends[-1])), out.view(torch.int32)
    there = 4 * values.numel()
    yield "not zero: bits and counts", lambda: numbers.survey(words, packed), 4.125 * count
    yield "not zero: moved together", lambda: numbers.gather(words, ends, values), 4 * count + there
    yield "not zero: back", lambda: numbers.scatter(packed, values, ends, target), 4.125 * count + there


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    args = parser.parse_args()
    environment = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": list(SHAPE)}
    rows = []
    for part in (relus, poolings, packings):
        for name, work, moved in part():
            work()
            ms = best_ms(work)
            rows.append({"kernel": name, "ms": ms, "bytes": moved})
            print(f"{name:45} {ms:7.3f} ms {moved / ms / 1e9:6.2f} TB/s", flush=True)
            args.out.write_text(json.dumps({"environment": environment, "kernels": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
