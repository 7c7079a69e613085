"""The step time that is predicted for grids of ranks beside the measured one, in one run.

    python benchmarks/unet-grid/times.py --out $OUT                              # ranks on one GPU, under CUDA MPS
    python benchmarks/unet-grid/times.py --out $OUT --device cpu --cores 2       # ranks of one thread on two cores

Three networks on 1 x 2 and 2 x 2 ranks. On a GPU every rank has an equal share of its multiprocessors, so that ranks
stand for GPUs of their own; what they still share is its memory. The calls of a network are therefore measured in as
many processes at the same time as there are ranks (on a CPU: as there are cores), and so is a rank's part, with
neighbours that answer at once; exchanges and sums between ranks by `outcore.run.measure_link`. From these the plan is
made. Its step is simulated on a machine of as many devices as ranks with that link, on a CPU with no more of them
computing at once than there are cores, with the part as the plan lays it out: every rank measures that in turn with
steps of the plan, so that a machine whose speed changes meanwhile changes both. Both figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured.measure import measure
from outcore.machine import known, parse, rated
from outcore.machine.link import Link
from outcore.machine.machine import Machine
from outcore.models import UNet
from outcore.planner.pipeline.loss_and_update import LossAndUpdate
from outcore.planner.pipeline.plan_job import links_of, weights_on
from outcore.program import Event
from outcore.run import Engine, launch, measure_link
from outcore.spatial.part_costs import PartCosts, PartProbe, measure_part
from outcore.spatial.timeline import predict_timeline

sys.path.insert(0, str(Path(__file__).parent))
from mps import mps, torchvision_model

STEPS, SKIPPED = 1, 3
"""Steps of a round that count, and those before the first."""
ROUNDS = int(os.environ.get("ROUNDS", "24"))
_MOST_S = float(os.environ.get("MOST_S", "60"))


def _chain(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in ((3, width), *((width, width),) * 4):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 2, 1))


def _segmentation(model: Callable[[], nn.Module], pixels: int) -> outcore.Job:
    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(3)
        image = torch.randn(size, 3, pixels, pixels, generator=drawn)
        return image, torch.randint(2, (size, pixels, pixels), generator=drawn)

    loss = outcore.stream.PixelLoss(F.cross_entropy)
    return outcore.Job(model=model, batch=batch, loss=loss, optimizer=_sgd, size=1)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def _classification(name: str, pixels: int) -> outcore.Job:
    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(3)
        return torch.randn(size, 3, pixels, pixels, generator=drawn), torch.randint(1000, (size,), generator=drawn)

    return outcore.Job(model=lambda: torchvision_model(name), batch=batch, loss=F.cross_entropy, optimizer=_sgd, size=1)


def job(name: str, cuda: bool, scale: float = 1.0) -> outcore.Job:
    """One of the networks, of a size for a GPU or for a core."""
    if name == "unet":
        pixels, width = (2048, 32) if cuda else (256, 8)
        return _segmentation(lambda: UNet(3, 2, width=width, depth=3), round(pixels * scale))
    if name == "chain":
        pixels, width = (2048, 48) if cuda else (256, 16)
        return _segmentation(lambda: _chain(width), round(pixels * scale))
    return _classification("resnet50" if cuda else "resnet18", round((2048 if cuda else 256) * scale))


def measure_calls(
    name: str, grid: tuple[int, ...], cuda: bool, scale: float, seconds: float, assumed: dict[str, Any]
) -> dict[str, Any]:
    """In one of several processes at the same time: what the calls of a network take, and a rank's part of it."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if not cuda:
        torch.set_num_threads(1)
    chosen, device = job(name, cuda, scale), "cuda" if cuda else "cpu"
    costs = measure(chosen.capture(1), device, time_limit_s=seconds)
    part = measure_part(chosen, grid, costs=costs, machine=Machine.from_json(assumed), device=device)
    return {"costs": costs.to_json(), "part": asdict(part)}


@contextlib.contextmanager
def _shares(cuda: bool, ranks: int) -> Iterator[None]:
    """Processes that are started meanwhile have an equal share of the GPU."""
    if cuda:
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // ranks)
    try:
        yield
    finally:
        os.environ.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)


def train(
    plan: dict[str, Any], name: str, cuda: bool, scale: float, costs: dict[str, Any], machine: dict[str, Any]
) -> dict[str, Any]:
    """On one rank: seconds of the steps, in which of them it waited, and of its part between them."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    faulthandler.dump_traceback_later(_MOST_S, exit=True)  # a case that takes too long says where it is, and ends
    chosen, made = job(name, cuda, scale), outcore.Plan.from_json(plan)
    if not cuda:
        torch.set_num_threads(1)
    with Engine(
        chosen,
        made,
        optimizer=_sgd,
        device=None if cuda else "cpu",
    ) as engine:
        messages = engine.worker.messages
        waits: list[tuple[float, float]] = []
        if messages is not None:
            messages.waits = _Kept(waits)
        inputs, targets = (t.to(engine.device) for t in chosen.batch(1))
        probe = PartProbe(
            chosen,
            tuple(plan["spatial"]["grid"]),
            costs=Costs.from_json(costs),
            machine=Machine.from_json(machine),
            device=engine.device,
            spatial=plan["spatial"],
        )
        rounds: list[dict[str, list[float]]] = []
        parts: list[PartCosts] = []
        for number in range(ROUNDS):
            rows: dict[str, list[float]] = {"step_s": [], "thread_s": [], "waited_s": []}
            for _ in range(STEPS + (SKIPPED if not number else 1)):
                engine.world.barrier()
                waits.clear()
                began, of_thread = time.perf_counter(), time.thread_time()
                loss = engine.step(inputs, targets)
                if cuda:
                    torch.cuda.synchronize()
                rows["step_s"].append(time.perf_counter() - began)
                rows["thread_s"].append(time.thread_time() - of_thread)
                rows["waited_s"].append(sum(end - start for start, end in waits))
            rounds.append({of: times[-STEPS:] for of, times in rows.items()})
            engine.world.barrier()
            parts.append(probe.measure(3))
        events = [e for e in engine.timeline().events if e.rank == engine.rank]
    faulthandler.cancel_dump_traceback_later()
    return {"rounds": rounds, "busy_s": _busy(events), "loss": loss, "parts": [asdict(part) for part in parts]}


def _typical(parts: list[PartCosts]) -> PartCosts:
    """The one that takes the median of what all take."""
    return sorted(parts, key=lambda p: sum(p.forward_s.values()) + sum(p.backward_s.values()))[len(parts) // 2]


class _Kept(list[tuple[float, float]]):
    """A list that hands on what is added to it, and forgets nothing there when it is emptied."""

    def __init__(self, kept: list[tuple[float, float]]) -> None:
        super().__init__()
        self.kept = kept

    def append(self, item: tuple[float, float]) -> None:
        self.kept.append(item)
        super().append(item)


def _busy(events: Iterable[Event]) -> dict[str, float]:
    """Seconds by stream and kind."""
    found: dict[str, float] = {}
    for event in events:
        kind = f"{event.stream} {event.kind}"
        found[kind] = found.get(kind, 0.0) + event.end_s - event.start_s
    return found


def _machine(cuda: bool, ranks: int, cores: int, link: Link) -> Machine:
    one = parse("h200") if cuda else known()
    device = one.devices[0] if cuda else rated(one.device("cpu"))
    return replace(one, devices=(device,) * ranks, between_devices=link, processors=None if cuda else cores)


def compare(name: str, grid: tuple[int, ...], cuda: bool, cores: int, scale: float, seconds: float) -> dict[str, Any]:
    chosen, ranks = job(name, cuda, scale), math.prod(grid)
    graph = chosen.capture(1)
    assumed = _machine(cuda, ranks, cores, Link.symmetric(bandwidth_bytes_per_s=2e9, latency_s=1e-4))
    with _shares(cuda, ranks):
        at_once = ranks if cuda else min(ranks, cores)
        measured_at_once = launch(measure_calls, at_once, name, grid, cuda, scale, seconds, assumed.to_json())
        link = launch(measure_link, ranks, "cuda" if cuda else "cpu")[0]
    costs, parts = Costs.from_json(measured_at_once[0]["costs"]), PartCosts(**measured_at_once[0]["part"])
    where = _machine(cuda, ranks, cores, link)
    plan = outcore.spatial.plan_grid(chosen, grid, machine=where, costs=costs, parts=parts)
    with _shares(cuda, ranks):
        found = launch(train, ranks, plan.to_json(), name, cuda, scale, costs.to_json(), where.to_json())
    by_round = [
        _typical([PartCosts(**part) for part in of]) for of in zip(*(r.pop("parts") for r in found), strict=True)
    ]
    planned = _typical(by_round)
    weights = weights_on(where, graph, costs, LossAndUpdate.of(chosen, graph, costs, where, 1))
    timeline = predict_timeline(plan, graph, weights, links_of(where), planned)
    without = replace(where, between_devices=replace(link, host_s=0.0))
    steps_s = [
        statistics.median(max(of) for of in zip(*(r["rounds"][n]["step_s"] for r in found), strict=True))
        for n in range(ROUNDS)
    ]
    predicted_s = [predict_timeline(plan, graph, weights, links_of(where), part).step_s for part in by_round]
    return {
        "network": name,
        "grid": list(grid),
        "scale": scale,
        "spatial": dict(plan.spatial or {}),
        "link": asdict(link),
        "part_beyond_share_s": [sum(planned.forward_s.values()), sum(planned.backward_s.values()), *planned.exchange_s],
        "predicted_s": statistics.median(predicted_s),
        "predicted_when_planned_s": predict_timeline(plan, graph, weights, links_of(where), parts).step_s,
        "predicted_from_shares_s": predict_timeline(plan, graph, weights, links_of(without)).step_s,
        "measured_s": statistics.median(steps_s),
        "ratio": statistics.median(predicted_s) / statistics.median(steps_s),
        "rounds_s": [predicted_s, steps_s],
        "calls_s": [costs.total().forward_s, costs.total().backward_s],
        "host_calls_s": [
            [round(w.host_forward_s, 6), round(w.host_backward_s, 6), round(w.forward_s, 6), round(w.backward_s, 6)]
            for w in weights.calls.values()
        ],
        "predicted_busy_s": [_busy(e for e in timeline.events if e.rank == rank) for rank in range(ranks)],
        "ranks": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cores", type=int, default=2, help="To which all ranks are bound, on a CPU.")
    parser.add_argument("--scale", type=float, default=1.0, help="Of the pixels of a side.")
    parser.add_argument("--limit", type=float, default=150.0, help="Seconds after which no case is begun.")
    parser.add_argument("--networks", nargs="*", default=["unet", "resnet", "chain"])
    parser.add_argument("--grids", nargs="*", default=["1x2", "2x2"])
    parser.add_argument("--measure", type=float, default=15.0, help="Seconds for the calls of a network.")
    given = parser.parse_args()
    cuda, began, rows = given.device == "cuda", time.monotonic(), list[dict[str, Any]]()
    given.out.mkdir(parents=True, exist_ok=True)
    if not cuda:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    name = f"times-{'gpu' if cuda else f'{given.cores}-cores'}"
    with mps() if cuda else contextlib.nullcontext(False) as shared:  # before anything touches the GPU
        where = torch.cuda.get_device_name() if cuda else f"{platform.processor()}, {given.cores} cores"
        for network in given.networks:
            if time.monotonic() - began > given.limit:
                rows.append({"network": network, "error": "not begun: out of time"})
                continue
            for said in given.grids:
                grid = tuple(int(n) for n in said.split("x"))
                try:
                    rows.append(compare(network, grid, cuda, given.cores, given.scale, given.measure))
                except Exception as error:  # it stays in the table
                    text = f"{type(error).__name__}: {error}"[:500]
                    rows.append({"network": network, "grid": list(grid), "error": text})
                print(_line(rows[-1]), flush=True)
                document = {"device": where, "torch": torch.__version__, "mps": shared, "rows": rows}
                (given.out / f"{name}.json").write_text(json.dumps(document, indent=1))
    lines = ["| network | grid | predicted | measured | ratio | link |", "|---|---|---|---|---|---|", *map(_line, rows)]
    (given.out / f"{name}.md").write_text("\n".join(lines) + "\n")


def _line(row: dict[str, Any]) -> str:
    grid = " x ".join(map(str, row.get("grid", ())))
    if "error" in row:
        return f"| {row['network']} | {grid} | {row['error'].splitlines()[0]} | | | |"
    found = row["link"]
    link = (
        f"{found['away_bytes_per_s'] / 1e9:.2f} GB/s, {found['latency_s'] * 1e6:.0f} µs, "
        f"{found['host_s'] * 1e6:.0f} µs of a host, {found['adding_s_per_byte'] * 1e9:.2f} ns to add a byte"
    )
    times = f"{row['predicted_s'] * 1e3:.1f} ms | {row['measured_s'] * 1e3:.1f} ms | {row['ratio']:.2f}"
    return f"| {row['network']} | {grid} | {times} | {link} |"


if __name__ == "__main__":
    main()
