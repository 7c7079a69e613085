"""How even the stages are: this planner beside torchgpipe's balancing, on the same networks and the same costs.

    pip install --no-deps torchgpipe
    python benchmarks/partition-balance/run.py            (from the root of the repository; a few minutes on one core)

torchgpipe's `blockpartition.solve` is called as its `balance_by_time` and `balance_by_size` call it: on one number per
layer, in execution order. Its cuts and ours are then measured by the same ruler: time of the slowest stage over the
mean, and the largest peak of a rank (parameters, gradients, state, activations in flight, workspace) over the mean.
Nothing is trained: costs are estimated from shapes for a V100.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

import outcore
from outcore import models
from outcore.graph import Graph
from outcore.planner import CallWeights, Pipeline, split
from outcore.planner.partition.units import find_units
from outcore.planner.partition.weighted_units import WeightedUnits, weigh
from tests.foreign.shim import define_torchvision_operators
from tests.planner.shape_weights import weights_from_shapes

HERE = Path(__file__).parent


def torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        define_torchvision_operators()
        import torchvision.models

        return getattr(torchvision.models, name)(weights=None, **options)

    return build


def unet_plus_plus() -> nn.Module:
    define_torchvision_operators()
    from monai.networks.nets import BasicUNetPlusPlus

    return BasicUNetPlusPlus(spatial_dims=2, in_channels=1, out_channels=2)


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True), 12)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-110-v2": (models.ResNet110V2, (8, 3, 512, 512)),
    "AmoebaNet-D(18)": (models.AmoebaNetD, (8, 3, 224, 224)),
    "U-Net": (models.UNet, (8, 3, 512, 512)),
    "ReLayNet": (models.ReLayNet, (8, 1, 512, 512)),
    "Inception-v3": (torchvision("inception_v3", init_weights=False), (8, 3, 299, 299)),
    "DenseNet-121": (torchvision("densenet121"), (8, 3, 224, 224)),
    "U-Net++": (unet_plus_plus, (8, 1, 256, 256)),
    "transformer, 12 layers": (transformer, (8, 512, 1024)),
}


def torchgpipe_solver() -> Callable[[list[float], int], list[list[float]]]:
    """The solver alone: importing the package would import parts that no longer fit today's torch."""
    found = importlib.util.find_spec("torchgpipe")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("torchgpipe is not installed: pip install --no-deps torchgpipe")
    path = Path(found.submodule_search_locations[0]) / "balance" / "blockpartition.py"
    spec = importlib.util.spec_from_file_location("blockpartition", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.solve


def capture(name: str) -> tuple[Graph, CallWeights]:
    build, shape = NETWORKS[name]
    with torch.device("meta"):
        model = build()
    graph = outcore.capture(model, torch.empty(shape, device="meta"))
    return graph, weights_from_shapes(graph)


def sizes(pieces: WeightedUnits, in_flight: int) -> list[float]:
    """What a layer takes on its own, as torchgpipe counts: parameters and what belongs to them, and activations."""
    found = [0.0] * len(pieces)
    for _, nbytes, users in pieces.fixed:
        found[users[0]] += nbytes
    for _, nbytes, users in pieces.parameters:
        found[users[0]] += (2 + pieces.state_per_parameter) * nbytes
    for memory_use in pieces.memory_uses:
        for unit in memory_use.savers[:1]:
            found[unit] += in_flight * memory_use.bytes
    return found


def measure(pieces: WeightedUnits, stage_of: list[int], count: int, pipeline: Pipeline) -> dict[str, float]:
    stages = pieces.cut(stage_of, count)
    times = [s.forward_s + s.backward_s for s in stages.stages]
    peaks = pipeline.peak_bytes(stages)
    return {
        "slowest_s": max(times),
        "time_imbalance": max(times) * count / sum(times),
        "peak_bytes": max(peaks),
        "memory_imbalance": max(peaks) * count / sum(peaks),
        "message_bytes": sum(e.bytes * len(e.targets) * (1 + e.has_gradient) for e in stages.edges),
    }


def compare(name: str, solve: Callable[[list[float], int], list[list[float]]]) -> list[dict[str, Any]]:
    graph, weights = capture(name)
    pipeline = Pipeline("gpipe", 4)
    pieces = weigh(graph, weights, find_units(graph, weights)).scaled(1 / pipeline.pieces)
    rows = []
    for count in (2, 4, 8):
        for balance in ("compute", "memory"):
            costs = list(pieces.time_s) if balance == "compute" else sizes(pieces, pipeline.micro_batches)
            start = time.perf_counter()
            ends = list(accumulate(len(block) for block in solve(costs, count)))
            theirs_s = time.perf_counter() - start
            theirs = measure(pieces, [sum(i >= e for e in ends) for i in range(len(pieces))], count, pipeline)
            start = time.perf_counter()
            cut = split(graph, weights, stages=count, balance=balance, pipeline=pipeline, fraction=1 / pipeline.pieces)
            ours_s = time.perf_counter() - start
            placed = {call: k for k, stage in enumerate(cut.stages.stages) for call in stage.calls}
            ours = measure(pieces, [placed[u.calls[0]] for u in pieces.units.units], count, pipeline)
            rows.append(
                {
                    "network": name,
                    "calls": len(graph.calls),
                    "stages": count,
                    "balance": balance,
                    "ours": ours | {"seconds": ours_s, "how": cut.how},
                    "torchgpipe": theirs | {"seconds": theirs_s},
                }
            )
            print(row_text(rows[-1]), flush=True)
    return rows


def row_text(row: dict[str, Any]) -> str:
    key = "time_imbalance" if row["balance"] == "compute" else "memory_imbalance"
    goal = "slowest_s" if row["balance"] == "compute" else "peak_bytes"
    ours, theirs = row["ours"], row["torchgpipe"]
    return (
        f"| {row['network']} ({row['calls']} calls) | {row['stages']} | {row['balance']} | {ours[key]:.3f} | "
        f"{theirs[key]:.3f} | {ours[goal] / theirs[goal]:.3f} |"
    )


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--save", action="store_true", help="write a dated JSON beside this script")
    parser.add_argument("--table", type=Path, help="print the table of a saved JSON instead")
    options = parser.parse_args()
    print("| network | stages | balance | ours | torchgpipe | largest, ours / theirs |")
    print("|---|---|---|---|---|---|")
    if options.table:
        print("\n".join(row_text(row) for row in json.loads(options.table.read_text())["rows"]))
        return
    solve = torchgpipe_solver()
    rows = [row for name in NETWORKS if options.only in name for row in compare(name, solve)]
    if options.save:
        environment = {"python": platform.python_version(), "torch": torch.__version__, "torchgpipe": "0.0.7"}
        document = {"date": str(datetime.date.today()), "environment": environment, "rows": rows}
        (HERE / f"{datetime.date.today()}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
