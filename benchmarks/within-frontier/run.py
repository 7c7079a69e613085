"""Step time against peak memory: plain PyTorch, outcore.within at several budgets, and the peers, in one run.

    python benchmarks/within-frontier/run.py --out results/ [--models resnet50,unet] [--sizes 32x224,1x4096]

A step is forward, loss, backward and an SGD step. The peak is the allocator's own; the time is the median of steps
timed with CUDA events. Every row is one way of training the same weights on the same batch.

So that the device waits little, it can go in three runs: costs of all cases are measured (`--measure-only`), plans are
searched for wherever there is time (`--costs DIR --plan-only`), then all ways are timed, with nothing beside them
(`--costs DIR --plans FILE`). Without these options one run does all three.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import json
import pickle
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from networks import NAMES, Training, build, checkpoint_blocks, side_for
from plans import copied, plan_all, read

import outcore
from outcore.cost.buffers import buffers_of
from outcore.cost.optimizer import OptimizerCost
from outcore.cost.rough import without_gaps
from outcore.cost.saved import account
from outcore.errors import PlanError
from outcore.graph import Graph, capture
from outcore.graph.capture import arguments_as_called
from outcore.graph.keys import key_of
from outcore.memory.governor import Governor, Settings
from outcore.memory.rates import measured_tier, memory_rate
from outcore.planner.budget import Assignment
from outcore.planner.keeping import Keeping

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Case:
    """One network at one size in one precision."""

    name: str
    batch: int
    side: int
    bf16: bool
    keeping: Keeping | None = None
    plans: dict[str, tuple[Assignment, int]] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        precision = "bf16 channels_last" if self.bf16 else "tf32"
        return {"model": self.name, "batch": self.batch, "side": self.side, "precision": precision}

    @property
    def label(self) -> str:
        return f"{self.name}-{self.batch}x{self.side}-{'bf16' if self.bf16 else 'tf32'}"

    def fresh(self) -> Training:
        """The same weights and images every time."""
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = build(self.name)
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
            costs = without_gaps(outcore.measure(graph, time_limit_s=seconds))
        device = training.images.device
        self.keeping = Keeping(graph, costs, 0.0, measured_tier(device), memory_rate(device))

    def managed(self, training: Training, graph: Graph, policy: dict[str, str], how: str) -> Governor:
        """As `outcore.within`, with a plan that is there already; the table shows whether it keeps to its budget."""
        assert self.keeping is not None
        flags = {"graphs": "graphs" in how, "reassociated": "reassociated" in how}
        settings = Settings(None, OptimizerCost.of(0.0, DEVICE), 0, policy, **flags)
        governor = Governor(training.model, settings, self.keeping.costs)
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
    (assignment, budget), beside = case.plans[how], copied(case.keeping) if "graphs" in how else 0
    floor, at = case.keeping.floor
    transfers = assignment.outcome.transfers
    facts = {
        "budget": budget,
        "predicted_peak": assignment.outcome.peak_bytes + beside,
        "predicted_slowdown": assignment.outcome.time_s / case.keeping.plain_s,
        "predicted_plain_ms": case.keeping.plain_s * 1e3,
        "predicted_plain_peak": case.keeping.plain.peak_bytes,
        "offloaded": transfers.bytes if transfers is not None else 0,
        "stall_ms": transfers.stall_s * 1e3 if transfers is not None else 0.0,
        "again_ms": sum(case.keeping.buffers[n].again_s for n in assignment.outcome.recomputed) * 1e3,
        "floor": floor,
        "floor_at": " of ".join((case.keeping.plain.moments[at].phase, case.keeping.plain.moments[at].call)),
    }
    if facts["predicted_peak"] > budget:
        return {**facts, "error": "no plan was found within this budget"}
    training = case.fresh()
    if not graph_of:
        with case.precision():
            graph_of.append(capture(training.model, (training.images,)))
    graph = graph_of[0]
    training.model = graph.module.model  # what was recorded is what runs
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1e-6)
    try:
        governor = case.managed(training, graph, dict(assignment.policy), how)
    except PlanError:  # searched for without a device, where operations derive other things
        there = buffers_of(graph, account(graph))
        governor = case.managed(training, graph, {n: h for n, h in assignment.policy.items() if n in there}, how)
    kinds: dict[str, int] = {}
    for policy in governor.plan.policy.values():
        kinds[policy] = kinds.get(policy, 0) + 1
    (entry,) = governor.admitted.values()
    facts |= {"policies": kinds, "fused": len(entry.holding.instead), "planned_peak": governor.plan.peak_bytes + beside}
    try:
        warm = 4 if "reassociated" in how and "graphs" not in how else 2  # the first ones are watched
        return {**facts, **training.measured(warm=warm)}
    finally:
        del training.model.__dict__["forward"]


def checkpointed(case: Case) -> dict[str, Any]:
    training = case.fresh()
    checkpoint_blocks(case.name, training.model)
    return training.measured()


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
        assignment, _ = case.plans["outcore 0.5"]
        case.managed(training, graph, dict(assignment.policy), "")
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
    parser.add_argument("--only", default="", help="only these cases, as resnet50-1x4096-tf32")
    parser.add_argument(
        "--ways", default="", help="only the plans whose names end in one of these, as '0.5,0.33 graphs'"
    )
    parser.add_argument("--peers", default="checkpoint,save_on_cpu,equal", help="also: compile0.5")
    parser.add_argument("--shares", default="0.5,0.33,least")
    parser.add_argument("--measure-s", type=float, default=2.0)
    parser.add_argument("--measure-only", action="store_true", help="write what plans are searched from")
    parser.add_argument("--costs", type=Path, help="a folder that --measure-only has written on this device")
    parser.add_argument("--search-s", type=float, default=4.0)
    parser.add_argument("--plan-only", action="store_true", help="write plans.pickle.gz from --costs")
    parser.add_argument("--estimated", action="store_true", help="plan TF32 with times from shapes, bytes as measured")
    parser.add_argument("--plans", type=Path, help="what --plan-only has written")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further case is begun after this")
    args = parser.parse_args()
    started = time.time()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    cases = [
        Case(name, int(size.split("x")[0]), side_for(name, int(size.split("x")[1])), precision == "bf16")
        for size in args.sizes.split(",")
        for name in args.models.split(",")
        for precision in args.precisions.split(",")
    ]
    if args.only:
        order = args.only.split(",")
        cases = sorted((c for c in cases if c.label in order), key=lambda c: order.index(c.label))
    args.out.mkdir(parents=True, exist_ok=True)
    costs = args.costs
    if costs is None and (args.measure_only or args.shares):
        costs = args.out
        measure_all(cases, args, started)
    if args.measure_only:
        return
    for case in cases if costs is not None else ():
        case.keeping = read(costs, case)
    known = [case for case in cases if case.keeping is not None]
    plans = args.plans
    if args.plan_only or (plans is None and known):
        plans = args.out / "plans.pickle.gz"
        plan_all(known, args.shares.split(","), args.search_s, args.out, estimated=args.estimated)
    if args.plan_only:
        return
    found = pickle.loads(gzip.decompress(plans.read_bytes())) if plans is not None else {}
    for case in known:
        chosen = found.get(case.label, {})
        endings = tuple(args.ways.split(",")) if args.ways else ("",)
        case.plans = {way: plan for way, plan in chosen.items() if way.endswith(endings)}
    print(f"planned after {time.time() - started:.0f} s", flush=True)
    table = Table(args.out / f"{time.strftime('%Y-%m-%d')}-h200-{args.name}.json")
    for case in cases:
        if time.time() - started > args.seconds:
            print("the time is up", flush=True)
            break
        run_case(case, table, args)
    print(f"done after {time.time() - started:.0f} s", flush=True)


def measure_all(cases: list[Case], args: argparse.Namespace, started: float) -> None:
    """The costs of all cases, written after each."""
    for case in cases:
        if time.time() - started > args.seconds:
            break
        begun = time.time()
        try:
            case.measure(args.measure_s)
        except Exception as error:
            print(case.label, type(error).__name__, str(error)[:200], flush=True)
            clean()
            continue
        (args.out / f"{case.label}.keeping").write_bytes(gzip.compress(pickle.dumps(case.keeping)))
        print(f"{case.label} measured in {time.time() - begun:.1f} s", flush=True)
        case.keeping = None
        clean()


def run_case(case: Case, table: Table, args: argparse.Namespace) -> None:
    """All ways of one case."""
    table.add(case, "plain", lambda: case.fresh().measured())
    graph_of: list[Graph] = []
    for how in case.plans:
        table.add(case, how, lambda how=how: ours(case, graph_of, how))
    graph_of.clear()
    for peer in filter(None, args.peers.split(",")):
        if peer == "checkpoint":
            table.add(case, "checkpoint per block", lambda: checkpointed(case))
        elif peer == "save_on_cpu":
            table.add(case, "save_on_cpu", lambda: saved_on_cpu(case))
        elif peer.startswith("compile"):
            budget = float(peer.removeprefix("compile"))
            table.add(case, f"compile budget {budget}", lambda budget=budget: compiled(case, budget))
        elif peer == "equal":
            table.add(case, "gradients at 0.5", lambda: equal(case))


if __name__ == "__main__":
    main()
