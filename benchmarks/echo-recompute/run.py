"""How much less memory at no more than ten per cent more time: Echo's own question, on Echo's own models.

    python benchmarks/echo-recompute/run.py --out results/

So that the device waits little, costs can be kept (`--keep-costs`), plans searched for elsewhere (`--costs DIR
--plan-only`) and run (`--plans FILE`).

Echo (Zheng et al., ISCA 2020) recomputes what is cheap and large, above all the scores of attention over an LSTM, which
grow with the square of the length: 1.89x less memory on average, 3.13x at most. Here the planner is given several
budgets, and those plans run whose predicted time is at most 5, 10 and 20 % above plain.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import multiprocessing
import os
import pickle
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from workloads import TINY, WORKLOADS, Workload, loss_of

import outcore
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.rough import without_gaps
from outcore.graph import Graph, capture
from outcore.graph.record.keys import key_of
from outcore.memory.cuda_graphs.pool import give_back
from outcore.memory.offload.bandwidth import measured_tier, memory_rate
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.settings import Settings
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.search import Assignment, fit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def search(keeping: StepModel, share: float, seconds: float) -> Assignment:
    """The fastest assignment within a share of the plain peak."""
    return fit(keeping, int(0.98 * share * keeping.plain.peak_bytes), time_limit_s=seconds)


def allocated() -> int:
    """Bytes on the device."""
    gc.collect()
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


class Trial:
    """One model."""

    def __init__(self, workload: Workload, measure_s: float, known: Known | None) -> None:
        self.workload, before = workload, allocated()
        self.model, self.args, self.kwargs = workload.make(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)  # all ways train the same weights
        start = time.time()
        self.graph = capture(self.model, self.args, self.kwargs)
        if known is None:
            costs = without_gaps(outcore.measure(self.graph, time_limit_s=measure_s))
            device = torch.device(DEVICE)
            tier = measured_tier(torch.device("cuda", 0) if DEVICE == "cuda" else device)
            self.keeping = StepModel(self.graph, costs, 0.0, tier, memory_rate(device))
        else:
            self.keeping = known.keeping(self.graph)
        self.costs = self.keeping.costs
        self.weights = [p.detach().cpu() for p in self.model.parameters()]
        self.own, self.others = allocated() - before, 0
        """Memory of this model, and of all others that wait for their turn."""
        self.plans: dict[tuple[bool, float], Assignment] = {}
        print(f"{workload.name}: {len(self.graph.calls)} calls, ready in {time.time() - start:.1f} s", flush=True)

    def govern(self, assignment: Assignment, graphs: bool) -> ManagedForward:
        """As `outcore.within` does with a plan."""
        settings = Settings(None, OptimizerCost.of(0.0, DEVICE), policy=dict(assignment.policy), graphs=graphs)
        governor = ManagedForward(self.model, settings, self.costs)
        governor.admit(key_of(self.model, self.args, self.kwargs), self.args, self.kwargs, graph=self.graph)
        self.model.__dict__["forward"] = governor
        return governor

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad(set_to_none=True)
        output = self.model(*self.args, **self.kwargs)
        loss_of(output).backward()
        self.optimizer.step()

    def measured(self) -> dict[str, Any]:
        """Median time and peak."""
        gc.collect()
        if DEVICE != "cuda":
            self.step()
            return {"ms": 1.0, "peak": 1, "reserved": 1}
        give_back()
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
        runs = min(9, max(3, int(0.8 / (time.perf_counter() - start))))
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
        peaks = {"peak": torch.cuda.max_memory_allocated() - self.others}
        peaks["reserved"] = torch.cuda.max_memory_reserved() - self.others
        return {"ms": times[runs // 2], **peaks}

    def gradients(self) -> list[torch.Tensor | None]:
        """Of every parameter, from the same random numbers."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        loss_of(self.model(*self.args, **self.kwargs)).backward()
        return [p.grad.cpu() if p.grad is not None else None for p in self.model.parameters()]

    def run(self, slower: list[float], save: Callable[[dict[str, Any]], None]) -> None:
        """Plain, and the plans that are predicted to be fast enough."""

        def add(how: str, **facts: Any) -> None:
            row = {"model": self.workload.name, **asdict(self.workload), "how": how, **facts}
            print(json.dumps(row), flush=True)
            save(row)

        plain = self.measured()
        add("plain", **plain, predicted_peak=self.keeping.plain.peak_bytes, predicted_ms=1e3 * self.keeping.plain_s)
        want, again = self.gradients(), self.gradients()
        for how, assignment, graphs in self.ways(slower):
            facts: dict[str, Any] = {"predicted_peak": assignment.outcome.peak_bytes}
            facts["predicted_slowdown"] = assignment.outcome.time_s / self.keeping.plain_s
            governor = entry = None
            try:
                governor = self.govern(assignment, graphs)
                kinds: dict[str, int] = {}
                for policy in map(str, governor.plan.policy.values()):
                    kinds[policy] = kinds.get(policy, 0) + 1
                got = self.gradients()
                facts["equal_gradients"], facts["largest_difference"] = compared(want, got)
                facts["plain_again"], facts["plain_again_difference"] = compared(want, again)
                del got
                facts |= self.measured()
                (entry,) = governor.admitted.values()
                if entry is not None and entry.graphed is not None:
                    facts["graphs_bytes"] = entry.graphed.bytes
                pairs = zip(self.model.parameters(), self.weights, strict=True)
                facts["weights_untouched"] = all(torch.equal(p.cpu(), w) for p, w in pairs)
                add(how, **facts, policies=kinds)
            except Exception as error:
                add(how, **facts, error=f"{type(error).__name__}: {str(error)[:200]}")
            finally:
                self.model.__dict__.pop("forward", None)
                governor = entry = None  # and with them the memory of graphs

    def ways(self, slower: list[float]) -> list[tuple[str, Assignment, bool]]:
        """The smallest plan for each predicted time, call by call and as graphs; as graphs also with all kept."""
        found: list[tuple[str, Assignment, bool]] = []
        for graphs in sorted({graphs for graphs, _ in self.plans}):
            note, taken = ", graphs" if graphs else "", list[Assignment]()
            for most in slower:
                known = [a for (g, _), a in self.plans.items() if g == graphs]
                fitting = [a for a in known if a.outcome.time_s <= most * self.keeping.plain_s]
                best = min(fitting, key=lambda a: a.outcome.peak_bytes, default=None)
                if best is not None and best not in taken:
                    taken.append(best)
                    found.append((f"outcore, predicted at most {most:.2f}x{note}", best, graphs))
            if graphs:
                found.append(("all kept, graphs", Assignment({}, self.keeping.evaluate({})), True))
        return found


def compared(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> tuple[str, float]:
    """How many gradients are equal bit for bit, and the largest difference over the largest gradient."""
    same, off, most = 0, 0.0, 0.0
    for x, y in zip(a, b, strict=True):
        same += x is y or (x is not None and y is not None and torch.equal(x, y))
        if x is not None and y is not None:
            off, most = max(off, float((x - y).abs().max())), max(most, float(x.abs().max()))
    return f"{same}/{len(a)}", off / most if most else off


def kept(folder: Path, workload: Workload) -> Path:
    """Where the costs of a model lie."""
    return folder / f"{workload.name.replace(' ', '-')}.keeping"


Plans = dict[tuple[bool, float], Assignment]


def search_all(
    keepings: dict[str, StepModel], shares: list[float], graphs: list[str], seconds: float
) -> dict[str, Plans]:
    """All plans of all models, side by side on the processor."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the searches need no device
    found: dict[str, dict[tuple[bool, float], Future[Assignment]]] = {name: {} for name in keepings}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=context) as pool:
        for name, keeping in keepings.items():
            alone = pickle.loads(pickle.dumps(keeping))
            alone.tier, alone.draws = None, False  # a graph cannot draw the same numbers twice
            for share in shares:
                found[name][False, share] = pool.submit(search, keeping, share, seconds)
                if name in graphs:
                    found[name][True, share] = pool.submit(search, alone, share, seconds)
    return {name: {key: future.result() for key, future in plans.items()} for name, plans in found.items()}


@dataclass(frozen=True)
class Known:
    """What the plans of a model are searched from, as it was measured before."""

    graph: Graph
    costs: outcore.Costs
    link: tuple[float, float] | None
    """Bytes per second to the host and back."""
    memory_bytes_per_s: float

    @classmethod
    def read(cls, folder: Path, workload: Workload) -> Known:
        """As `write` has left it."""
        return cls(*pickle.loads(gzip.decompress(kept(folder, workload).read_bytes())))

    @staticmethod
    def write(folder: Path, workload: Workload, keeping: StepModel) -> None:
        """Costs of a model, for another time."""
        link = keeping.tier and (keeping.tier.out_bytes_per_s, keeping.tier.in_bytes_per_s)
        facts = (keeping.graph, keeping.costs, link, keeping.memory_bytes_per_s)
        kept(folder, workload).write_bytes(gzip.compress(pickle.dumps(facts)))

    def keeping(self, graph: Graph) -> StepModel:
        """For the same model, recorded here: its steps are not kept with the costs."""
        whole = replace(self.graph, executable=graph.executable)
        return StepModel(
            whole, self.costs, 0.0, OffloadTarget(*self.link) if self.link else None, self.memory_bytes_per_s
        )

    def searchable(self, workload: Workload) -> StepModel:
        """Where there is no device."""
        model, args, kwargs = workload.make("cpu")
        return self.keeping(capture(model, args, kwargs))


def written(plans: dict[str, Plans]) -> bytes:
    """Plans as JSON: what was decided, by name."""
    rows = [[name, *key, dict(a.policy)] for name, found in plans.items() for key, a in found.items()]
    return gzip.compress(json.dumps(rows).encode(), mtime=0)


def read(path: Path, keepings: dict[str, StepModel]) -> dict[str, Plans]:
    """Plans again, with what they are predicted to take."""
    found: dict[str, Plans] = {name: {} for name in keepings}
    for name, graphs, share, policy in json.loads(gzip.decompress(path.read_bytes())):
        if name in keepings:
            found[name][graphs, share] = Assignment(policy, keepings[name].evaluate(policy))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--graphs", default="lstm attention as in Echo", help="also as CUDA graphs")
    parser.add_argument("--slower", default="1.05,1.10,1.20", help="the most a plan may be predicted to take")
    parser.add_argument("--shares", default="0.65,0.55,0.5,0.45,0.4,0.35,0.3", help="of the plain peak, to search for")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--measure-s", type=float, default=2.0)
    parser.add_argument("--search-s", type=float, default=5.0)
    parser.add_argument("--keep-costs", action="store_true", help="write what the plans are searched from")
    parser.add_argument("--costs", type=Path, help="a folder that --keep-costs has written on this device")
    parser.add_argument("--plan-only", action="store_true", help="search from --costs and write plans.json.gz")
    parser.add_argument("--plans", type=Path, help="what --plan-only has written")
    parser.add_argument("--shared", action="store_true", help="others use the device: times are not for the table")
    parser.add_argument("--measure-only", action="store_true", help="no more than --keep-costs")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    started, shares = time.time(), [float(s) for s in args.shares.split(",")]
    wanted = args.only.split(",") if args.only else [w.name for w in WORKLOADS]
    chosen = [w for w in (TINY if args.tiny else WORKLOADS) if w.name in wanted]
    chosen.sort(key=lambda w: wanted.index(w.name))
    args.out.mkdir(parents=True, exist_ok=True)
    known = {w.name: Known.read(args.costs, w) for w in chosen} if args.costs is not None else {}
    if args.plan_only:
        keepings = {w.name: known[w.name].searchable(w) for w in chosen}
        plans = search_all(keepings, shares, args.graphs.split(","), args.search_s)
        (args.out / "plans.json.gz").write_bytes(written(plans))
        for name, found in plans.items():
            for (graphs, share), a in found.items():
                least = a.outcome.peak_bytes / keepings[name].plain.peak_bytes
                print(name, graphs, share, f"{least:.3f} at {a.outcome.time_s / keepings[name].plain_s:.3f}x")
        return
    trials = []
    for w in chosen:
        trials.append(Trial(w, args.measure_s, known.get(w.name)))
        if args.keep_costs:
            Known.write(args.out, w, trials[-1].keeping)
    if args.measure_only:
        return
    if args.plans is not None:
        plans = read(args.plans, {t.workload.name: t.keeping for t in trials})
    else:
        plans = search_all({t.workload.name: t.keeping for t in trials}, shares, args.graphs.split(","), args.search_s)
    for trial in trials:
        trial.plans = plans.get(trial.workload.name, {})
    print(f"planned after {time.time() - started:.0f} s", flush=True)
    environment = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "outcore": outcore.__version__,
    }
    rows: list[dict[str, Any]] = []
    path = args.out / f"{time.strftime('%Y-%m-%d')}-h200.json"

    def save(row: dict[str, Any]) -> None:
        rows.append(row)
        document = {"environment": environment, "rows": rows, "alone": not args.shared}
        path.write_text(json.dumps(document, indent=1) + "\n")

    for trial in trials:
        trial.others = sum(t.own for t in trials if t is not trial)
        if time.time() - started > args.seconds:
            break
        trial.run([float(s) for s in args.slower.split(",")], save)
    print(f"done after {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
