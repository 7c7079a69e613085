"""How memory grows with the length: what attention over an LSTM holds is T² N plain and 2 T N when it is made again.

    python benchmarks/echo-recompute/scaling.py --plan plans.json                    # searches; needs no device
    python benchmarks/echo-recompute/scaling.py --plans plans.json --out results/2026-11-16-h200-scaling.json

For every length the planner is asked for the least memory without a tier below the device. Measured are the bytes held
between forward and backward (what is allocated after forward, less what was before it), the peak of the step, and
whether the gradients are those of plain training bit for bit. Nothing is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from workloads import Workload, loss_of

from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.rough import by_bytes
from outcore.graph import Graph, capture
from outcore.graph.record.keys import key_of
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.settings import Settings
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.search import fit
from outcore.program.policies import Policies

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BYTES_PER_S = 3.9e12
"""Of the device's memory: all operations are weighed by their bytes."""


def searched(workload: Workload, seconds: float) -> Policies:
    """The plan with the least memory that was found."""
    model, args, kwargs = workload.make("cpu")
    graph = capture(model, args, kwargs)
    keeping = StepModel(graph, by_bytes(account(graph), BYTES_PER_S), 0.0, None, BYTES_PER_S)
    found = fit(keeping, keeping.plain.peak_bytes // 10, time_limit_s=seconds)
    return dict(found.policy)


def govern(model: torch.nn.Module, graph: Graph, args: Any, kwargs: Any, policy: Policies) -> None:
    """As `outcore.within` does with a plan by hand."""
    settings = Settings(None, OptimizerCost.of(0.0, DEVICE), policy=dict(policy))
    governor = ManagedForward(model, settings, by_bytes(account(graph), BYTES_PER_S))
    governor.admit(key_of(model, args, kwargs), args, kwargs, graph=graph)
    model.__dict__["forward"] = governor


def step(model: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Bytes held and the peak of a step, beside weights and gradients; and the gradients."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # there before, so that they are not counted
    gc.collect()
    before = allocated()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss = loss_of(model(*args, **kwargs))
    held = allocated() - before
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0
    return {"held": held, "peak": peak, "gradients": [p.grad.cpu() for p in model.parameters()]}


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def measured(workload: Workload, policy: Policies) -> dict[str, Any]:
    """Plain and planned, at one length."""
    model, args, kwargs = workload.make(DEVICE)
    step(model, args, kwargs)  # libraries take their workspace
    plain = step(model, args, kwargs)
    graph = capture(model, args, kwargs)
    govern(model, graph, args, kwargs, policy)
    step(model, args, kwargs)
    ours = step(model, args, kwargs)
    same = [torch.equal(a, b) for a, b in zip(plain.pop("gradients"), ours.pop("gradients"), strict=True)]
    row = {"batch": workload.batch, "length": workload.length, "hidden": workload.hidden}
    return row | {"plain": plain, "ours": ours, "equal": f"{sum(same)}/{len(same)}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="50,100,200,400")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--search-s", type=float, default=8.0)
    parser.add_argument("--plan", type=Path, help="search, and write the plans here")
    parser.add_argument("--plans", type=Path, help="what --plan has written")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    workloads = [Workload("lstm attention", args.batch, int(t), args.hidden) for t in args.lengths.split(",")]
    plans: dict[str, dict[str, str]] = json.loads(args.plans.read_text()) if args.plans else {}
    rows = []
    for workload in workloads:
        start = time.time()
        if args.plan is not None:
            plans[str(workload.length)] = searched(workload, args.search_s)
            args.plan.write_text(json.dumps(plans))
            print(workload.length, len(plans[str(workload.length)]), f"{time.time() - start:.0f} s", flush=True)
            continue
        rows.append(measured(workload, plans[str(workload.length)]))
        print(json.dumps(rows[-1]), f"{time.time() - start:.0f} s", flush=True)
        environment = {
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
            "torch": torch.__version__,
        }
        args.out.write_text(json.dumps({"environment": environment, "scaling": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
