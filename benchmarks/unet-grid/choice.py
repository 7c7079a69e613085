"""Is the plan that is chosen the fastest that is measured? Grids, pipelines, GEMS and data parallel, simulated and run.

    python benchmarks/unet-grid/choice.py --out benchmarks/unet-grid/results            # needs root

A case is a network, a batch, a number of ranks and the rate of the link between them. Ranks are processes of one thread
on hosts that are network namespaces (`benchmarks/whatif-links/hosts.py`). For every case each schedule's best plan,
data parallel and every grid are simulated with costs measured here, and all of them are trained, one after the other in
the same processes; `outcore.plan` chooses among them by the simulation. A choice counts as right if it took at most a
tenth longer than the fastest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "whatif-links"))

PORT = "29581"
STEPS, SKIPPED, PASSES = 10, 2, 2
"""Steps of a plan, those that do not count, and how often all plans of a case take turns: a machine's speed changes."""
NOISE = 1.1
FAST = 2000.0
"""Mbit/s at which the rate of a link hardly matters: such cases are also run without namespaces."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    network: str
    pixels: int
    batch: int
    ranks: int
    rate_mbit: float

    def job(self) -> Any:
        import torch
        import torch.nn.functional as F

        import outcore

        def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
            drawn = torch.Generator().manual_seed(3)
            image = torch.randn(size, 3, self.pixels, self.pixels, generator=drawn)
            if self.network in ("chain", "unet"):
                return image, torch.randn(size, 2, self.pixels, self.pixels, generator=drawn)
            return image, torch.randint(10, (size,), generator=drawn)

        maps = self.network in ("chain", "unet")
        loss = outcore.stream.PixelLoss(F.mse_loss) if maps else F.cross_entropy
        return outcore.Job(model=_NETWORKS[self.network], batch=batch, loss=loss, size=self.batch)


def _chain() -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    for a, b in ((3, 16), *((16, 16),) * 5):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 2, 1))


def _unet() -> Any:
    from outcore.models import UNet

    return UNet(3, 2, width=8, depth=3)


def _pooled() -> Any:
    """A network that halves the image, with a global pool and little weight."""
    from torch import nn

    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _heavy() -> Any:
    """Most of the work in convolutions, most of the weights in layers at the end."""
    from torch import nn

    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    layers += [nn.MaxPool2d(4), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten()]
    return nn.Sequential(
        *layers, nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


_NETWORKS: dict[str, Callable[[], Any]] = {"chain": _chain, "unet": _unet, "pooled": _pooled, "heavy": _heavy}

CASES = (
    Case("chain", 192, 1, 2, 2000.0),
    Case("chain", 96, 4, 2, 2000.0),
    Case("chain", 192, 1, 2, 50.0),
    Case("unet", 192, 1, 2, 2000.0),
    Case("unet", 96, 4, 2, 50.0),
    Case("pooled", 192, 1, 2, 2000.0),
    Case("pooled", 96, 4, 2, 2000.0),
    Case("pooled", 96, 4, 2, 20.0),
    Case("heavy", 96, 4, 2, 2000.0),
    Case("heavy", 96, 4, 2, 100.0),
    Case("chain", 192, 1, 4, 2000.0),
    Case("pooled", 96, 4, 4, 2000.0),
)


def candidates(case: Case, costs: Any, machine: Any, parts: Any) -> tuple[dict[str, Any], str]:
    """Every plan with the step time that is simulated, by name, and the name of the one that is chosen."""
    import outcore
    from outcore.errors import OutcoreError
    from outcore.planner.pipeline.loss_and_update import LossAndUpdate
    from outcore.planner.pipeline.plan_job import links_of, weights_on
    from outcore.spatial.timeline import predict_timeline

    job, ranks = case.job(), case.ranks
    graph = job.capture(case.batch)
    beside = LossAndUpdate.of(job, graph, costs, machine, case.batch)
    weights, links = weights_on(machine, graph, costs, beside), links_of(machine)
    plans: dict[str, Any] = {}
    for schedule in ("model_parallel", "gpipe", "1f1b", "gems"):
        try:
            made = outcore.plan(graph, devices=ranks, machine=machine, schedule=schedule, costs=costs)
        except OutcoreError:
            continue
        if len(made.stages) > 1:
            plans[schedule] = made
    if case.batch % ranks == 0:
        plans["data parallel"] = outcore.Plan(graph.fingerprint, (("",),), replicas=ranks)
    for grid in {2: ((1, 2), (2, 1)), 4: ((2, 2), (1, 4))}[ranks]:
        try:
            plans[f"grid {grid[0]}x{grid[1]}"] = outcore.spatial.plan_grid(
                job, grid, machine=machine, costs=costs, batch=case.batch, parts=parts
            )
        except OutcoreError:
            continue
    plans["chosen"] = outcore.plan(job, devices=ranks, machine=machine, batch=case.batch, costs=costs, parts=parts)
    found = {}
    for name, plan in plans.items():
        time_s = predict_timeline(plan, graph, weights, links, parts).step_s
        found[name] = {"plan": plan.to_json(), "arrangement": plan.arrangement, "predicted_s": time_s}
    return found, plans["chosen"].arrangement


def measure_case(case: dict[str, Any], seconds: float, assumed: dict[str, Any]) -> dict[str, Any]:
    """In one of as many processes as compute at the same time: the calls of a network, and a rank's part of it."""
    import torch

    from outcore.cost.measured.measure import measure
    from outcore.machine.machine import Machine
    from outcore.spatial.part_costs import measure_part

    torch.set_num_threads(1)
    given = Case(**case)
    grid = {2: (1, 2), 4: (2, 2)}[given.ranks]
    job, machine = given.job(), Machine.from_json(assumed)
    costs = measure(job.capture(given.batch), "cpu", time_limit_s=seconds)
    part = measure_part(job, grid, costs=costs, machine=machine, batch=given.batch)
    return {"costs": costs.to_json(), "part": asdict(part)}


def link_worker(out: str) -> None:
    """One of two ranks: what an exchange over the link takes."""
    import torch

    from outcore.run import measure_link

    torch.set_num_threads(1)
    found = measure_link()
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        Path(out).write_text(json.dumps(asdict(found)))


def measured_link(ranks: int, rate_mbit: float) -> dict[str, Any]:
    """Latency and host time of messages between hosts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "link.json"
        on_hosts(ranks, rate_mbit, "--link", json.dumps([str(out)]))
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def worker(document: str, out: str) -> None:
    """One rank: trains every plan of every case, and writes the seconds of a step."""
    import torch

    import outcore
    from outcore.graph.structure import substitute
    from outcore.run import Engine

    torch.set_num_threads(1)
    rows = json.loads(Path(document).read_text())
    for row in rows:
        case = Case(**row["case"])
        job = case.job()
        times: dict[str, list[float]] = {name: [] for name in row["plans"]}
        for name, found in [*row["plans"].items()] * PASSES:
            plan = outcore.Plan.from_json(found["plan"])
            with Engine(job, plan, optimizer=lambda p: torch.optim.SGD(p, lr=1e-4), device="cpu") as engine:

                def mine(tensor: torch.Tensor, engine: Engine = engine) -> torch.Tensor:
                    return tensor.tensor_split(engine.plan.replicas)[engine.replica]

                inputs, targets = (substitute(t, torch.Tensor, mine) for t in job.batch(case.batch))
                for number in range(STEPS):
                    engine.world.barrier()
                    began = time.perf_counter()
                    engine.step(inputs, targets)
                    if number >= SKIPPED:
                        times[name].append(time.perf_counter() - began)
                rank = engine.rank
            found["measured_s"] = statistics.median(times[name])
        if rank == 0:
            Path(out).write_text(json.dumps(rows))


def on_hosts(ranks: int, rate_mbit: float, *words: str) -> bool:
    """Run this script with some words on as many hosts, or beside each other; whether all went well."""
    from hosts import address, hosts, on_host, unavailable

    apart = unavailable() is None
    with (
        hosts(ranks, rate_mbit, prefix=f"occ{os.getpid()}x") if apart else contextlib.nullcontext([""] * ranks) as names
    ):
        started = []
        for rank, name in enumerate(names):
            env = {
                **os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(ranks),
                "OMPI_COMM_WORLD_LOCAL_RANK": "0" if apart else str(rank),
                "MASTER_ADDR": address(0) if apart else "127.0.0.1", "MASTER_PORT": PORT,
                "GLOO_SOCKET_IFNAME": "eth0" if apart else "lo", "OMP_NUM_THREADS": "1",
                "OUTCORE_SECRET": "0123456789abcdef" * 4,
            }  # fmt: skip
            command = [sys.executable, __file__, *words]
            started.append(subprocess.Popen(on_host(name, *command) if apart else command, env=env))
        codes = [process.wait(timeout=600) for process in started]
        return not any(codes)


def measured(ranks: int, rate_mbit: float, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the plans of cases that have as many ranks and the same link."""
    with tempfile.TemporaryDirectory() as folder:
        document, out = Path(folder) / "cases.json", Path(folder) / "found.json"
        document.write_text(json.dumps(rows))
        well = on_hosts(ranks, rate_mbit, "--worker", json.dumps([str(document), str(out)]))
        found: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else rows
        for row in () if well else found:
            if not all("measured_s" in plan for plan in row["plans"].values()):
                row["error"] = "a rank failed"
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", default=None)
    parser.add_argument("--link", default=None)
    parser.add_argument("--name", default="choice", help="Of the files that are written.")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))))
    parser.add_argument("--cores", type=int, default=None, help="To which all ranks are bound.")
    parser.add_argument("--measure", type=float, default=10.0, help="Seconds for the calls of a network.")
    given = parser.parse_args()
    if given.worker is not None:
        worker(*json.loads(given.worker))
        return
    if given.link is not None:
        link_worker(*json.loads(given.link))
        return
    import torch
    from hosts import unavailable

    from outcore.cost.costs import Costs
    from outcore.machine import known, rated
    from outcore.machine.link import Link
    from outcore.run import launch
    from outcore.spatial.part_costs import PartCosts

    torch.set_num_threads(1)
    if given.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    cores, one = len(os.sched_getaffinity(0)), known()
    alike: dict[tuple[int, float], list[Case]] = {}
    for case in (CASES[number] for number in given.cases):
        if unavailable() is not None and case.rate_mbit < FAST:
            print(f"not run: {case}: {unavailable()}", flush=True)
            continue
        alike.setdefault((case.ranks, case.rate_mbit), []).append(case)
    given.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    wires: dict[int, Link] = {}
    for (ranks, rate_mbit), cases in alike.items():
        if ranks not in wires:
            wires[ranks] = Link(**measured_link(ranks, FAST))
        link = wires[ranks]
        print(f"{ranks} ranks, {rate_mbit:g} Mbit/s, beside the rate: {link}", flush=True)
        rate = min(link.away_bytes_per_s, rate_mbit * 1e6 / 8)
        link = replace(link, away_bytes_per_s=rate, back_bytes_per_s=rate, both_bytes_per_s=2 * rate)
        at_once = min(cores, ranks)
        machine = replace(one, devices=(rated(one.device("cpu")),) * ranks, between_devices=link, processors=at_once)
        planned = []
        for case in cases:
            found = launch(measure_case, at_once, asdict(case), given.measure, machine.to_json())[0]
            plans, chosen = candidates(case, Costs.from_json(found["costs"]), machine, PartCosts(**found["part"]))
            planned.append({"case": asdict(case), "plans": plans, "chosen": chosen, "link": asdict(link)})
        rows += measured(ranks, rate_mbit, planned)
        text = _table(rows)
        (given.out / f"{given.name}.json").write_text(json.dumps(rows, indent=1))
        (given.out / f"{given.name}.md").write_text(text)
    print(text)


def _steps(found: dict[str, Any]) -> tuple[Any, ...]:
    """What a plan does, however it is written down."""
    pieces = (found["plan"].get("micro_batches"), found["plan"].get("batches"))
    return found["arrangement"], pieces, str(found["plan"].get("spatial")), round(found["predicted_s"], 9)


def _table(rows: list[dict[str, Any]]) -> str:
    right = 0
    lines = [
        "| case | chosen | measured | fastest | measured | simulated / measured of the chosen |",
        "|---|" + "---|" * 5,
    ]
    for row in rows:
        case = Case(**row["case"])
        begin = (
            f"| {case.network} {case.pixels} px, batch {case.batch}, {case.ranks} ranks, {case.rate_mbit:g} Mbit/s |"
        )
        if "error" in row:
            lines.append(f"{begin} {row['chosen']} | {row['error']} | | | |")
            continue
        chosen = row["plans"]["chosen"]
        others = {name: found for name, found in row["plans"].items() if name != "chosen"}
        name, best = min(others.items(), key=lambda item: item[1]["measured_s"])
        twins = [found["measured_s"] for found in row["plans"].values() if _steps(found) == _steps(chosen)]
        row["right"] = min(twins) <= NOISE * best["measured_s"]  # the same plan is timed twice
        right += row["right"]
        lines.append(
            f"{begin} {row['chosen']} | {chosen['measured_s'] * 1e3:.1f} ms | {name} | "
            f"{best['measured_s'] * 1e3:.1f} ms | {chosen['predicted_s'] / chosen['measured_s']:.2f} |"
        )
    lines.append(f"\nThe choice is the fastest, or within {NOISE - 1:.0%} of it, in {right} of {len(rows)}.\n")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
