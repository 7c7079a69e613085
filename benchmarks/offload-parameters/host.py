"""What the host does in a step of AlexNet, plain and with parameters that travel: microseconds by phase and function.

    python benchmarks/offload-parameters/host.py --out results/

Steps begin on an idle device, so that the host never waits for it; the first quarter of what was seen counts, because
the machine is not alone. Plain training is also looked at beside two copies of as many bytes, which the host only
starts. Functions are timed in steps of their own, with all that they call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run import MODELS, Row, network, pictures
from torch import nn
from ways import wait

from outcore.memory.offload.copy_streams import CudaRoundTripCopy, _Event
from outcore.memory.param_offload.bucketed_step import PartialOptimizer
from outcore.memory.param_offload.flat_buffer import FlatBuffer
from outcore.memory.param_offload.hooks import _BeforeForward
from outcore.memory.param_offload.in_flight_params import InFlightParams
from outcore.memory.param_offload.offloader import StateOffloader
from outcore.memory.param_offload.writeback import Writebacks

FUNCTIONS: tuple[tuple[type, str], ...] = (
    (StateOffloader, "begin_forward"),
    (StateOffloader, "fetch"),
    (StateOffloader, "gradient_ready"),
    (StateOffloader, "update"),
    (StateOffloader, "step"),
    (StateOffloader, "synchronize"),
    (PartialOptimizer, "_narrowed"),
    (Writebacks, "updated"),
    (Writebacks, "start_delayed"),
    (FlatBuffer, "make_resident"),
    (FlatBuffer, "mark_updated"),
    (InFlightParams, "mark"),
    (InFlightParams, "wait_for"),
    (CudaRoundTripCopy, "start"),
    (torch.cuda.CUDAGraph, "replay"),
    (_Event, "wait"),
    (_BeforeForward, "__call__"),
)


def quarter(found: list[float]) -> float:
    return statistics.median(sorted(found)[: max(1, len(found) // 4)])


class Copies:
    """As many bytes as the parameters have, out of the device and into it, beside whatever the host does."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self.theirs = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if pinned else []

    def start(self) -> None:
        pairs = ((self.hosts[0], self.theirs[0]), (self.theirs[1], self.hosts[1]))
        for stream, (to, source) in zip(self.streams, pairs, strict=False):
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)


def phases(row: Row, steps: int, copies: Copies | None = None) -> dict[str, float]:
    """Microseconds of each part of a step."""
    found: dict[str, list[float]] = {}
    for i in range(steps):
        images, labels = row.batches[i % len(row.batches)]
        wait(row.device)
        if copies is not None:
            copies.start()
        clock = [time.perf_counter()]
        names: list[str] = []

        def over(name: str, clock: list[float] = clock, names: list[str] = names) -> None:
            clock.append(time.perf_counter())
            names.append(name)

        torch.manual_seed(i), over("seed")
        row.way.optimizer.zero_grad(), over("zero_grad")
        output = row.model(images)
        over("forward")
        loss = nn.functional.cross_entropy(output, labels)
        over("loss")
        loss.backward(), over("backward")
        row.way.optimizer.step(), over("step")
        for name, a, b in zip(names, clock, clock[1:], strict=False):
            found.setdefault(name, []).append(1e6 * (b - a))
        found.setdefault("all", []).append(1e6 * (clock[-1] - clock[0]))
    return {name: round(quarter(row), 1) for name, row in found.items()}


def timed(kind: type, name: str, row: Row, steps: int) -> dict[str, float]:
    """Microseconds a step in one function, and how often it is called."""
    own: Callable[..., Any] = getattr(kind, name)
    spent: list[float] = []

    def around(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return own(*args, **kwargs)
        finally:
            spent.append(1e6 * (time.perf_counter() - start))

    setattr(kind, name, around)
    sums, calls = [], 0
    try:
        for i in range(steps):
            wait(row.device)
            spent.clear()
            row.way.step(*row.batches[i % len(row.batches)])
            sums.append(sum(spent))
            calls = len(spent)
    finally:
        setattr(kind, name, own)
    return {"us": round(quarter(sums), 1), "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.backends.cuda.is_built() else "cpu")
    parser.add_argument("--model", default="alexnet")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=0)
    parser.add_argument("--name", default="host")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.backends.cudnn.deterministic = True
    device = torch.device(options.device)
    model = network(options.model, device).train()
    data = [pictures(n, options.side or MODELS[options.model], s, device) for s, n in ((1, 8 * options.batch), (2, 64))]
    rows = {way: Row(way, model, *data, options.batch) for way in ("baseline", "outcore")}
    for row in rows.values():
        row.train(8)
    document: dict[str, Any] = {"model": options.model, "torch": torch.__version__, "phases_us": {}}
    copies = Copies(4 * sum(p.numel() for p in model.parameters()), device)
    for _ in range(2):
        for way in ("baseline", "baseline beside copies", "outcore"):
            beside = copies if "beside" in way else None
            found = phases(rows[way.partition(" ")[0]], options.steps, beside)
            document["phases_us"].setdefault(way, []).append(found)
            print(f"{way:22} {found}", flush=True)
    functions = document["functions"] = {}
    for kind, name in FUNCTIONS:
        functions[f"{kind.__name__}.{name}"] = spent = timed(kind, name, rows["outcore"], options.steps // 3)
        print(f"{kind.__name__}.{name}: {spent}", flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"{time.strftime('%Y-%m-%d')}-{options.name}-{options.model}.json"
            path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
