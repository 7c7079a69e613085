"""A training step that is really run here, recorded call by call: what the prediction is put beside.

    python -m outcore.explore.measured_step < {"settings": {…}, "plan": null} > timeline.json

The job runs in this process alone, which may block, crash or be ended. After one step to warm up, steps are timed as
they are; then one is watched. Forward, every layer and function is timed under the name that the graph has for it; a
gradient that arrives at a call's output ends the backward of the call after it and begins its own, so what is
recomputed or fetched counts for the backward that needs it. What a plan does to saved tensors in forward is told from
the network by who calls it and by its names. Watching takes time of its own, so both times are given: of a step left
alone (`alone_s`), and of the one on the picture.

Memory is counted in one more step: the allocator's on a GPU, on a CPU the bytes of living tensors.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import outcore.memory
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.training_network import capture_training
from outcore.errors import OutcoreError
from outcore.explore.child_process import leave_with_parent
from outcore.explore.parts import ExploreSettings
from outcore.explore.plan_points import timeline_json
from outcore.explore.worker import trouble_of
from outcore.graph.naming import function_name, kind_of
from outcore.graph.record import intercept
from outcore.graph.structure import differentiable, leaves, square_loss, substitute
from outcore.job import Job
from outcore.machine.clock import wall_s
from outcore.machine.free_memory import free_bytes
from outcore.machine.units import format_bytes
from outcore.one_device.within import within
from outcore.program import Event, Timeline
from outcore.program.plan.document import Plan
from outcore.program.simulator.memory_curve import PARTS, RankMemory
from outcore.run.engine.setup import choose_device

__all__ = ["main", "measured_step", "record_step"]

_TIMED = 3
"""Steps that are timed."""
_TORCH, _MEMORY = (f"{Path(str(package.__file__)).parent}{os.sep}" for package in (torch, outcore.memory))
_PASSED_ON = (_TORCH, str(intercept.__file__))
"""Where calls of modules go through."""
_LONG_S = 20.0
"""After a step of this length no further one is timed."""


@dataclass(frozen=True)
class _Mark:
    """A moment: what begins then."""

    kind: str
    name: str
    at: Any
    bytes: int


class StepWatcher(TorchFunctionMode):
    """Notes when calls of a model begin and end; the model runs as ever."""

    def __init__(
        self, model: nn.Module, now: Callable[[], Any], held: Callable[[], int], known: frozenset[str] = frozenset()
    ) -> None:
        super().__init__()
        self._known = known
        """Calls of the network's own, where others call functions in between."""
        self.marks: list[_Mark] = []
        self.phase = "forward"
        self._now, self._held = now, held
        self._paths = {module: name for name, module in model.named_modules()}
        self._stack: list[str] = []
        self._inside = 0
        self._counts: Counter[str] = Counter()
        self._seen: set[Any] = set()
        self._current = ""
        self._hooks: list[Any] = []

    def mark(self, kind: str, name: str = "") -> None:
        """Something begins now."""
        self.marks.append(_Mark(kind, name, self._now(), self._held()))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the model's modules and all functions."""
        for module, path in self._paths.items():
            kind = kind_of(module) if path else "container"
            enter, leave = (self._enter, self._leave) if kind == "container" else (self._begin, self._end)
            self._hooks.append(module.register_forward_pre_hook(enter))
            self._hooks.append(module.register_forward_hook(leave))
        try:
            with self:
                yield
        finally:
            for hook in self._hooks:
                hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Time a function that is called outside of a layer."""
        if self._inside or self.phase == "step":
            return func(*args, **(kwargs or {}))
        begun = self._now(), self._held()
        result = func(*args, **(kwargs or {}))
        if next(leaves(result, torch.Tensor), None) is None:
            return result
        path = self._stack[-1] if self._stack else ""
        block = f"{path}.{function_name(func)}()" if path else f"{function_name(func)}()"
        if _is_managing() and f"{block}#{self._counts[block]}" not in self._known:
            again = self.phase == "backward"
            self.marks.append(_Mark("recompute" if again else "encode", function_name(func), *begun))
            self.mark(*(("backward", self._current) if again else ("", "")))
        else:
            self._call(block, begun, result)
        return result

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._paths[module])

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._stack.pop()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._inside += 1
        if self._inside == 1:
            self._begun = self._now(), self._held()

    def _end(self, module: nn.Module, args: Any, result: Any) -> None:
        self._inside -= 1
        if not self._inside:
            self._call(self._paths[module], self._begun, result)

    def _call(self, block: str, begun: tuple[Any, int], result: Any) -> None:
        if self.phase == "backward":
            self.marks.append(_Mark("recompute", f"{block}#0", *begun))
            self.mark("backward", self._current)
            return
        name = f"{block}#{self._counts[block]}"
        self._counts[block] += 1
        self.marks.append(_Mark("forward", name, *begun))
        self.mark("")
        node = next((t.grad_fn for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn), None)
        if node is not None and node not in self._seen:
            self._seen.add(node)  # which also keeps it, so that another does not get its identity
            node.register_prehook(self._backward_of(name))

    def _backward_of(self, name: str) -> Callable[[Any], None]:
        def hook(gradients: Any) -> None:
            self._current = name
            self.mark("backward", name)

        return hook


def _is_managing() -> bool:
    """Whether a function is called by what handles saved tensors, and not by the network."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_ON):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(_MEMORY)


def measured_step(job: Job, size: int | None, plan: Plan | None, device: torch.device) -> dict[str, Any]:
    """A step of a job on this machine, as a timeline for the page, with what a step takes that is left alone."""
    torch.manual_seed(0)
    model = job.build().train().to(device)
    args, kwargs, target = substitute(job.example(size), torch.Tensor, lambda t: t.to(device))
    if plan is not None and plan.policy:
        within(model, args, kwargs, memory=None, plan=plan, optimizer=job.update, quiet=True)
    optimizer = job.update([p for p in model.parameters() if p.requires_grad])

    def step(watcher: StepWatcher | None = None) -> None:
        optimizer.zero_grad(set_to_none=True)
        with watcher.watching() if watcher else contextlib.nullcontext():
            output = model(*args, **kwargs)
            loss = job.loss(output, target) if job.loss is not None else _total(output)
            if watcher:
                watcher.phase = "backward"
                watcher.mark("backward", "loss")
            torch.autograd.backward(loss)
        if watcher:
            watcher.phase = "step"
            watcher.mark("step", "optimizer")
        del output, loss
        optimizer.step()
        if watcher:
            watcher.mark("end")

    alone = _timed(step, device)
    known = frozenset(capture_training(job, size).calls) if plan is not None else frozenset()
    found = record_step(model, step, device, _state(model, optimizer, (args, kwargs, target)), known)
    return timeline_json(found) | {
        "alone_s": alone,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine's CPU",
        "planned": plan is not None and bool(plan.policy),
    }


def record_step(
    model: nn.Module,
    step: Callable[[StepWatcher], None],
    device: torch.device,
    state: Iterable[torch.Tensor],
    known: frozenset[str] = frozenset(),
) -> Timeline:
    """One step, watched; and a second one, in which memory is counted, since asking for it takes time."""
    now, seconds = _clock(device)
    watcher = StepWatcher(model, now, lambda: 0, known)
    watcher.mark("")
    step(watcher)
    times = seconds([mark.at for mark in watcher.marks])
    counting, most = _counter(device, list(state))
    again = StepWatcher(model, lambda: 0.0, most, known)
    with counting:
        again.mark("")
        step(again)
    same = [(m.kind, m.name) for m in again.marks] == [(m.kind, m.name) for m in watcher.marks]
    held_then = [m.bytes for m in again.marks] if same else []
    sizes = [*held_then[1:], *held_then[-1:]]  # what was held at most until a mark was held since the mark before it
    events = []
    for i, mark in enumerate(watcher.marks[:-1]):
        if mark.kind and times[i + 1] > times[i]:
            name = f"{mark.kind} {mark.name}"
            events.append(Event(0, "compute", mark.kind, name, times[i], times[i + 1], 0, 0))
    highest = times[max(range(len(sizes)), key=sizes.__getitem__)] if sizes else 0.0
    memory = RankMemory(tuple(times[: len(sizes)]), tuple(sizes), max(sizes, default=0), highest, (0,) * len(PARTS))
    return Timeline("measured", tuple(events), (memory,))


def _timed(step: Callable[[], None], device: torch.device) -> float:
    """The median time of a step, after one to warm up."""
    times = []
    for i in range(_TIMED + 1):
        taken = wall_s(step, device)
        times += [taken] if i or taken > _LONG_S else []
        if taken > _LONG_S:
            break
    return statistics.median(times)


def _clock(device: torch.device) -> tuple[Callable[[], Any], Callable[[list[Any]], list[float]]]:
    """What notes a moment, and what makes seconds of moments."""
    if device.type != "cuda":
        return time.perf_counter, lambda moments: [t - moments[0] for t in moments]

    def now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(moments: list[Any]) -> list[float]:
        torch.cuda.synchronize(device)
        return [1e-3 * moments[0].elapsed_time(t) for t in moments]

    return now, seconds


def _counter(
    device: torch.device, state: list[torch.Tensor]
) -> tuple[contextlib.AbstractContextManager[Any], Callable[[], int]]:
    """A context in which memory is counted, and what says the most that was held since it was asked before."""
    if device.type == "cuda":

        def highest() -> int:
            found = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            return int(found)

        return contextlib.nullcontext(), highest
    fixed = sum({t.data_ptr(): t.numel() * t.element_size() for t in state}.values())
    counted = LiveBytes(state)

    def most() -> int:
        found = counted.peak
        counted.restart()
        return fixed + found

    return counted, most


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> list[torch.Tensor]:
    """Tensors that are there before a step."""
    kept = [t for s in optimizer.state.values() for t in tree_leaves(s) if isinstance(t, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *kept, *(t for _, t in leaves(batch, torch.Tensor))]


def _total(output: Any) -> torch.Tensor:
    """A loss for a job that has none."""
    if not differentiable(output):
        raise OutcoreError("nothing that the model returns has a gradient, so no step can be run; give the job a loss")
    return square_loss(output)


def check_room(needed_bytes: int, device: torch.device) -> None:
    """Refuse a step that is larger than what is free here.

    Raises:
        OutcoreError: it is.
    """
    free = free_bytes(device)
    if needed_bytes > 0.9 * free:
        where = "this GPU" if device.type == "cuda" else "this machine"
        raise OutcoreError(
            f"a step of this size holds {format_bytes(needed_bytes)} and {where} has {format_bytes(free)} free; "
            "choose a smaller batch or image, or a plan"
        )


def _run(given: Mapping[str, Any]) -> dict[str, Any]:
    lists = {name: tuple(given["settings"].get(name, ())) for name in ("inputs", "arguments")}
    settings = ExploreSettings(**(given["settings"] | lists))
    device = choose_device(None)
    plan = Plan.from_json(given["plan"]) if given.get("plan") else None
    check_room(int(given.get("needed_bytes") or 0), device)
    return measured_step(settings.load(), settings.batch, plan, device)


def main() -> None:
    """Read what to run, write its timeline or what went wrong; what the job prints goes to standard error."""
    leave_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        found = _run(json.load(sys.stdin))
    except BaseException as error:  # a job may raise anything, also SystemExit
        found = {"error": trouble_of(error)["message"]}
    answers.write(json.dumps(found))
    answers.flush()
    os._exit(0)  # threads of the job must not keep it alive


if __name__ == "__main__":
    main()
