"""How even the stages really are: each stage of each cut is run by itself on this CPU, and its time and bytes measured.

    python benchmarks/partition-balance/measured.py          (from the root of the repository; some ten minutes)
    python benchmarks/partition-balance/measured.py --table  (the table, from the newest dated JSON)

The networks are the full ones on small images. Every call is measured alone (`outcore.measure`), both planners cut by
these costs, and then every stage runs forward and backward on what the stage before it really produced. Time is that of
the processor, one thread, the least of five runs. Bytes are counted while two micro-batches are in flight (GPipe):
living tensors at the peak, with parameters, their gradients and Adam's two states.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
# The machine may be shared: what other processes take must not count, in the costs of calls neither. The clock has to
# be set before anything that reads it is imported.
time.perf_counter = time.process_time

import torch
from run import sizes, torchgpipe_solver, torchvision, unet_plus_plus
from torch import Tensor, nn

import outcore
from outcore import models
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.graph import Graph, Subgraph
from outcore.planner import CallWeights, Pipeline, split
from outcore.planner.partition.units import find_units
from outcore.planner.partition.weighted_units import weigh

HERE = Path(__file__).parent
GPIPE = Pipeline("gpipe", 2)


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True), 12)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-110-v2": (models.ResNet110V2, (2, 3, 64, 64)),
    "AmoebaNet-D(18)": (models.AmoebaNetD, (2, 3, 64, 64)),
    "U-Net": (models.UNet, (2, 3, 48, 48)),
    "Inception-v3": (torchvision("inception_v3", init_weights=False, aux_logits=False), (2, 3, 107, 107)),
    "DenseNet-121": (torchvision("densenet121"), (2, 3, 64, 64)),
    "U-Net++": (unet_plus_plus, (2, 1, 64, 64)),
    "transformer, 12 layers": (transformer, (2, 64, 256)),
}

Values = dict[str, Tensor]
Known = dict[frozenset[str], tuple[float, int]]
"""Seconds and bytes of stages that have been run."""


def received(values: Values, graph: Graph, names: tuple[str, ...]) -> Values:
    """Values as a stage gets them: memory of its own, which it may also write into."""
    leaves = {n: values[n].detach() for n in names}
    return {
        n: t.requires_grad_(graph.values[n].requires_grad and t.is_floating_point()).clone() for n, t in leaves.items()
    }


def backward(outputs: Values) -> None:
    made = [t for t in outputs.values() if t.requires_grad]
    if made:
        torch.autograd.backward(made, [torch.full_like(t, 1e-3) for t in made])


def run_stage(stage: Subgraph, values: Values, graph: Graph) -> tuple[float, int]:
    """Seconds of a forward and backward, and peak bytes with two micro-batches in flight."""
    times = []
    for _ in range(5):
        inputs = received(values, graph, stage.inputs)
        begin = time.process_time()
        backward(stage(inputs))
        times.append(time.process_time() - begin)
        stage.zero_grad(set_to_none=True)
    owned = {t.untyped_storage().data_ptr(): t for t in (*stage.parameters(), *stage.buffers())}
    always = sum(t.numel() * t.element_size() for t in owned.values())
    state = 2 * sum(p.numel() * p.element_size() for p in stage.parameters() if p.requires_grad)
    with LiveBytes((*owned.values(), *values.values())) as live:
        flying = [stage(received(values, graph, stage.inputs)) for _ in range(GPIPE.micro_batches)]
        while flying:
            backward(flying.pop(0))
    stage.zero_grad(set_to_none=True)
    return min(times), live.peak + always + state


def run_cut(graph: Graph, stages: list[list[str]], given: Tensor, known: Known) -> dict[str, float]:
    values: Values = {graph.inputs[0]: given}
    rows = []
    for calls in stages:
        stage = graph.subgraph(calls)
        with torch.no_grad():
            values |= stage({name: values[name] for name in stage.inputs})
        if frozenset(calls) not in known:  # equal stages of both planners are measured once
            known[frozenset(calls)] = run_stage(stage, values, graph)
        rows.append(known[frozenset(calls)])
    times, peaks = [t for t, _ in rows], [b for _, b in rows]
    return {
        "slowest_s": max(times),
        "time_imbalance": max(times) * len(times) / sum(times),
        "peak_bytes": max(peaks),
        "memory_imbalance": max(peaks) * len(peaks) / sum(peaks),
    }


def compare(name: str, seconds: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    solve, model, given = torchgpipe_solver(), build().train(), torch.randn(shape)
    graph = outcore.capture(model, given)
    costs = outcore.measure(graph, "cpu", time_limit_s=seconds, runs=5)
    weights = CallWeights.of(graph, costs)
    pieces = weigh(graph, weights, find_units(graph, weights))
    rows = []
    known: Known = {}
    for count in (2, 4, 8):
        for balance in ("compute", "memory"):
            cut = split(graph, weights, stages=count, balance=balance, pipeline=GPIPE)
            figures = list(pieces.time_s) if balance == "compute" else sizes(pieces, GPIPE.micro_batches)
            ends = list(accumulate(len(block) for block in solve(figures, count)))
            units = [
                [c for u in pieces.units.units[a:b] for c in u.calls] for a, b in zip([0, *ends], ends, strict=False)
            ]
            ours = run_cut(graph, [list(s.calls) for s in cut.stages.stages], given, known)
            ours |= {"predicted_time": cut.time_imbalance, "predicted_memory": cut.memory_imbalance}
            ours |= {"unmeasured_calls": sum(c.time_source != "measured" for c in costs.calls.values())}
            what = {"network": name, "calls": len(graph.calls), "stages": count, "balance": balance}
            rows.append(what | {"ours": ours, "torchgpipe": run_cut(graph, units, given, known)})
            print(row_text(rows[-1]), flush=True)
    return rows


def row_text(row: dict[str, Any]) -> str:
    ours, theirs = row["ours"], row["torchgpipe"]
    goal = "slowest_s" if row["balance"] == "compute" else "peak_bytes"
    return (
        f"| {row['network']} | {row['stages']} | {row['balance']} | {ours['time_imbalance']:.2f} | "
        f"{theirs['time_imbalance']:.2f} | {ours['memory_imbalance']:.2f} | {theirs['memory_imbalance']:.2f} | "
        f"{ours[goal] / theirs[goal]:.2f} |"
    )


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--seconds", type=float, default=60.0, help="for measuring the calls of one network")
    parser.add_argument("--table", action="store_true", help="print the table of the newest dated JSON instead")
    options = parser.parse_args()
    print("| network | stages | cut by | time, ours | theirs | bytes, ours | theirs | largest, ours / theirs |")
    print("|---|---|---|---|---|---|---|---|")
    path = HERE / f"{datetime.date.today()}-measured.json"
    if options.table:
        newest = json.loads(max(HERE.glob("*-measured.json")).read_text())
        print("\n".join(row_text(row) for row in newest["rows"]))
        return
    environment = {"python": platform.python_version(), "torch": torch.__version__, "torchgpipe": "0.0.7", "threads": 1}
    for name in (n for n in NETWORKS if options.only in n):
        rows = compare(name, options.seconds)
        # Networks may be run one at a time: the others' rows stay.
        known = json.loads(path.read_text())["rows"] if path.is_file() else []
        rows = sorted(
            [r for r in known if r["network"] != name] + rows, key=lambda r: list(NETWORKS).index(r["network"])
        )
        document = {"date": str(datetime.date.today()), "environment": environment, "rows": rows}
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
