"""Operations as networks ran them, from the calls of results; and the factors that a calibration learns from them.

    python benchmarks/step-prediction/usage.py RESULT.json ...         writes RESULT-operations.jsonl.gz beside each
    python benchmarks/step-prediction/usage.py --fit RESULT.json ...   and fits them into the calibrations that ship

A line is one operation in one direction: what it took as a call, without what was moved beside it (casts, copies of
turned gradients; `outcore.cost.predicted.memory_traffic`) at the rate at which an estimate counts it.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import networks
from networks import captured

from outcore.cost import Calibration, Operation
from outcore.cost.measured.in_network_ratio import STREAMED, OperationUse, fit_usage, predicted_alone
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.calibration import file_name
from outcore.cost.predicted.describe import describe
from outcore.cost.predicted.memory_traffic import MemoryTraffic
from outcore.machine import Device, parse

PRECISIONS = {"bfloat16": "bf16", "float32": "tf32", "int64": "tf32", "bool": "tf32"}
SHARE = 0.3
"""Of a call's time that must be the operation's own, else it says nothing of the operation."""
SHIPPED = Path(__file__).parents[2] / "src" / "outcore" / "cost" / "calibrations"


def operations_path(result: Path) -> Path:
    return result.with_name(f"{result.stem}-operations.jsonl.gz")


def extract(result: Path, device: Device) -> None:
    """Write the operations of all calls of a result."""
    calls = json.loads(gzip.decompress(result.with_name(f"{result.stem}-calls.json.gz").read_bytes()))
    lines: list[str] = []
    for case in calls:
        if case["calls"]:
            lines += (json.dumps(line) for line in _operations(case, device))
            print(*(case[name] for name in ("network", "batch", "precision")), len(lines), flush=True)
    operations_path(result).write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


def _operations(case: dict[str, Any], device: Device) -> Iterator[dict[str, Any]]:
    graph = captured(networks.GPU[case["network"]], case)
    costs = account(graph, "cuda")
    steps = graph.recording.calls()
    moves = MemoryTraffic(graph, costs, steps)
    for line in case["calls"]:
        name = line["calls"][0] if "calls" in line else line["call"]
        if name not in steps:
            continue
        as_float32 = moves.in_float32(name)
        forward = describe(graph, steps[name], lambda t, up=as_float32: "tf32" if up else PRECISIONS.get(t, "fp32"))
        if forward is None:
            continue
        for operation, moved in zip((forward, forward.backward()), moves.bytes_of(name), strict=True):
            if operation.direction in line:
                moved_s = moved / (STREAMED * device.bandwidth_bytes_per_s) + device.launch_s if moved else 0.0
                yield {
                    **{key: case[key] for key in ("network", "batch", "precision")},
                    "count": line["count"],
                    "operation": operation.to_json(),
                    "call_s": line[operation.direction][0],
                    "moved_s": moved_s,
                }


def used(results: Iterable[Path]) -> list[OperationUse]:
    """What networks ran, each operation of a network once; of several results the last counts."""
    found: dict[tuple[str, Operation], OperationUse] = {}
    for result in results:
        for text in gzip.decompress(operations_path(result).read_bytes()).decode().splitlines():
            line = json.loads(text)
            operation, own_s = Operation.from_json(line["operation"]), line["call_s"] - line["moved_s"]
            if own_s > SHARE * line["call_s"]:
                found[line["network"], operation] = OperationUse(operation, own_s, line["network"])
    return list(found.values())


def left_out(calibration: Calibration, calls: Iterable[OperationUse], device: Device) -> Callable[[str], Calibration]:
    """For each network the calibration with factors from all others."""
    known = predicted_alone(list(calls), calibration, device)

    @functools.cache
    def without(network: str) -> Calibration:
        others = [call for call in known if call.network != network]
        return replace(calibration, usage=fit_usage(others, calibration))

    return without


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--fit", action="store_true", help="fit what was written before into the calibrations")
    given = parser.parse_args()
    device = parse("h200").devices[0]
    if not given.fit:
        for result in given.results:
            extract(result, device)
        return
    calls = used(given.results)
    for dtype in ("bf16", "tf32"):
        path = SHIPPED / file_name("NVIDIA H200", dtype)
        calibration = left_out(Calibration.load(path), calls, device)("")
        calibration.save(path)
        for name, usage in calibration.usage.items():
            errors = ", ".join(f"{key} {error:.1%}" for key, error in usage.errors.items())
            print(f"{dtype} {name}: {usage.samples} calls, {errors}")


if __name__ == "__main__":
    main()
