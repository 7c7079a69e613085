"""Adds to a result what `outcore.estimate` says of its cases: no device is needed, and nothing is run.

On the GPU the factors of a network's operations (`outcore.cost.measured.in_network_ratio`) come from the calls of all
other networks: no network is predicted by what was measured of it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import torch
import usage
from networks import captured

import outcore
from outcore.cost import Calibration
from outcore.cost.costs import Costs
from outcore.cost.predicted.estimate import estimate_optimizer
from outcore.cost.predicted.step_time import predict_step
from outcore.machine import Device, parse, remembered


def add_estimates(path: Path, only: list[str] | None = None) -> None:
    """Rewrite a result with `estimated_s` in each row, and print the errors by kind of call."""
    result = json.loads(path.read_text())
    cuda = "cuda" in path.stem
    device = parse("h200").devices[0] if cuda else remembered().devices[0]
    known = {}
    calls = path.with_name(f"{path.stem}-calls.json.gz")
    if calls.exists():
        rows = json.loads(gzip.decompress(calls.read_bytes()))
        known = {(r["network"], r["batch"], r["precision"]): r["calls"] for r in rows}
    chosen = networks.GPU if cuda else networks.CPU
    calibrations = _calibrations(path, device) if cuda else {}
    for row in result["rows"]:
        if "error" in row or (only and row["network"] not in only):
            continue
        key = (row["network"], row["batch"], row["precision"])
        graph = captured(chosen[row["network"]], row)
        known_to = {dtype: without(row["network"]) for dtype, without in calibrations.items()}
        costs = outcore.estimate(graph, device, calibrations=known_to)
        optimizer = estimate_optimizer(costs, device, torch.optim.Adam)
        row["estimated_s"] = predict_step(graph, costs, optimizer=optimizer).step_s
        real = row.get("measured_processor_s", row["measured_s"])
        errors = [f"{row[name] / real - 1:+.1%}" for name in ("predicted_s", "estimated_s")]
        print(f"{' '.join(map(str, key))}: {' '.join(errors)} of {real * 1e3:.1f} ms")
        print(_by_kind(costs, known.get(key, [])), flush=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _calibrations(path: Path, device: Device) -> dict[str, Callable[[str], Calibration]]:
    """By precision: for each network a calibration whose factors know all networks but this one."""
    results = [other for other in sorted(path.parent.glob("*-cuda*.json")) if usage.operations_path(other).exists()]
    calls = usage.used(results)
    shipped = {dtype: Calibration.shipped("NVIDIA H200", dtype) for dtype in ("bf16", "tf32")}
    return {dtype: usage.left_out(found, calls, device) for dtype, found in shipped.items() if found is not None}


def _by_kind(costs: Costs, measured: list[dict[str, Any]]) -> str:
    """Per kind of call: milliseconds measured and estimated, forward and backward."""
    sums: dict[str, list[float]] = {}
    for line in measured:
        row = sums.setdefault(line["type"], [0.0, 0.0, 0.0, 0.0])
        for i, direction in enumerate(("forward", "backward")):
            row[2 * i] += line["count"] * line.get(direction, [0.0])[0] * 1e3
    for kind, total in costs.by_kind().items():
        row = sums.setdefault(kind, [0.0, 0.0, 0.0, 0.0])
        row[1], row[3] = total.forward_s * 1e3, total.backward_s * 1e3
    rows = sorted(sums.items(), key=lambda item: -max(item[1]))[:8]
    return "\n".join(f"    {k:28} {a:8.2f} {b:8.2f}   {c:8.2f} {d:8.2f}" for k, (a, b, c, d) in rows)
