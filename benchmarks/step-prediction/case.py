"""One case: a network, a batch size and a precision; predicted from calls measured alone, then trained in earnest."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
from networks import Network, Training

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured.host_speed import reference_work_s
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.measure import measure
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.step_memory import memory_curve
from outcore.cost.predicted.step_time import measure_optimizer, predict_step

Adam = torch.optim.Adam
HOST = ("between_s", "start_s", "beat_s", "sum_bytes_per_s", "sum_dispatch_s")
"""What costs say of the host beside the calls."""
GROUPS = {True: 5, False: 1}
"""Groups of timed steps among the measurements of a case, beside one at the start: many where the host may set the
pace, which it does not keep: on a CPU, and where steps of a GPU are short (`SHORT_S`)."""
SHORT_S = 0.03


class Case:
    """A network, a batch size and a precision: prepared first (which takes the host), then timed."""

    def __init__(self, network: Network, size: int, bf16: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        with device:  # where drawing random weights takes no time
            self.model = Training(network.build(), network.loss, bf16).train()
            self.batch = network.batch(size)
        start = time.perf_counter()
        self.graph = outcore.capture(self.model, self.batch)
        captured = time.perf_counter()
        self.accounted = account(self.graph, device)
        self.room_bytes = int(1.2 * memory_curve(self.graph, self.accounted, optimizer=Adam).peak_bytes) + 2**30
        self.by_host = device.type == "cpu"
        self.row: dict[str, Any] = {"capture_s": captured - start, "account_s": time.perf_counter() - captured}

    def warm_up(self) -> None:
        """Steps as they will be run, and one with backward in this thread, as calls are measured.

        Libraries choose their kernels anew in each thread.
        """
        if self.device.type != "cuda":
            return
        steps = Steps(self.model, self.batch, self.device, by_host=False)
        try:
            steps.step()
            with torch.autograd.set_multithreading_enabled(False):
                steps.step()
            synchronise(self.device)
            start = time.perf_counter()
            steps.step()
            synchronise(self.device)
            self.by_host = time.perf_counter() - start < SHORT_S
        except torch.OutOfMemoryError:  # others prepare at the same time; then it is planned when its turn comes
            pass
        steps.optimizer.zero_grad()

    def run(self, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Measure the calls alone, with real steps in between, and predict; the figures, and what each call took."""
        start = time.perf_counter()
        clean(self.device)
        others = allocated(self.device) - self.own_bytes()
        steps = Steps(self.model, self.batch, self.device, by_host=self.by_host)
        if self.device.type == "cuda":  # the optimizer's state is there before, and not taken for the libraries'
            steps.step()
            steps.optimizer.zero_grad()
        costs = measure(
            self.graph,
            self.device,
            time_limit_s=seconds,
            runs=5,
            accounted=self.accounted,
            progress=steps.between,
        )
        optimizer = measure_optimizer(self.model, Adam, self.device, reference=costs.beat_s)
        measured_s = time.perf_counter() - start - steps.spent_s
        clean(self.device)
        trained = steps.result(others)
        step = predict_step(self.graph, costs, optimizer=optimizer)
        curve = memory_curve(self.graph, costs, optimizer=Adam)
        row = self.row | trained | {
            "measure_s": measured_s,
            "device_s": time.perf_counter() - start,
            "calls": len(self.graph.calls),
            "unmeasured": len(costs.unmeasured),
            "notes": list(costs.notes)[:3],
            **{n: getattr(costs, n) for n in HOST},
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
    names: dict[Any, list[str]] = {}
    for cost in costs.calls.values():
        times = {
            name: [getattr(timing, n) for n in ("median_s", "min_s", "dispatch_s")]
            for name, timing in (("forward", cost.forward), ("backward", cost.backward))
            if timing is not None
        }
        key = (cost.type, str(times))
        names.setdefault(key, []).append(cost.call)
        lines[key] = {"calls": names[key], "type": cost.type, "count": len(names[key]), **times}
    return list(lines.values())


class Steps:
    """Real training steps, timed in small groups while the calls are measured: the host does not keep its pace."""

    def __init__(
        self, model: Training, batch: tuple[torch.Tensor, ...], device: torch.device, *, by_host: bool
    ) -> None:
        self.model, self.batch, self.device, self.by_host = model, batch, device, by_host
        self.optimizer = Adam(model.parameters())
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.beats: list[float] = []
        self.groups, self.spent_s = 0, 0.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(*self.batch).backward()
        self.optimizer.step()

    def between(self, done: int, total: int, _: str) -> None:
        """A group whenever a further part of the calls is measured."""
        groups = GROUPS[self.by_host]
        if done * groups >= self.groups * total and self.groups <= groups:
            self.groups += 1
            self._group(1, 3 if self.by_host and self.device.type == "cuda" else 2)
            self.optimizer.zero_grad()

    def result(self, base: int) -> dict[str, Any]:
        """Median time of the steps, and the peak of one more; `base` is what was allocated before them."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.step()
            memory = {
                "measured_bytes": torch.cuda.max_memory_allocated(self.device) - base,
                "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            }
        else:
            memory = {"measured_bytes": self._living()}
        self.optimizer.zero_grad()
        found: dict[str, Any] = {"measured_s": statistics.median(self.wall), "fastest_s": min(self.wall)}
        if self.device.type == "cpu":
            found["measured_processor_s"] = statistics.median(self.processor)
        return found | memory | {"steps": len(self.wall), "steps_s": self.wall, "beats_s": self.beats}

    def _group(self, untimed: int, timed: int) -> None:
        begin = time.perf_counter()
        for place in range(untimed + timed):
            synchronise(self.device)
            beat = reference_work_s()
            start, busy = time.perf_counter(), time.process_time()
            self.step()
            synchronise(self.device)
            if place >= untimed:
                self.wall.append(time.perf_counter() - start)
                self.processor.append(time.process_time() - busy)
                self.beats.append((beat + reference_work_s()) / 2)
        self.spent_s += time.perf_counter() - begin

    def _living(self) -> int:
        """The most bytes of living storages in a step."""
        self.optimizer.zero_grad()
        fixed = [*self.model.parameters(), *self.model.buffers(), *self.batch]
        fixed += [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        held = sum(s.nbytes() for s in {t.untyped_storage()._cdata: t.untyped_storage() for t in fixed}.values())
        with LiveBytes(fixed) as live:
            self.step()
        return held + live.peak


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
