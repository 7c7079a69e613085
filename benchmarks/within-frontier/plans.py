"""Plans for every case, from costs that were measured on the device, searched for wherever there is time.

    python plans.py --costs DIR --out plans.json.gz [--only resnet50-1x4096-tf32] [--shares 0.5,0.33,least]

A way is a share of the plain peak with what is allowed beside: "outcore 0.33 graphs reassociated", in TF32 also with
images turned inside the network, "outcore 0.33 channels_last reassociated", from costs of their own. Share "least" is a
little above the smallest budget for which a plan was found. What a peer takes is a share too (`PEERS`). What CUDA
graphs reserve is more than what they hold, by how much is seen only when they are recorded; so they have several plans
for one budget, which leave more and more of it free: "outcore 0.5 graphs /0.9" plans for nine tenths.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import Case, cases_of
from networks import build

from outcore.graph import Graph
from outcore.memory.op_fusion.select import SelectedFusions
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.search import Assignment, fit, smallest

MARGIN = 0.02
"""What `within` leaves free of a budget on a GPU."""
LADDER = ("0.95", "0.88", "0.8")
"""What plans for CUDA graphs use of a budget, one after the other, until one keeps to it."""
PEERS = {
    "vgg19-1x4096-tf32": ["0.55"],
    "densenet121-1x4096-tf32": ["0.21"],
    "densenet121-1x4096-bf16": ["0.21"],
    "unet-1x4096-bf16": ["0.62"],
    "convnext_tiny-1x4096-tf32": ["0.23"],
    "convnext_tiny-1x4096-bf16": ["0.3", "0.23"],
    "vgg19-32x224-tf32": ["0.7"],
    "vgg19-32x224-bf16": ["0.75"],
    "densenet121-32x224-tf32": ["0.24"],
    "densenet121-32x224-bf16": ["0.27"],
    "convnext_tiny-32x224-tf32": ["0.29"],
    "convnext_tiny-32x224-bf16": ["0.4"],
}
"""What a peer takes, where that is far from a half and a third."""
GRAPHED = ("resnet50", "inception_v3", "densenet121", "convnext_tiny")
"""Networks of so many short calls that the interpreter is near the limit on one large image in bf16 too."""


def ways_of(case: Case, shares: list[str]) -> list[str]:
    """What is planned for a case: small steps as CUDA graphs, large ones call by call, some both; norms also fused."""
    every = shares + [s for s in PEERS.get(case.label, []) if s not in shares and shares]
    kinds = ["", " reassociated"] + ([] if case.bf16 else [" channels_last reassociated"])
    both = case.bf16 and case.name in GRAPHED
    called = [] if case.small else [f"outcore {share}{norms}" for norms in kinds for share in every]
    graphed = every if case.small else [share for share in shares if share != "least"] if both else []
    ladder = LADDER if case.small else LADDER[:2]
    ways = called + [
        f"outcore {share} graphs{norms} /{part}"
        for norms in kinds
        for share in graphed
        for part in (ladder[-1:] if share == "least" else ladder)
    ]
    return [way for way in ways if "least" not in way or "reassociated" not in way]


def search(keeping: StepModel, share: str, plain_bytes: int, search_s: float, used: float) -> tuple[Assignment, int]:
    """The fastest assignment that uses a part of a budget, which is a share of the plain peak; and the budget."""
    if share != "least":
        budget = int(float(share) * plain_bytes)
        return fit(keeping, int(used * budget), time_limit_s=search_s), budget
    found = smallest(keeping, time_limit_s=search_s)
    least, lower = found.outcome.peak_bytes, found.outcome.peak_bytes
    while lower <= least:  # a search for a little less may find more than one for nothing at all
        least = lower
        lower = fit(keeping, int(0.95 * least), time_limit_s=search_s).outcome.peak_bytes
        lower = lower if lower < 0.99 * least else least + 1
    budget = int(1.02 * least / used)
    return fit(keeping, int(used * budget), time_limit_s=search_s), budget


def ready(case: Case, keeping: StepModel, turned: bool) -> tuple[Graph, StepModel]:
    """A recording of the network, and its costs."""
    with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
        here = case.graph(build(case.name), (case.batch, 3, case.side, case.side), turned)
    graph = replace(keeping.graph, executable=here.executable)
    return graph, StepModel(graph, keeping.costs, 0.0, keeping.tier, keeping.memory_bytes_per_s)


def plan_case(
    case: Case, known: dict[bool, StepModel], ways: list[str], search_s: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The plans of a case: policies, and what is expected of them; from costs as images come, and turned."""
    made = {turned: ready(case, keeping, turned) for turned, keeping in known.items()}
    plain = made[False][1]
    hopeless: set[str] = set()
    for way in ways:
        if way.partition(" /")[0] in hopeless:
            continue  # with less there is no plan either
        _, share, *flags = way.partition(" /")[0].split()
        graphs, turned = "graphs" in flags, "channels_last" in flags
        if turned not in made:
            continue
        graph, keeping = made[turned]
        taken, rate = keeping.costs, keeping.memory_bytes_per_s
        if "reassociated" in flags:
            model, device = graph.module.model, torch.device("cuda")
            fused = SelectedFusions.worth_it(graph, model, taken, rate, device, issued=not graphs)
            graph, taken = fused.applied(graph, model, taken, rate)
        use = StepModel(graph, taken, 0.0, keeping.tier, rate, draws=not graphs)
        if graphs:
            standing(use)
        begun, used = time.time(), float(way.partition(" /")[2] or 1 - MARGIN)
        assignment, budget = search(use, share, plain.plain.peak_bytes, search_s, used)
        row = described(use, assignment, budget, plain) | {"used": used}
        peak, floor = (row[name] / plain.plain.peak_bytes for name in ("predicted_peak", "floor"))
        missed, took = "" if row["predicted_peak"] <= used * budget else "  MISSED", time.time() - begun
        told = f"{peak:.3f} at {row['predicted_slowdown']:.3f}x{missed}, floor {floor:.3f} ({took:.0f} s)"
        print(f"{case.label} {way}: {told}", flush=True)
        hopeless |= {way.partition(" /")[0]} if missed else set()
        yield way, row


def described(keeping: StepModel, assignment: Assignment, budget: int, plain: StepModel) -> dict[str, Any]:
    """A plan as it is written."""
    outcome, (floor, at) = assignment.outcome, keeping.floor
    moment, moved = keeping.plain.moments[at], outcome.transfers
    return {
        "policy": dict(assignment.policy),
        "budget": budget,
        "predicted_peak": outcome.peak_bytes,
        "predicted_slowdown": outcome.time_s / plain.plain_s,
        "predicted_plain_ms": plain.plain_s * 1e3,
        "predicted_plain_peak": plain.plain.peak_bytes,
        "offloaded": moved.bytes if moved is not None else 0,
        "stall_ms": moved.stall_s * 1e3 if moved is not None else 0.0,
        "again_ms": sum(keeping.buffers[n].again_s for n in outcome.recomputed) * 1e3,
        "floor": floor,
        "floor_at": f"{moment.phase} of {moment.call}",
    }


def standing(keeping: StepModel) -> None:
    """CUDA graphs have gradients from the beginning, each a moment in two places, and inputs twice."""
    there = np.array([moment.bytes.gradients for moment in keeping.plain.moments])
    copied = np.maximum(np.diff(there, prepend=0), 0)
    keeping.base = keeping.base + there.max() - there + copied + keeping.plain.moments[0].bytes.inputs


def read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Case -> way -> plan."""
    return json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--costs", type=Path, required=True, help="a folder that costs.py has written")
    parser.add_argument("--out", type=Path, required=True, help="plans that are there already are kept")
    parser.add_argument("--only", default="")
    parser.add_argument("--sizes", default="1x4096,32x224")
    parser.add_argument("--shares", default="0.5,0.33,least")
    parser.add_argument("--ways", default="", help="only ways that end so, as '0.5,0.33 reassociated'")
    parser.add_argument("--search-s", type=float, default=10.0)
    args = parser.parse_args()
    for case in cases_of(args.only, args.sizes):
        keeping = case.costs(args.costs)
        if keeping is None:
            print(f"{case.label}: no costs", flush=True)
            continue
        ends = tuple(args.ways.split(","))
        ways = [way for way in ways_of(case, args.shares.split(",")) if way.partition(" /")[0].endswith(ends)]
        turned = case.costs(args.costs, turned=True)
        costs = {False: keeping} | ({True: turned} if turned is not None else {})
        for way, plan in plan_case(case, costs, ways, args.search_s):
            known = read(args.out)
            known.setdefault(case.label, {})[way] = plan
            args.out.write_bytes(gzip.compress(json.dumps(known).encode()))


if __name__ == "__main__":
    main()
