"""Time every call of a network by itself.

Calls are taken one at a time, so a network that does not fit on the device is measured all the same as long as each of
its calls fits, and a call that does not is measured on a smaller image or batch and scaled. Calls that are alike are
measured once. What costs most is measured first: when the time is up or the user interrupts, the rest is small, and
what was measured is kept.

Backward is timed from a kept graph, without what it takes to start the autograd engine, which a whole step does once;
on a GPU in the calling thread, because waking the engine's own takes longer than most calls. What the host does between
the calls is measured on a network of small layers (`outcore.cost.pace`), and how fast the host is at the moment is
taken out of the times to issue (`outcore.cost.beat`).
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from outcore.cost.alone import Alone
from outcore.cost.beat import Beats, beat_s
from outcore.cost.costs import CallCost, Costs, Source
from outcore.cost.pace import between_calls
from outcore.cost.saved import account, device_of, quietly, recording_of, signature
from outcore.cost.surroundings import Surroundings
from outcore.errors import MachineError
from outcore.graph import Graph
from outcore.graph.preserve import preserved
from outcore.graph.recording import Recording, Step
from outcore.machine.clock import Timing, time_calls

__all__ = ["clock_for", "measure"]

Progress = Callable[[int, int, str], None]
"""Called with the number of measured calls, the number of all, and the name of the next."""

_MOST_RUNS = 30
_CPU_LIMIT = 2**30


def measure(
    graph: Graph,
    device: torch.device | str | None = None,
    *,
    time_limit_s: float = 60.0,
    memory_limit_bytes: int | None = None,
    runs: int = _MOST_RUNS,
    accounted: Costs | None = None,
    progress: Progress | None = None,
) -> Costs:
    """Measure what every call of a network takes on a device: time forward and backward, bytes, FLOPs.

    >>> import outcore, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    >>> costs = measure(outcore.capture(net, [(1, 3, 32, 32)]), "cpu", time_limit_s=5)
    >>> costs["0#0"].time_source
    'measured'

    Args:
        graph: as captured, with its model; the model is not changed and may be on another device, or on ``meta``.
        device: where to measure; by default where the model is.
        time_limit_s: when it is used up, what is left stays without a time, with that as the reason.
        memory_limit_bytes: no call takes more than this; larger ones are measured smaller and scaled. By default nine
            tenths of what is free on a GPU, on a CPU a gibibyte.
        runs: how often a call is run at most.
        accounted: bytes and FLOPs from `outcore.cost.account` for the same device, if they are known already.
        progress: called before each measurement.
    """
    target = torch.device(device) if device is not None else device_of(graph)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise MachineError("there is no GPU here to measure on; use outcore.estimate with a machine from the catalogue")
    costs = _measure(graph, target, time_limit_s, memory_limit_bytes, runs, accounted, progress)

    def alone(small: Graph) -> Costs:
        return _measure(small, target, 5.0, None, 10, None, None)

    adding = _adding(target)
    scale = costs.beat_s / adding.beat_s if adding.beat_s else 1.0
    return replace(
        costs,
        between_s=between_calls(target, alone, clock_for(target), costs.beat_s),
        sum_bytes_per_s=adding.bytes_per_s,
        sum_dispatch_s=adding.dispatch_s * scale,
    )


def _measure(
    graph: Graph,
    target: torch.device,
    time_limit_s: float,
    memory_limit_bytes: int | None,
    runs: int,
    accounted: Costs | None,
    progress: Progress | None,
) -> Costs:
    """Every call alone, without what is between them."""
    bench = _Bench(graph, target, memory_limit_bytes, runs, accounted)
    groups: dict[Hashable, list[str]] = {}
    for name in graph.calls:
        groups.setdefault(signature(graph, bench.steps[name]), []).append(name)
    order = sorted(groups.values(), key=lambda names: -bench.weight(names[0]))
    end = time.monotonic() + time_limit_s
    share_s = min(0.1, 0.4 * time_limit_s / max(1, len(order)))
    found: dict[str, CallCost] = {}
    notes = list(bench.costs.notes)
    with preserved(graph.module.model, contents=False), quietly():
        bench.surroundings.hold()
        try:
            for done, names in enumerate(order):
                if time.monotonic() > end:
                    notes.append(f"the time limit of {time_limit_s:g} s was reached after {done} of {len(order)} calls")
                    break
                if progress is not None:
                    progress(done, len(order), names[0])
                found[names[0]] = bench.time(names[0], share_s)
        except KeyboardInterrupt:
            notes.append(f"interrupted after {len(found)} of {len(order)} calls")
        finally:
            bench.surroundings.release()
        if progress is not None:
            progress(len(found), len(order), "")
    reason = "" if len(found) == len(order) else notes[-1]
    found = {name: bench.finished(cost) for name, cost in found.items()}
    timed = {name: found.get(names[0]) for names in groups.values() for name in names}
    calls = {name: _with_time(cost, timed[name], reason) for name, cost in bench.costs.calls.items()}
    return replace(
        bench.costs,
        calls=calls,
        notes=tuple(notes),
        library_bytes=bench.library_bytes(),
        start_s=bench.start_s(),
        beat_s=bench.beats.median_s,
    )


class _Bench:
    """What all measurements of one graph share."""

    def __init__(
        self,
        graph: Graph,
        device: torch.device,
        memory_limit_bytes: int | None,
        runs: int,
        accounted: Costs | None,
    ) -> None:
        self.graph, self.device, self.runs = graph, device, runs
        self.costs = accounted if accounted is not None else account(graph, device)
        self.recording: Recording = recording_of(graph)
        self.steps: Mapping[str, Step] = {s.name: s for s in self.recording.steps if s.kind != "guard"}
        self.beats = Beats()
        self.engines: list[Timing] = []
        self.surroundings = Surroundings(device)
        self.before = 0
        if device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # so that they are counted when they come back
            self.before = torch.cuda.memory_allocated(device)
        self.limit = memory_limit_bytes if memory_limit_bytes is not None else _free_bytes(device)

    def weight(self, name: str) -> float:
        """About how much time a call takes, to order them."""
        cost = self.costs.calls[name]
        return cost.flops_forward + 20.0 * self.need(name)

    def need(self, name: str) -> int:
        """Bytes one call needs alone, forward and backward."""
        cost, call = self.costs.calls[name], self.graph.calls[name]
        given = sum(self.graph.values[v].bytes for v in call.inputs) + cost.parameter_bytes
        kept = sum(s.bytes for s in cost.saved if s.kind == "derived")
        gradients = sum(g.bytes for g in cost.gradients) + (cost.output_bytes if cost.gradients else 0)
        return (
            given
            + cost.output_bytes
            + kept
            + gradients
            + max(cost.workspace_forward_bytes, cost.workspace_backward_bytes)
        )

    def time(self, name: str, seconds: float) -> CallCost:
        """The cost of a call with its time, measured, scaled from a smaller one, or with the reason why not."""
        cost, reason = self.costs.calls[name], ""
        fits = self.need(name) <= self.limit
        for integers in ("index", "zero", "one") if fits else ():
            try:
                return self._time(name, seconds, {}, 1.0, integers)
            except torch.OutOfMemoryError as error:
                reason, fits = _first_line(error), False
                torch.cuda.empty_cache()
                break
            except Exception as error:
                reason = reason or _first_line(error)
        if fits:
            return replace(cost, reason=reason)
        for shapes, scale in self._smaller(name):
            try:
                return self._time(name, seconds, shapes, scale, "index")
            except torch.OutOfMemoryError as error:
                reason = _first_line(error)
                torch.cuda.empty_cache()
            except Exception as error:
                reason = (
                    f"it needs {self.need(name):,} bytes of {self.limit:,}, and smaller it fails: {_first_line(error)}"
                )
                break
        return replace(cost, reason=reason or f"it needs {self.need(name):,} bytes of {self.limit:,}")

    def finished(self, cost: CallCost) -> CallCost:
        """A cost as it was counted, without the engine's start, at the median pace of the host."""
        backward = cost.backward.less(self.engine) if cost.backward is not None else None
        if self.device.type == "cpu":
            return replace(cost, backward=backward)
        return replace(cost, forward=self.beats.in_seconds(cost.forward), backward=self.beats.in_seconds(backward))

    @functools.cached_property
    def engine(self) -> Timing:
        """What it takes to start the engine: the median of all that was seen beside the backward passes."""
        middle = statistics.median([e.median_s for e in self.engines])
        return replace(
            Timing.of([middle]), dispatch_s=statistics.median([engine.dispatch_s for engine in self.engines])
        )

    def start_s(self) -> float:
        """Host time of starting backward in a thread of its own; on a CPU there is none."""
        return self._engine().dispatch_s * self.beats.median_s if self.device.type == "cuda" else 0.0

    def _engine(self) -> Timing:
        """What it takes to start the autograd engine for a graph that does nothing, counted in beats."""
        x = torch.ones(1, device=self.device, requires_grad=True)
        empty = _gradients([x.view(1)], [x], [torch.ones(1, device=self.device)])
        if self.device.type == "cpu":
            return time_calls(empty, self.device, seconds=0.002, most=5, clock=clock_for(self.device))
        before = beat_s()
        return self.beats.counted(time_calls(empty, self.device, seconds=0.02, most=9), before)

    def library_bytes(self) -> int:
        """What the device's libraries allocated since the start and still hold."""
        if self.device.type != "cuda":
            return 0
        return max(0, torch.cuda.memory_allocated(self.device) - self.before)

    def _time(
        self, name: str, seconds: float, shapes: Mapping[str, tuple[int, ...]], scale: float, integers: str
    ) -> CallCost:
        cost = self.costs.calls[name]
        alone = Alone(self.graph, self.steps[name], self.recording, self.device, integers=integers, shapes=shapes)
        if self.device.type == "cuda" and scale == 1.0:
            cost = self._weigh(alone, cost)
        alone.prepare(self.runs + 5)
        with alone.entered():
            forward = self._clocked(alone.run, seconds, list(alone.values.values()))
        backward = None
        roots, gradients = alone.gradients_for(alone.forward())
        if roots and alone.wanted and cost.has_backward:
            backward = self._time_backward(alone, roots, gradients, forward, seconds)
        source: Source = "measured" if scale == 1.0 else "scaled"
        return replace(
            cost,
            forward=forward.scaled(scale),
            backward=backward.scaled(scale) if backward is not None else None,
            time_source=source,
        )

    def _time_backward(
        self,
        alone: Alone,
        roots: list[torch.Tensor],
        gradients: list[torch.Tensor],
        forward: Timing,
        seconds: float,
    ) -> Timing:
        """Backward and the start of the engine, which is timed beside it."""
        with _in_this_thread(self.device):
            self.engines.append(self._engine())
            try:
                return self._clocked(_gradients(roots, alone.wanted, gradients), seconds, gradients)
            except RuntimeError:  # a graph that can be used once only, as of a checkpointed region

                def both() -> None:
                    alone.backward(*alone.gradients_for(alone.forward()))

                return self._clocked(both, seconds, gradients).less(forward)

    def _clocked(self, call: Callable[[], object], seconds: float, warm: list[torch.Tensor]) -> Timing:
        """Time a call as in a step: only what the call before made is in the cache."""
        between = self.surroundings.before(warm)
        if self.device.type != "cpu":
            before = beat_s()
            timing = time_calls(call, self.device, seconds=seconds, most=self.runs, between=between)
            return self.beats.counted(timing, before)
        clock, samples = clock_for(self.device), list[float]()
        begin = time.perf_counter()
        call()
        least = 3 if time.perf_counter() - begin < seconds else 1
        end = time.perf_counter() + seconds
        while len(samples) < least or (len(samples) < self.runs and time.perf_counter() < end):
            between()
            start = clock()
            call()
            samples.append(clock() - start)
        return Timing.of(samples)

    def _weigh(self, alone: Alone, cost: CallCost) -> CallCost:
        """The workspace as the GPU's allocator saw it, with what libraries take inside of an operation."""
        alone.backward(*alone.gradients_for(alone.forward())) if cost.has_backward else alone.forward()
        torch.cuda.reset_peak_memory_stats(self.device)
        outputs = alone.forward()
        after = torch.cuda.memory_allocated(self.device)
        forward = torch.cuda.max_memory_allocated(self.device) - after
        backward = 0
        roots, gradients = alone.gradients_for(outputs)
        del outputs
        if roots and cost.has_backward:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            made = alone.backward(roots, gradients)
            sizes = [-(-g.bytes // 512) * 512 for g in cost.gradients]
            backward = torch.cuda.max_memory_allocated(self.device) - before - sum(sizes)
            del made
        return replace(
            cost,
            workspace_forward_bytes=max(0, forward),
            workspace_backward_bytes=max(0, backward),
            workspace_source="measured",
        )

    def _smaller(self, name: str) -> list[tuple[dict[str, tuple[int, ...]], float]]:
        """Smaller versions of a call that fit, the largest first: less of the batch, else less of the image."""
        values = [self.graph.values[v] for v in self.graph.calls[name].inputs]
        largest = max((v for v in values if len(v.shape) > 1), key=lambda v: v.bytes, default=None)
        if largest is None:
            return []
        shape, scale, found = list(largest.shape), 1.0, []
        movable = [0] if shape[0] > 1 else []
        movable += range(2, len(shape)) if len(shape) > 2 else []
        need = self.need(name) - self.costs.calls[name].parameter_bytes
        for _ in range(40):
            dim = max(movable, key=lambda d: (d == 0 and shape[0] > 1, shape[d]), default=None)
            if dim is None or shape[dim] < (2 if dim == 0 else 32):
                break
            half = shape[dim] // 2
            scale, shape[dim] = scale * shape[dim] / half, half
            if need / scale <= self.limit:
                changed = {d: n for d, n in enumerate(shape) if n != largest.shape[d]}
                found.append(({v.name: _resized(v.shape, largest.shape, changed) for v in values}, scale))
                if len(found) == 3:
                    break
        return found


def _resized(shape: tuple[int, ...], model: tuple[int, ...], changed: Mapping[int, int]) -> tuple[int, ...]:
    """A shape with the same changes as the largest one, where it agrees with it."""
    if len(shape) != len(model):
        return shape
    return tuple(changed[d] if d in changed and n == model[d] else n for d, n in enumerate(shape))


def _with_time(cost: CallCost, timed: CallCost | None, reason: str) -> CallCost:
    """A cost under its own name with the time of the call like it that was measured."""
    if timed is None:
        return replace(cost, reason=reason)
    return replace(
        cost,
        forward=timed.forward,
        backward=timed.backward,
        time_source=timed.time_source,
        reason=timed.reason,
        workspace_forward_bytes=timed.workspace_forward_bytes,
        workspace_backward_bytes=timed.workspace_backward_bytes,
        workspace_source=timed.workspace_source,
    )


def _gradients(
    roots: list[torch.Tensor], wanted: list[torch.Tensor], gradients: list[torch.Tensor]
) -> Callable[[], object]:
    """Backward from roots to what is wanted, again and again."""
    return partial(torch.autograd.grad, roots, wanted, gradients, retain_graph=True, allow_unused=True)


def _in_this_thread(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Backward in the calling thread, where a device would have one of its own."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.autograd.set_multithreading_enabled(False)


@dataclass(frozen=True, slots=True)
class _Adding:
    """What it takes to add one gradient to another."""

    bytes_per_s: float
    dispatch_s: float
    beat_s: float


@functools.cache
def _adding(device: torch.device) -> _Adding:
    """Measured on two large tensors."""
    count = 2**24 if device.type == "cuda" else 2**20
    a, b = torch.ones(count, device=device), torch.ones(count, device=device)
    between = Surroundings(device).before([a])
    before = beat_s()
    timing = time_calls(lambda: a.add_(b), device, seconds=0.02, clock=clock_for(device), between=between)
    return _Adding(12.0 * count / timing.median_s, timing.dispatch_s, (before + beat_s()) / 2)


def clock_for(device: torch.device) -> Callable[[], float]:
    """On a CPU with one thread, the thread's own time: the same on an idle machine, and right on a busy one."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return min(_CPU_LIMIT, *(n // 2 for n in available)) if available else _CPU_LIMIT


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
