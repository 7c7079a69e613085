"""Norms as networks use them, from calls that were measured alone: samples for the calibration of the GPU.

    python benchmarks/step-prediction/norms.py benchmarks/conv-time/samples/2026-11-15-nvidia-h200 RESULT.json ...

The sweep of operations timed batch norms in bfloat16 with bfloat16 weights, in a warm cache. Under autocast the weights
stay float32, for which the library takes other kernels, and in a step the cache is cold. Calls of networks have both
right.
Layer norms are taken from float32 networks only: under autocast a cast is part of the call.
"""

from __future__ import annotations

import gzip
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import networks
from analytic import captured

from outcore.cost import Operation
from outcore.cost.describe import describe
from outcore.cost.saved import recording_of
from outcore.machine.clock import Timing

IN = {"BatchNorm2d": ("bf16", "tf32"), "LayerNorm": ("tf32",), "layer_norm": ("tf32",)}
PRECISIONS = {"bfloat16": "bf16", "float32": "tf32"}


def norms(path: Path) -> Iterator[tuple[Operation, Timing]]:
    """Every distinct norm of a result, in both directions."""
    calls = path.with_name(f"{path.stem}-calls.json.gz")
    for case in json.loads(gzip.decompress(calls.read_bytes())):
        lines = [line for line in case["calls"] if case["precision"] in IN.get(line["type"], ())]
        if not lines:
            continue
        graph = captured(networks.GPU[case["network"]], case)
        steps = {step.name: step for step in recording_of(graph).steps if step.kind != "guard"}
        for line in lines:
            step = steps.get(line["calls"][0] if "calls" in line else line["call"])
            operation = describe(graph, step, PRECISIONS.__getitem__) if step is not None else None
            if operation is not None:
                yield from _timed(operation, line)


def _timed(operation: Operation, line: dict[str, Any]) -> Iterator[tuple[Operation, Timing]]:
    for direction, of in (("forward", operation), ("backward", operation.backward())):
        if direction in line and line[direction][0] > 0:
            median_s, min_s, dispatch_s = line[direction]
            yield of, Timing(min_s, median_s, median_s, median_s, 10, dispatch_s)


def main() -> None:
    warnings.simplefilter("ignore")
    directory, *results = map(Path, sys.argv[1:])
    found: dict[Operation, Timing] = {}
    for result in results:
        for operation, timing in norms(result):
            found.setdefault(operation, timing)
    for dtype in ("bf16", "tf32"):
        with gzip.open(directory / f"sweep-{dtype}.jsonl.gz", "rt") as sweep:
            lines = [sweep.readline().strip()]
        lines += [json.dumps({"operation": o.to_json(), **asdict(t)}) for o, t in found.items() if o.dtype == dtype]
        text = "\n".join(lines) + "\n"
        (directory / f"norms-{dtype}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        print(dtype, len(lines) - 1)


if __name__ == "__main__":
    main()
