"""One row each: a workload trained serially, by vmap, or as an array, timed while nothing else runs."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.fusion.workloads import Workload

import outcore
from outcore.fusion import Way, choice, choose, forecast
from outcore.fusion.layerwise import measure_convolutions

Row = dict[str, Any]
_WARM = 2
"""Steps that a CUDA graph is not captured in."""


@dataclass
class Bench:
    """Where and how long to measure."""

    device: torch.device
    seconds: float
    alone: Callable[[], contextlib.AbstractContextManager[None]]
    tuned: bool = True
    """Let cuDNN try its algorithms for all but plain PyTorch."""

    def time(self, step: Callable[[], Any]) -> float:
        """Seconds per step, with the machine for itself."""
        self.wait()
        with self.alone():
            return choice.time_steps(step, self.device, self.seconds, warm=0)

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def clean(self, *, tuned: bool) -> None:
        """Begin a row with empty memory."""
        gc.collect()
        torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = self.tuned and tuned, 4
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def used(self) -> int:
        """Bytes that are reserved and cannot be given back: what the row really takes, graphs included."""
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def peak(self) -> int:
        """Largest number of allocated bytes."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


def adam(params: Any, i: int = 0) -> torch.optim.Optimizer:
    """Other rates for other members."""
    return torch.optim.Adam(params, 1e-4 * (1 + i % 8))


def batch_of(bench: Bench, workload: Workload) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(t.to(bench.device) for t in workload.batch())


def eager(bench: Bench, workload: Workload, amp: bool) -> Row:
    """Plain PyTorch, one model."""
    bench.clean(tuned=False)
    model = workload.build(0).to(bench.device)
    batch = batch_of(bench, workload)
    if workload.adversarial:
        pairs = [(o.loss, o.optimizer(model, 0)) for o in workload.objectives(adam).values()]
    else:
        pairs = [(lambda m, x, y: F.cross_entropy(m(x), y), adam(model.parameters()))]

    def step() -> None:
        for loss, optimizer in pairs:
            optimizer.zero_grad()
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=amp):
                found = loss(model, *batch)
            found.backward()
            optimizer.step()

    for _ in range(5):
        step()
    return {"step_s": bench.time(step), "peak_bytes": bench.peak()}


def make(
    bench: Bench, workload: Workload, members: int, amp: bool, way: Way | None, unfused: tuple[str, ...] = ()
) -> outcore.fusion.FusedArray:
    first = workload.build(0).to(bench.device)
    models = [first, *(copy.deepcopy(first) for _ in range(members - 1))]
    settings: dict[str, Any] = {
        "autocast": torch.bfloat16 if amp else None, "way": way, "check": False, "unfused": unfused,
    }  # fmt: skip
    if workload.adversarial:
        return outcore.fuse(models, objectives=workload.objectives(adam), **settings)
    return outcore.fuse(models, loss=F.cross_entropy, optimizer=adam, **settings)


def ours(
    bench: Bench,
    workload: Workload,
    amp: bool,
    members: int,
    way: Way,
    *,
    unfused: tuple[str, ...] = (),
    layers: bool = False,
    predicted: bool = True,
) -> Row:
    """An array in one way."""
    bench.clean(tuned=True)
    array = make(bench, workload, members, amp, way, unfused)
    batch = batch_of(bench, workload)
    found: Row = {"layers": measure_convolutions(array, *batch)} if layers else {}
    if predicted:
        at_once = None if way.parallel or way.width > 1 else 1
        try:
            found["predicted_bytes"] = forecast(array, *batch).peak_bytes(at_once=at_once)
        except Exception as error:  # the row is worth having without
            found["unpredicted"] = str(error)[:200]
    for _ in range(_WARM):
        array.step(*batch)
    bench.wait()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()  # cuDNN's trials are over
    for _ in range(_WARM):
        array.step(*batch)
    found["step_s"] = bench.time(lambda: array.step(*batch))
    return found | {
        "peak_bytes": bench.peak(), "used_bytes": bench.used(), "refused": array.runner.refused, "way": str(array.way),
        "coverage": {w: list(array.coverage.values()).count(w) for w in sorted(set(array.coverage.values()))},
    }  # fmt: skip


def vmapped(bench: Bench, workload: Workload, amp: bool, members: int) -> Row:
    """torch.func as its tutorial shows it, with one Adam on the stacked parameters."""
    from torch.func import functional_call, stack_module_state, vmap

    bench.clean(tuned=False)
    models = [workload.build(0).to(bench.device) for _ in range(members)]
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = adam(list(params.values()))
    x, y = batch_of(bench, workload)

    def loss(p: Any, b: Any) -> torch.Tensor:
        return F.cross_entropy(functional_call(base, (p, b), (x,)), y)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=amp):
            total = vmap(loss, randomness="different")(params, buffers).sum()
        total.backward()
        optimizer.step()

    for _ in range(3):
        step()
    return {"step_s": bench.time(step), "peak_bytes": bench.peak()}


def prediction(bench: Bench, workload: Workload, amp: bool, members: int) -> Row:
    """What `choose` says before training, with nothing else running while it times."""
    bench.clean(tuned=True)
    array = make(bench, workload, members, amp, None)
    batch = batch_of(bench, workload)
    formats = (True,) if workload.images else (False,)
    ways = [
        way
        for last in formats
        for way in (Way(members, True, channels_last=last), Way(1, True, True, channels_last=last))
    ]
    plain = choice.time_steps

    def quiet(step: Callable[[], Any], device: torch.device, seconds: float, *, warm: int) -> float:
        for _ in range(warm):
            step()
        bench.wait()
        with bench.alone():
            return plain(step, device, seconds, warm=0)

    choice.time_steps = quiet
    try:
        made = choose(array, *batch, ways=ways, seconds=bench.seconds)
    finally:
        choice.time_steps = plain
    return {
        "predicted_step_s": made.best.predicted_s, "serial_s": made.serial_s, "way": str(made.best.way),
        "predicted_bytes": made.memory.peak_bytes() if made.memory else None,
        "trials": [{"way": str(t.way), "times_s": t.times_s, "predicted_s": t.predicted_s} for t in made.trials],
    }  # fmt: skip


def kernels(bench: Bench, workload: Workload, amp: bool, members: int, way: Way, count: int = 14) -> Row:
    """The kernels of an eager step that take longest."""
    from torch.profiler import ProfilerActivity, profile

    bench.clean(tuned=True)
    array = make(bench, workload, members, amp, way)
    batch = batch_of(bench, workload)
    for _ in range(3):
        array.step(*batch)
    bench.wait()
    with bench.alone(), profile(activities=[ProfilerActivity.CUDA]) as seen:
        array.step(*batch)
        bench.wait()
    top = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:count]
    return {"kernels": [(e.key[:110], e.count, round(e.self_device_time_total / 1e3, 3)) for e in top]}
