"""One row each: a workload trained serially, by vmap, or as an array.

A measure is a generator: it prepares everything, yields the step to be timed, is sent seconds per step, and returns its
row. So a process can prepare several rows and then time them in one go, while nothing else runs.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import outcore
from outcore.fusion import RunMode, choose, forecast
from outcore.fusion.program import autotune
from outcore.fusion.program.autotune import group_width, measure_convolutions
from outcore.fusion.rules.convolution import MemberConvolution
from outcore.fusion.verify import disagreement
from tests.fusion.workloads import Workload

Row = dict[str, Any]
Step = Callable[[], Any]
Measure = Generator[Step, float, Row]
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

    @property
    def on_gpu(self) -> bool:
        """Whether there is memory to look at."""
        return self.device.type == "cuda"

    def run(self, measures: list[Measure]) -> list[Row]:
        """Prepare all of them, time them with the machine for itself, and finish them; errors are rows too."""
        rows: list[Row] = [{} for _ in measures]
        steps: dict[int, Step] = {}
        for i, measure in enumerate(measures):
            try:
                steps[i] = next(measure)
            except StopIteration as done:
                rows[i] = done.value
            except Exception as error:
                rows[i] = _failed(error)
        taken: dict[int, float] = {}
        self.wait()
        if steps:
            with self.alone():
                for i, step in steps.items():
                    try:
                        taken[i] = autotune.time_steps(step, self.device, self.seconds, warm=0)
                    except Exception as error:
                        rows[i] = _failed(error)
        for i, seconds in taken.items():
            try:
                measures[i].send(seconds)
            except StopIteration as done:
                rows[i] = done.value
            except Exception as error:
                rows[i] = _failed(error)
        return rows

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def give_back(self) -> None:
        """Leave all memory to others, workspaces of libraries too; no graph may be left."""
        self.begin(tuned=False)
        if self.on_gpu:
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def begin(self, *, tuned: bool) -> Callable[[], Row]:
        """Begin a row; what is returned says afterwards which memory it took."""
        gc.collect()
        torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = self.tuned and tuned, 4
        if not self.on_gpu:
            return dict
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

        def used() -> Row:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - allocated
            gc.collect()
            torch.cuda.empty_cache()
            return {"peak_bytes": peak, "used_bytes": torch.cuda.memory_reserved() - reserved}

        return used


def _failed(error: Exception) -> Row:
    text = str(error).splitlines()
    return {"error": f"{type(error).__name__}: {text[0][:200] if text else ''}"}


def adam(params: Any, i: int = 0) -> torch.optim.Optimizer:
    """Other rates for other members."""
    return torch.optim.Adam(params, 1e-4 * (1 + i % 8))


def batch_of(bench: Bench, workload: Workload) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(t.to(bench.device) for t in workload.batch())


def plain(device: torch.device, workload: Workload, amp: bool) -> Step:
    """A step of one model in plain PyTorch."""
    model = workload.build(0).to(device)
    torch.manual_seed(0)
    batch = tuple(t.to(device) for t in workload.batch())
    if workload.adversarial:
        pairs = [(o.loss, o.optimizer(model, 0)) for o in workload.objectives(adam).values()]
    else:
        pairs = [(lambda m, x, y: F.cross_entropy(m(x), y), adam(model.parameters()))]

    def step() -> None:
        torch.backends.cudnn.benchmark = False
        for loss, optimizer in pairs:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                found = loss(model, *batch)
            found.backward()
            optimizer.step()

    return step


def eager(bench: Bench, workload: Workload, amp: bool) -> Measure:
    """Plain PyTorch, one model."""
    used = bench.begin(tuned=False)
    step = plain(bench.device, workload, amp)
    for _ in range(5):
        step()
    taken = used()
    return {"step_s": (yield step)} | taken


def make(
    bench: Bench, workload: Workload, members: int, amp: bool, way: RunMode | None, unfused: tuple[str, ...] = ()
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
    way: RunMode,
    *,
    unfused: tuple[str, ...] = (),
    layers: bool = False,
    predicted: bool = False,
    chained: bool = True,
    without: str | None = None,
    timed: bool = True,
) -> Measure:
    """An array in one way; its peak is that of a step, without cuDNN's trials."""
    used = bench.begin(tuned=True)
    array = make(bench, workload, members, amp, way, unfused)
    batch = batch_of(bench, workload)
    found: Row = {"layers": measure_convolutions(array, *batch)} if layers else {}
    for name in () if chained else array.slots[0].trainings:
        array.program(name, array.arguments(batch, None))[1].chains.clear()
    if predicted:
        at_once = None if way.parallel or way.width > 1 else 1
        try:
            found["predicted_bytes"] = forecast(array, *batch).peak_bytes(at_once=at_once)
        except Exception as error:  # the row is worth having without
            found["unpredicted"] = str(error)[:200]
        if way.width > 1:
            found["check"] = checked(array, batch)
    with forgoing(array, batch, without):
        for _ in range(_WARM):
            array.step(*batch)
        bench.wait()
        if bench.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(_WARM):
            array.step(*batch)
    found |= used()
    if timed:
        found["step_s"] = yield lambda: array.step(*batch)
    ways = list(array.coverage.values())
    counted = {w: ways.count(w) for w in sorted(set(ways))}
    return found | {"refused": array.runner.refused, "way": str(array.way), "coverage": counted}


@contextlib.contextmanager
def forgoing(array: outcore.fusion.FusedArray, batch: tuple[torch.Tensor, ...], what: str | None) -> Iterator[None]:
    """Steps that are captured inside do without something, to see what it brings."""
    if what == "joins":
        for name in array.slots[0].trainings:
            array.program(name, array.arguments(batch, None))[1].joins.clear()
    kept = MemberConvolution.cropped, MemberConvolution.as_product
    if what == "crops":
        MemberConvolution.cropped = lambda conv, size, weight: (conv, weight)
        MemberConvolution.as_product = lambda conv, x, w: (x, w.flatten(2)) if conv.is_pointwise(w.shape[3:]) else None
    try:
        yield
    finally:
        MemberConvolution.cropped, MemberConvolution.as_product = kept


def checked(array: outcore.fusion.FusedArray, batch: tuple[torch.Tensor, ...]) -> str:
    """Whether fused gradients are the model's own here, in this precision; dropout lets everything pass meanwhile."""
    args = array.arguments(batch, None)
    for name in array.slots[0].trainings:
        _, program = array.program(name, args)
        if program.obstacle is not None:
            return program.obstacle
        with program.without_dropout() as certain, array.runner.beside(array.groups[0]):
            wrong = disagreement(array.groups[0], name, program, args) if certain else "nothing: it draws numbers"
        if wrong is not None:
            return wrong
    return "equal"


def vmapped(bench: Bench, workload: Workload, amp: bool, members: int) -> Measure:
    """torch.func as its tutorial shows it, with one Adam on the stacked parameters."""
    from torch.func import functional_call, stack_module_state, vmap

    used = bench.begin(tuned=False)
    models = [workload.build(0).to(bench.device) for _ in range(members)]
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = adam(list(params.values()))
    x, y = batch_of(bench, workload)

    def loss(p: Any, b: Any) -> torch.Tensor:
        return F.cross_entropy(functional_call(base, (p, b), (x,)), y)

    def step() -> None:
        torch.backends.cudnn.benchmark = False
        optimizer.zero_grad()
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=amp):
            total = vmap(loss, randomness="different")(params, buffers).sum()
        total.backward()
        optimizer.step()

    for _ in range(3):
        step()
    taken = used()
    return {"step_s": (yield step)} | taken


@contextlib.contextmanager
def clocks_alone(bench: Bench) -> Iterator[None]:
    """`choose` has the machine for itself while it times, and prepares beside others."""
    time_steps, measure = autotune.time_steps, autotune.measure_convolutions

    def timed(step: Step, device: torch.device, seconds: float, *, warm: int, fastest: bool = False) -> float:
        for _ in range(warm):
            step()
        bench.wait()
        with bench.alone():
            return time_steps(step, device, seconds, warm=1, fastest=fastest)

    def measured(*args: Any, **settings: Any) -> dict[str, int]:
        with bench.alone():
            return measure(*args, **settings)

    autotune.time_steps, autotune.measure_convolutions = timed, measured
    try:
        yield
    finally:
        autotune.time_steps, autotune.measure_convolutions = time_steps, measure


def prediction(bench: Bench, workload: Workload, amp: bool, members: int) -> Measure:
    """What `choose` says before training, and what then happens; timed with the machine for itself."""
    bench.begin(tuned=True)
    array = make(bench, workload, members, amp, RunMode(members))
    batch = batch_of(bench, workload)
    for name in array.slots[0].trainings:
        array.program(name, array.arguments(batch, None))
    last = workload.images
    ways = [RunMode(group_width(members), True, channels_last=last), RunMode(1, True, True, channels_last=last)]
    bench.wait()
    with clocks_alone(bench):
        made = choose(array, *batch, ways=ways, seconds=bench.seconds)
        measured = autotune.time_steps(lambda: array.step(*batch), bench.device, bench.seconds, warm=2 * _WARM)
        again = min(autotune._time_serially(array, batch, None, bench.seconds) for _ in range(2))
    return {
        "predicted_step_s": made.best.predicted_s, "serial_s": made.serial_s, "way": str(made.best.way),
        "measured_step_s": measured, "measured_serial_s": again,
        "predicted_bytes": made.memory.peak_bytes() if made.memory else None,
        "trials": [{"way": str(t.way), "times_s": t.times_s, "predicted_s": t.predicted_s} for t in made.trials],
    }  # fmt: skip
    yield  # never: choosing has its own clock


def kernels(bench: Bench, workload: Workload, amp: bool, members: int, way: RunMode, count: int = 14) -> Measure:
    """The kernels of an eager step that take longest."""
    from torch.profiler import ProfilerActivity, profile

    bench.begin(tuned=True)
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
    yield  # never: the profiler has its own clock


def use(bench: Bench, workload: Workload, amp: bool, members: int, way: RunMode, steps: int = 4) -> Measure:
    """How much of the GPU replayed steps keep at work, by the profiler's account of their kernels."""
    bench.begin(tuned=True)
    array = make(bench, workload, members, amp, way)
    batch = batch_of(bench, workload)
    for _ in range(2 * _WARM):
        array.step(*batch)
    step_s = yield lambda: array.step(*batch)
    if not bench.on_gpu:
        return {"step_s": step_s}
    with bench.alone():
        return {"step_s": step_s} | occupied(lambda: array.step(*batch), steps, step_s)


def occupied(step: Step, steps: int, step_s: float) -> Row:
    """Shares of the step's time: kernels at work, on every multiprocessor, and what they fill of its threads."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    kernels = [(e["ts"], e["dur"], e["args"]) for e in events if e.get("cat") == "kernel"]
    kernels.sort(key=lambda k: k[:2])
    busy, filled, threads, until = 0.0, 0.0, 0.0, 0.0
    for begin, lasts, facts in kernels:
        alone = max(0.0, begin + lasts - max(begin, until))
        until = max(until, begin + lasts)
        busy += alone
        filled += alone * min(1.0, float(facts.get("blocks per SM", 0)))
        threads += alone * float(facts.get("est. achieved occupancy %", 0)) / 100
    whole = steps * step_s * 1e6
    shares = {"busy": busy / whole, "filled": filled / whole, "occupancy": threads / whole}
    return {"kernels": len(kernels) // steps} | shares
