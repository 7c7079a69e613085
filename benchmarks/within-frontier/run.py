"""Step time against peak memory: plain PyTorch, outcore.within at several budgets, and the peers, in one run.

    python benchmarks/within-frontier/run.py --out results/ [--models resnet50,unet] [--sizes 32x224,1x4096]

A step is forward, loss, backward and an SGD step. The peak is the allocator's own; the time is the median of steps
timed with CUDA events. Every row is one way of training the same weights on the same batch.

So that the device waits little, it goes in three passes: the costs of all cases are measured, then all plans are
searched for in parallel on the processor (as `within` does, with the same limits), then all ways are timed, with
nothing beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import gzip
import json
import multiprocessing
import os
import pickle
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from networks import NAMES, Training, build, checkpoint_blocks, side_for

import outcore
from outcore.cost.costs import Costs
from outcore.cost.optimizer import OptimizerCost
from outcore.cost.rough import without_gaps
from outcore.graph import Graph, capture
from outcore.graph.capture import arguments_as_called
from outcore.graph.keys import key_of
from outcore.memory.governor import Governor, Settings
from outcore.memory.rates import measured_tier, memory_rate
from outcore.planner.budget import Assignment, fit, smallest
from outcore.planner.keeping import Keeping

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARGIN = 0.02
"""What `within` leaves free of a budget on a GPU."""


def planned(keeping: Keeping, share: float, search_s: float) -> tuple[Assignment, int]:
    """The fastest assignment for a share of the plain peak (0: the smallest that is found), and its budget."""
    if share:
        budget = int(share * keeping.plain.peak_bytes)
        return fit(keeping, int((1 - MARGIN) * budget), time_limit_s=search_s), budget
    least = smallest(keeping, time_limit_s=search_s).outcome.peak_bytes
    budget = int(1.02 * least / (1 - MARGIN))
    return fit(keeping, int((1 - MARGIN) * budget), time_limit_s=search_s), budget


@dataclass
class Ready:
    """A plan that is there already."""

    value: tuple[Assignment, int]

    def result(self) -> tuple[Assignment, int]:
        return self.value


@dataclass
class Case:
    """One network at one size in one precision."""

    name: str
    batch: int
    side: int
    bf16: bool
    costs: Costs | None = None
    keeping: Keeping | None = None
    plans: dict[str, Future[tuple[Assignment, int]] | Ready] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.original = build(self.name)

    @property
    def key(self) -> dict[str, Any]:
        precision = "bf16 channels_last" if self.bf16 else "tf32"
        return {"model": self.name, "batch": self.batch, "side": self.side, "precision": precision}

    @property
    def label(self) -> str:
        return f"{self.name}-{self.batch}x{self.side}-{'bf16' if self.bf16 else 'tf32'}"

    def fresh(self) -> Training:
        """The same weights and images every time."""
        model = copy.deepcopy(self.original).to(DEVICE)
        torch.manual_seed(2)
        images = torch.randn(self.batch, 3, self.side, self.side, device=DEVICE)
        if self.bf16:
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
        return Training(model, images, self.bf16)

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=self.bf16):
            yield

    def measure(self, seconds: float) -> None:
        """Costs of every call."""
        training = self.fresh()
        with self.precision():
            graph = capture(training.model, (training.images,))
            self.costs = without_gaps(outcore.measure(graph, time_limit_s=seconds))
        device = training.images.device
        tier, rate = measured_tier(device), memory_rate(device)
        self.keeping = Keeping(graph, self.costs, 0.0, tier, rate)

    def managed(self, training: Training, graph: Graph, policy: dict[str, str], graphs: bool) -> Governor:
        """As `outcore.within`, with a plan that is there already; the table shows whether it keeps to its budget."""
        settings = Settings(None, OptimizerCost.of(0.0, DEVICE), 0, policy, graphs=graphs)
        governor = Governor(training.model, settings, self.costs)
        with self.precision():
            call = arguments_as_called(training.model, (training.images,))
            governor.admit(key_of(training.model, *call), *call, graph=graph)
        training.model.__dict__["forward"] = governor
        return governor


class Table:
    """The rows, written after each."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []
        self.environment = {
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "python": platform.python_version(),
            "outcore": outcore.__version__,
        }

    def add(self, case: Case, how: str, run: Callable[[], dict[str, Any]]) -> None:
        clean()
        start = time.time()
        try:
            row = {**case.key, "how": how, **run()}
        except torch.OutOfMemoryError:
            row = {**case.key, "how": how, "error": "out of memory"}
        except Exception as error:
            row = {**case.key, "how": how, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        row["wall_s"] = round(time.time() - start, 1)
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.path.write_text(json.dumps({"environment": self.environment, "rows": self.rows}, indent=1) + "\n")
        clean()


def clean() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def ours(case: Case, graph_of: list[Graph], how: str) -> dict[str, Any]:
    """Under outcore, by the plan that was found."""
    assert case.keeping is not None
    assignment, budget = case.plans[how].result()
    floor, at = case.keeping.floor
    transfers = assignment.outcome.transfers
    facts = {
        "budget": budget,
        "predicted_peak": assignment.outcome.peak_bytes,
        "predicted_slowdown": assignment.outcome.time_s / case.keeping.plain_s,
        "predicted_plain_ms": case.keeping.plain_s * 1e3,
        "predicted_plain_peak": case.keeping.plain.peak_bytes,
        "offloaded": transfers.bytes if transfers is not None else 0,
        "stall_ms": transfers.stall_s * 1e3 if transfers is not None else 0.0,
        "again_ms": sum(case.keeping.buffers[n].again_s for n in assignment.outcome.recomputed) * 1e3,
        "floor": floor,
        "floor_at": " of ".join((case.keeping.plain.moments[at].phase, case.keeping.plain.moments[at].call)),
    }
    if not assignment.fits(int((1 - MARGIN) * budget)):
        return {**facts, "error": "no plan was found within this budget"}
    training = case.fresh()
    if not graph_of:
        with case.precision():
            graph_of.append(capture(training.model, (training.images,)))
    graph = graph_of[0]
    training.model = graph.module.model  # what was recorded is what runs
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-6)
    governor = case.managed(training, graph, dict(assignment.policy), graphs="graphs" in how)
    kinds: dict[str, int] = {}
    for policy in governor.plan.policy.values():
        kinds[policy] = kinds.get(policy, 0) + 1
    try:
        return {**facts, **training.measured(), "policies": kinds}
    finally:
        del training.model.__dict__["forward"]


def checkpointed(case: Case) -> dict[str, Any]:
    training = case.fresh()
    checkpoint_blocks(case.name, training.model)
    return training.measured(warm=2, least=3, seconds=0.4)


def saved_on_cpu(case: Case) -> dict[str, Any]:
    training = case.fresh()
    inner = training.step

    def step() -> None:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            inner()

    training.step = step  # type: ignore[method-assign]
    return training.measured(warm=1, least=2, seconds=0.2)


def compiled(case: Case, budget: float) -> dict[str, Any]:
    import torch._functorch.config as config

    torch._dynamo.reset()
    config.activation_memory_budget = budget
    training = case.fresh()
    training.model = torch.compile(training.model)
    start = time.time()
    training.step()
    return {"compile_s": round(time.time() - start, 1), **training.measured()}


def equal(case: Case) -> dict[str, Any]:
    """Gradients at half of the memory beside those of plain training, which may itself differ from run to run."""
    torch.backends.cudnn.deterministic = True
    try:
        want, again = case.fresh().gradients(), case.fresh().gradients()
        training = case.fresh()
        with case.precision():
            graph = capture(training.model, (training.images,))
        assignment, _ = case.plans["outcore 0.5"].result()
        case.managed(training, graph, dict(assignment.policy), graphs=False)
        got = training.gradients()
    finally:
        torch.backends.cudnn.deterministic = False
    same = sum(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    control = sum(torch.equal(a, b) for a, b in zip(want, again, strict=True))
    return {"parameters": len(want), "bitwise_equal": same, "plain_again_equal": control}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--name", default="frontier")
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--sizes", default="32x224,1x4096")
    parser.add_argument("--precisions", default="tf32,bf16")
    parser.add_argument("--skip", default="", help="cases to leave out, as 32x224-bf16")
    parser.add_argument("--only", default="", help="only these cases, as resnet50-1x4096-tf32")
    parser.add_argument("--peers", default="checkpoint,save_on_cpu,equal", help="also: graphs, recompute, compile0.5")
    parser.add_argument("--peers-of", default="", help="only for these cases, as resnet50-1x4096-tf32, if given")
    parser.add_argument("--shares", default="0.5,0.33,0")
    parser.add_argument("--measure-s", type=float, default=2.0)
    parser.add_argument("--search-s", type=float, default=4.0)
    parser.add_argument("--keep-costs", action="store_true", help="write what the plans are searched from")
    parser.add_argument("--costs", type=Path, help="a folder that --keep-costs has written on this device")
    parser.add_argument("--plans", type=Path, help="plans that were searched for with --costs and --plan-only")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further case is begun after this")
    args = parser.parse_args()
    started = time.time()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shares = [float(s) for s in args.shares.split(",")]
    cases = [
        Case(name, int(size.split("x")[0]), side_for(name, int(size.split("x")[1])), precision == "bf16")
        for size in args.sizes.split(",")
        for name in args.models.split(",")
        for precision in args.precisions.split(",")
        if f"{size}-{precision}" not in args.skip.split(",")
    ]
    if args.only:
        cases = [case for case in cases if case.label in args.only.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    table = Table(args.out / f"{time.strftime('%Y-%m-%d')}-h200-{args.name}.json")
    for case in cases:
        if args.costs is not None:
            if not (args.costs / f"{case.label}.keeping").exists():
                continue  # plain and peers alone
            case.keeping = pickle.loads(gzip.decompress((args.costs / f"{case.label}.keeping").read_bytes()))
            case.costs = case.keeping.costs
            continue
        case.measure(args.measure_s)
        clean()
    print(f"measured after {time.time() - started:.0f} s", flush=True)
    if args.keep_costs:
        for case in cases:
            (args.out / f"{case.label}.keeping").write_bytes(gzip.compress(pickle.dumps(case.keeping)))
    if args.plans is not None:
        found = pickle.loads(gzip.decompress(args.plans.read_bytes()))
        for case in cases:
            case.plans = {how: Ready(result) for how, result in found.get(case.label, {}).items()}
    else:
        search_all(cases, shares, args)
    if args.plan_only:
        found = {case.label: {how: plan.result() for how, plan in case.plans.items()} for case in cases}
        (args.out / "plans.pickle.gz").write_bytes(gzip.compress(pickle.dumps(found)))
        for label, plans in found.items():
            for how, (assignment, budget) in plans.items():
                print(label, how, f"{assignment.outcome.peak_bytes / 2**30:.2f} of {budget / 2**30:.2f} GiB")
        return
    print(f"planned after {time.time() - started:.0f} s", flush=True)
    for case in cases:
        if time.time() - started > args.seconds:
            print("the time is up", flush=True)
            break
        run_case(case, table, args)
    print(f"done after {time.time() - started:.0f} s", flush=True)


def search_all(cases: list[Case], shares: list[float], args: argparse.Namespace) -> None:
    """All plans, side by side on the processor."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the searches need no device
    workers = min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for case in cases:
            assert case.keeping is not None
            alone = copy.copy(case.keeping)
            alone.tier = None
            for share in shares:
                name = f"outcore {share or 'least'}"
                case.plans[name] = pool.submit(planned, case.keeping, share, args.search_s)
                if "recompute" in args.peers.split(",") and share and case.side > 512:
                    case.plans[f"{name} without offload"] = pool.submit(planned, alone, share, args.search_s)
                if "graphs" in args.peers.split(",") and share and case.side <= 512:
                    case.plans[f"{name} graphs"] = pool.submit(planned, alone, share, args.search_s)


def run_case(case: Case, table: Table, args: argparse.Namespace) -> None:
    """All ways of one case."""
    table.add(case, "plain", lambda: case.fresh().measured())
    graph_of: list[Graph] = []
    for how in case.plans:
        table.add(case, how, lambda how=how: ours(case, graph_of, how))
    graph_of.clear()
    for peer in args.peers.split(",") if not args.peers_of or case.label in args.peers_of.split(",") else ():
        if peer == "checkpoint":
            table.add(case, "checkpoint per block", lambda: checkpointed(case))
        elif peer == "save_on_cpu" and (case.side <= 512 or case.name == "resnet50"):  # tens of seconds elsewhere
            table.add(case, "save_on_cpu", lambda: saved_on_cpu(case))
        elif peer.startswith("compile"):
            budget = float(peer.removeprefix("compile"))
            table.add(case, f"compile budget {budget}", lambda budget=budget: compiled(case, budget))
        elif peer == "equal":
            table.add(case, "gradients at 0.5", lambda: equal(case))


if __name__ == "__main__":
    main()
