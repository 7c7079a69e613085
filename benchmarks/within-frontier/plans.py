"""Plans for every case, from costs that were measured on the device, searched for wherever there is time.

A way is a share of the plain peak with what is allowed beside: "outcore 0.33 graphs reassociated". Share "least" is a
little above the smallest budget for which a plan was found.
"""

from __future__ import annotations

import copy
import gzip
import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from networks import build

import outcore
from outcore.cost.costs import Costs
from outcore.cost.rough import without_gaps
from outcore.graph import Graph
from outcore.machine import parse
from outcore.memory.fused_norm import norms_of
from outcore.memory.norm_choice import as_fused, worth_fusing
from outcore.planner.budget import Assignment, fit, smallest
from outcore.planner.keeping import Keeping

if TYPE_CHECKING:
    from run import Case

MARGIN, GRAPHS_MARGIN = 0.02, 0.2
"""What `within` leaves free of a budget on a GPU; with CUDA graphs, whose memory cannot be used again as freely."""


def ways_of(case: Case, shares: list[str]) -> list[str]:
    """What is planned for a case: small steps as CUDA graphs, large ones call by call; norms also fused."""
    norms = case.name not in ("vgg19", "convnext_tiny")
    ways = [f"outcore {s}{' graphs' if case.side <= 512 else ''}" for s in shares]
    return ways + [f"{way} reassociated" for way in ways if norms and "least" not in way]


def search(keeping: Keeping, share: str, search_s: float, beside: int) -> tuple[Assignment, int]:
    """The fastest assignment for a share of the plain peak, and its budget; `beside` is what graphs hold twice."""
    margin = GRAPHS_MARGIN if beside else MARGIN

    def room(budget: int) -> int:
        return int((1 - margin) * budget) - beside

    if share != "least":
        budget = int(float(share) * keeping.plain.peak_bytes)
        return fit(keeping, room(budget), time_limit_s=search_s), budget
    least = smallest(keeping, time_limit_s=search_s).outcome.peak_bytes
    budget = int((1.02 * least + beside) / (1 - margin))
    return fit(keeping, room(budget), time_limit_s=search_s), budget


def plan_case(
    case: Case, keeping: Keeping, shares: list[str], search_s: float, *, estimated: bool
) -> dict[str, tuple[Assignment, int]]:
    """All plans of a case."""
    with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
        here = outcore.capture(build(case.name), [(case.batch, 3, case.side, case.side)])
    graph, rate = replace(keeping.graph, executable=here.executable), keeping.memory_bytes_per_s
    costs = timed_by_shapes(here, keeping.costs) if estimated else keeping.costs
    keeping = Keeping(graph, costs, 0.0, keeping.tier, rate)
    fusible = norms_of(here, here.module.model)
    found = {}
    for way in ways_of(case, shares):
        use = copy.copy(keeping)
        _, share, *flags = way.split()
        if "graphs" in flags:
            use.tier = None
        if "reassociated" in flags:
            fused = worth_fusing(fusible, keeping.costs, rate, issued="graphs" not in flags)
            use = Keeping(graph, as_fused(keeping.costs, fused, rate), 0.0, use.tier, rate)
        found[way] = search(use, share, search_s, copied(keeping) if "graphs" in flags else 0)
        assignment, budget = found[way]
        least = assignment.outcome.peak_bytes / keeping.plain.peak_bytes
        slower, missed = assignment.outcome.time_s / keeping.plain_s, "" if assignment.fits(budget) else "  MISSED"
        print(f"{case.label} {way}: {least:.3f} at {slower:.3f}x{missed}", flush=True)
    return found


def copied(keeping: Keeping) -> int:
    """What CUDA graphs hold twice: gradients and inputs (`Graphed.copied_bytes`)."""
    first = keeping.plain.moments[0].bytes
    return first.weights + first.inputs


def timed_by_shapes(graph: Graph, costs: Costs) -> Costs:
    """Measured bytes with estimated times, where the device was shared while it was measured."""
    known = without_gaps(outcore.estimate(graph, parse("h200"))).calls
    times = {n: {"forward": known[n].forward, "backward": known[n].backward} for n in costs.calls if n in known}
    return replace(costs, calls={name: replace(cost, **times.get(name, {})) for name, cost in costs.calls.items()})


def read(folder: Path, case: Case) -> Keeping | None:
    """Costs that were kept."""
    path = folder / f"{case.label}.keeping"
    return pickle.loads(gzip.decompress(path.read_bytes())) if path.exists() else None


def plan_all(cases: list[Case], shares: list[str], search_s: float, out: Path, *, estimated: bool) -> None:
    """Search for all plans side by side, and write them after each case."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the searches need no device
    path = out / "plans.pickle.gz"
    found = pickle.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=context) as pool:
        futures = {}
        for case in cases:
            by_shapes = estimated and not case.bf16
            alone = replace(case, keeping=None)
            futures[case.label] = pool.submit(plan_case, alone, case.keeping, shares, search_s, estimated=by_shapes)
        for label, future in futures.items():
            found[label] = future.result()
            path.write_bytes(gzip.compress(pickle.dumps(found)))
