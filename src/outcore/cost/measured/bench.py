"""Times the calls of a network one by one.

Backward is timed from a kept graph, without what it takes to start the autograd engine, which a whole step does once;
on a GPU in the calling thread, because waking the engine's own takes longer than most calls. Gradients have the layout
that they have in a step (`outcore.cost.measured.saved_bytes`), only the results of the call before are in the cache
(`outcore.cost.measured.cache_state`), and the speed of the host at the moment is divided out of the launch times
(`outcore.cost.measured.host_speed`).

A call that does not fit on the device is timed on a smaller version of itself (`smaller`). Half of the batch as long as
there is one, then half of the image, again and again: what is left out is the same work on other numbers, so the time
is multiplied by the ratio of sizes. Weights stay whole.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial

import torch

from outcore.cost.costs import CallCost, Costs, Source
from outcore.cost.measured.cache_state import CacheState, bytes_touched
from outcore.cost.measured.host_speed import HostSpeed, reference_work_s
from outcore.cost.measured.isolated_call import IsolatedCall
from outcore.cost.measured.saved_bytes import account, signature
from outcore.cost.measured.trial_call import runs_on_the_model
from outcore.graph import Graph
from outcore.graph.record.preserve import state_restored
from outcore.machine.clock import TimedRuns, clock_for, time_calls
from outcore.machine.free_memory import host_free_bytes

_CPU_LIMIT = 2**30
_ARRANGING = 1 / 16
"""Share of the time for a call that each arranging of the cache may take, of which there are four at least."""
_LEAST_WORKSPACE = 2**20
"""A matrix product's workspace is no smaller."""


class CallBench:
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
        self.recording = graph.recording
        self.steps = self.recording.calls()
        self.host_speed = HostSpeed()
        self.engines: list[TimedRuns] = []
        self.cache_state, self.touched = CacheState(device), bytes_touched(graph, self.costs)
        self.before = 0
        if device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # so that they are counted when they come back
            self.before = torch.cuda.memory_allocated(device)
        self.limit = memory_limit_bytes if memory_limit_bytes is not None else _free_bytes(device)

    def likeness(self, name: str) -> Hashable:
        """A key of calls that take the same time: settings, shapes, and the layout of their gradients."""
        outputs, arriving = self.graph.calls[name].outputs, self.costs.calls[name].arriving
        layouts = tuple((outputs.index(of), stride) for of, stride in arriving.items())
        return signature(self.graph, self.steps[name]), layouts

    def weight(self, name: str) -> float:
        """About how much time a call takes, to order them."""
        cost = self.costs.calls[name]
        return cost.flops_forward + 20.0 * self.need(name)

    def need(self, name: str) -> int:
        """Bytes one isolated call needs, forward and backward."""
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
        with self._restored(name):
            return self._time_somehow(name, seconds)

    def _restored(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context after which the model is as before, where the call runs on the model itself."""
        if runs_on_the_model(self.graph, self.steps[name]):
            return state_restored(self.graph.module.model, gradients=True)
        return contextlib.nullcontext()

    def _time_somehow(self, name: str, seconds: float) -> CallCost:
        """Try integers of several kinds, then smaller versions of the call."""
        cost, reason = self.costs.calls[name], ""
        fits = self.need(name) <= self.limit
        ways = [("index", True), ("zero", True), ("one", True), *([("index", False)] if cost.arriving else [])]
        for integers, turned in ways if fits else ():
            try:
                return self._time(name, seconds, {}, 1.0, integers, turned=turned)
            except torch.OutOfMemoryError as error:
                reason, fits = _first_line(error), False
                torch.cuda.empty_cache()
                break
            except Exception as error:
                reason = reason or _first_line(error)
        if fits:
            return replace(cost, reason=reason)
        for shapes, scale in smaller(self.graph, name, self.need(name) - cost.parameter_bytes, self.limit):
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

    def memory_only(self, name: str) -> CallCost:
        """The cost of a call whose time was not measured, with its workspace: it runs twice."""
        cost = self.costs.calls[name]
        if self.device.type != "cuda" or self.need(name) > self.limit:
            return cost
        try:
            with self._restored(name):
                isolated = IsolatedCall(
                    self.graph, self.steps[name], self.recording, self.device, arriving=cost.arriving
                )
                return self._measure_workspace(isolated, cost)
        except Exception:  # as it was counted, then
            torch.cuda.empty_cache()
            return cost

    def finished(self, cost: CallCost) -> CallCost:
        """A cost as it was counted, without the engine's start, at the speed of an undisturbed host."""
        backward = cost.backward.less(self.engine) if cost.backward is not None else None
        if self.device.type == "cpu":
            return replace(cost, backward=backward)
        return replace(
            cost, forward=self.host_speed.in_seconds(cost.forward), backward=self.host_speed.in_seconds(backward)
        )

    @functools.cached_property
    def engine(self) -> TimedRuns:
        """Time to start the engine: the median of all that was measured beside the backward passes."""
        middle = statistics.median([e.median_s for e in self.engines])
        return replace(
            TimedRuns.of([middle]), dispatch_s=statistics.median([engine.dispatch_s for engine in self.engines])
        )

    def start_s(self) -> float:
        """Host time of starting backward in a thread of its own; on a CPU there is none."""
        return self._engine().dispatch_s * self.host_speed.reference_s if self.device.type == "cuda" else 0.0

    def _engine(self) -> TimedRuns:
        """Time to start the autograd engine for an empty graph, in units of the reference work."""
        x = torch.ones(1, device=self.device, requires_grad=True)
        empty = _gradients([x.view(1)], [x], [torch.ones(1, device=self.device)])
        if self.device.type == "cpu":
            return time_calls(empty, self.device, seconds=0.002, most=5, clock=clock_for(self.device))
        before = reference_work_s()
        most = 3 if self.engines else 9  # one of many, of which the median counts
        return self.host_speed.counted(time_calls(empty, self.device, seconds=0.02, most=most), before)

    def library_bytes(self) -> int:
        """Bytes that the device's libraries allocated since the start and still hold: the workspaces of matrix
        products, one for each thread that makes some. A network without them, not even in a convolution, has none."""
        if self.device.type != "cuda" or torch.cuda.memory_allocated(self.device) - self.before < _LEAST_WORKSPACE:
            return 0
        x = torch.ones(8, 8, device=self.device, requires_grad=True)
        torch.autograd.grad((x @ x).sum(), x)  # calls were measured in one thread, and a step has two
        del x
        return max(0, torch.cuda.memory_allocated(self.device) - self.before)

    def _time(
        self,
        name: str,
        seconds: float,
        shapes: Mapping[str, tuple[int, ...]],
        scale: float,
        integers: str,
        *,
        turned: bool = True,
    ) -> CallCost:
        cost = self.costs.calls[name]
        isolated = IsolatedCall(
            self.graph,
            self.steps[name],
            self.recording,
            self.device,
            integers=integers,
            shapes=shapes,
            arriving=cost.arriving if turned else None,
        )
        if self.device.type == "cuda" and scale == 1.0:
            cost = self._measure_workspace(isolated, cost)
        isolated.prepare(self.runs + 5)
        with isolated.entered():
            forward = self._clocked(isolated.run, seconds, list(isolated.values.values()), self.touched[name].forward)
        backward = None
        roots, gradients = isolated.gradients_for(isolated.forward())
        if roots and isolated.wanted and cost.has_backward:
            backward = self._time_backward(isolated, roots, gradients, forward, seconds, self.touched[name].backward)
        source: Source = "measured" if scale == 1.0 else "scaled"
        return replace(
            cost,
            forward=forward.scaled(scale),
            backward=backward.scaled(scale) if backward is not None else None,
            time_source=source,
        )

    def _time_backward(
        self,
        isolated: IsolatedCall,
        roots: list[torch.Tensor],
        gradients: list[torch.Tensor],
        forward: TimedRuns,
        seconds: float,
        touched: int,
    ) -> TimedRuns:
        """The times of backward and of the start of the engine, which is timed beside it."""
        with in_this_thread(self.device):
            self.engines.append(self._engine())
            try:
                return self._clocked(_gradients(roots, isolated.wanted, gradients), seconds, gradients, touched)
            except RuntimeError:  # a graph that can be used once only, as of a checkpointed region

                def both() -> None:
                    isolated.backward(*isolated.gradients_for(isolated.forward()))

                return self._clocked(both, seconds, gradients, touched).less(forward)

    def _clocked(self, call: Callable[[], object], seconds: float, warm: list[torch.Tensor], touched: int) -> TimedRuns:
        """Time a call as in a step, which leaves the results of the call before in the cache and touches `touched`
        other bytes since it last used the rest."""
        between = self.cache_state.before(warm, touched, _ARRANGING * seconds)
        if self.device.type != "cpu":
            before = reference_work_s()
            timing = time_calls(call, self.device, seconds=seconds, warmup=1, most=self.runs, between=between)
            return self.host_speed.counted(timing, before)
        clock = clock_for(self.device)
        return time_calls(call, self.device, seconds=seconds, warmup=1, most=self.runs, clock=clock, between=between)

    def _measure_workspace(self, isolated: IsolatedCall, cost: CallCost) -> CallCost:
        """The workspace as the GPU's allocator saw it, with what libraries take inside of an operation."""
        isolated.backward(*isolated.gradients_for(isolated.forward())) if cost.has_backward else isolated.forward()
        torch.cuda.reset_peak_memory_stats(self.device)
        outputs = isolated.forward()
        after = torch.cuda.memory_allocated(self.device)
        forward = torch.cuda.max_memory_allocated(self.device) - after
        backward = 0
        roots, gradients = isolated.gradients_for(outputs)
        del outputs
        if roots and cost.has_backward:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            made = isolated.backward(roots, gradients)
            sizes = [-(-g.bytes // 512) * 512 for g in cost.gradients]
            backward = torch.cuda.max_memory_allocated(self.device) - before - sum(sizes)
            del made
        return replace(
            cost,
            workspace_forward_bytes=max(0, forward),
            workspace_backward_bytes=max(0, backward),
            workspace_source="measured",
        )


def _gradients(
    roots: list[torch.Tensor], wanted: list[torch.Tensor], gradients: list[torch.Tensor]
) -> Callable[[], object]:
    """A function that runs backward from roots to what is wanted, again and again."""
    return partial(torch.autograd.grad, roots, wanted, gradients, retain_graph=True, allow_unused=True)


def in_this_thread(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context in which backward runs in the calling thread, where a device would have one of its own."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.autograd.set_multithreading_enabled(False)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(0.9 * torch.cuda.mem_get_info(device)[0])
    return min(_CPU_LIMIT, host_free_bytes() // 2)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


_LEAST = 32
"""Length of an image's side below which a layer no longer works as it does on large ones."""
_TRIED = 3


def smaller(graph: Graph, name: str, need: int, limit: int) -> list[tuple[dict[str, tuple[int, ...]], float]]:
    """Shapes of a call's inputs at which it fits, with the factor for its time; the largest first.

    Args:
        graph: where the call is.
        name: its name.
        need: bytes it takes, without weights.
        limit: bytes it may take.
    """
    values = [graph.values[v] for v in graph.calls[name].inputs]
    largest = max((v for v in values if len(v.shape) > 1), key=lambda v: v.bytes, default=None)
    if largest is None:
        return []
    shape, scale, found = list(largest.shape), 1.0, []
    movable = [0] if shape[0] > 1 else []
    movable += range(2, len(shape)) if len(shape) > 2 else []
    for _ in range(40):
        dim = max(movable, key=lambda d: (d == 0 and shape[0] > 1, shape[d]), default=None)
        if dim is None or shape[dim] < (2 if dim == 0 else _LEAST):
            break
        half = shape[dim] // 2
        scale, shape[dim] = scale * shape[dim] / half, half
        if need / scale <= limit:
            changed = {d: n for d, n in enumerate(shape) if n != largest.shape[d]}
            found.append(({v.name: _resized(v.shape, largest.shape, changed) for v in values}, scale))
            if len(found) == _TRIED:
                break
    return found


def _resized(shape: tuple[int, ...], model: tuple[int, ...], changed: Mapping[int, int]) -> tuple[int, ...]:
    """A shape with the same changes as the largest one, where it agrees with it."""
    if len(shape) != len(model):
        return shape
    return tuple(changed[d] if d in changed and n == model[d] else n for d, n in enumerate(shape))
