"""One case: a network, a batch size and a precision; predicted from calls measured alone, then trained in earnest."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from networks import Network, Training

import outcore
from outcore.cost.costs import Costs
from outcore.cost.live import LiveBytes
from outcore.cost.measure import measure
from outcore.cost.memory import memory_curve
from outcore.cost.saved import account
from outcore.cost.step import measure_optimizer, predict_step

Adam = torch.optim.Adam


class Case:
    """A network, a batch size and a precision: prepared first (which takes the host), then timed."""

    def __init__(self, network: Network, size: int, bf16: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Training(network.build(), network.loss, bf16).to(device).train()
        self.batch = tuple(t.to(device) for t in network.batch(size))
        start = time.perf_counter()
        self.graph = outcore.capture(self.model, self.batch)
        captured = time.perf_counter()
        self.accounted = account(self.graph, device)
        self.row: dict[str, Any] = {"capture_s": captured - start, "account_s": time.perf_counter() - captured}

    def run(self, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Predict from calls measured alone, then train; the figures, and what each distinct call took."""
        start = time.perf_counter()
        clean(self.device)
        others = allocated(self.device) - self.own_bytes()
        costs = measure(self.graph, self.device, time_limit_s=seconds, runs=10, accounted=self.accounted)
        optimizer = measure_optimizer(self.model, Adam, self.device)
        measured_s = time.perf_counter() - start
        clean(self.device)
        trained = train(self.model, self.batch, self.device, others)
        step = predict_step(self.graph, costs, optimizer=optimizer)
        curve = memory_curve(self.graph, costs, optimizer=Adam)
        row = self.row | trained | {
            "measure_s": measured_s,
            "device_s": time.perf_counter() - start,
            "calls": len(self.graph.calls),
            "unmeasured": len(costs.unmeasured),
            "notes": list(costs.notes)[:3],
            "between_s": costs.between_s,
            "sum_bytes_per_s": costs.sum_bytes_per_s,
            "predicted_s": step.step_s,
            "predicted_parts_s": {n: getattr(step, f"{n}_s") for n in ("forward", "backward", "optimizer", "wait")},
            "optimizer": asdict(optimizer),
            "predicted_bytes": curve.peak_bytes,
            "predicted_parts_bytes": {k: getattr(curve.at_peak, k) for k in curve.at_peak.__dataclass_fields__},
            "peak_in": [curve.peak.phase, curve.peak.call],
            "library_bytes": costs.library_bytes,
        }  # fmt: skip
        return row, distinct(costs)

    def own_bytes(self) -> int:
        """Of the model and the batch, as the allocator rounds them."""
        tensors = [*self.model.parameters(), *self.model.buffers(), *self.batch]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(-(-size // 512) * 512 for size in storages.values())


def distinct(costs: Costs) -> list[dict[str, Any]]:
    """One line per kind of call: a name, how many there are, and what one takes."""
    lines: dict[Any, dict[str, Any]] = {}
    for cost in costs.calls.values():
        times = {
            name: [getattr(timing, n) for n in ("median_s", "min_s", "dispatch_s")]
            for name, timing in (("forward", cost.forward), ("backward", cost.backward))
            if timing is not None
        }
        key = (cost.type, str(times))
        lines.setdefault(key, {"call": cost.call, "type": cost.type, "count": 0, **times})["count"] += 1
    return list(lines.values())


def train(model: Training, batch: tuple[torch.Tensor, ...], device: torch.device, base: int) -> dict[str, Any]:
    """Real steps: median time, and the peak of one."""
    optimizer = Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    for _ in range(3):
        step()
    times, processor = timed(step, device, 30 if device.type == "cuda" else 9, 1.0 if device.type == "cuda" else 60)
    row: dict[str, Any] = {"measured_s": statistics.median(times), "fastest_s": min(times), "steps": len(times)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        row["measured_bytes"] = torch.cuda.max_memory_allocated(device) - base
        row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    else:
        row["measured_processor_s"] = statistics.median(processor)
        optimizer.zero_grad()
        fixed = [*model.parameters(), *model.buffers(), *batch]
        fixed += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        held = sum(s.nbytes() for s in {t.untyped_storage()._cdata: t.untyped_storage() for t in fixed}.values())
        with LiveBytes(fixed) as live:
            step()
        row["measured_bytes"] = held + live.peak
    optimizer.zero_grad()
    return row


def timed(step: Callable[[], None], device: torch.device, runs: int, seconds: float) -> tuple[list[float], list[float]]:
    """Wall-clock times of synchronised steps, and the processor's."""
    wall, processor = [], []
    end = time.perf_counter() + seconds
    while len(wall) < 8 or (len(wall) < runs and time.perf_counter() < end):
        synchronise(device)
        start, busy = time.perf_counter(), time.process_time()
        step()
        synchronise(device)
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
    return wall, processor


def clean(device: torch.device) -> int:
    """Give back what can be given back; returns what is still allocated."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
