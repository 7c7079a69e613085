"""One row of the frontier: a way of training a case, in a process of its own.

The process builds, plans and compiles beside others, and has the machine for itself (`turns`) from the first step on:
cuDNN's search and Triton's choice of variants measure, and so do our own planner's costs. While only the processor is
busy, in the search for a plan and in the compiler, others have the machine.

Ours is the public call with its defaults, `outcore.within(model, args, kwargs, memory=budget, loss=...,
optimizer=...)`, under a hard limit of the allocator at the budget. Gradients are compared with those of plain training
in the same process, after all else was measured, so that nothing of plain training is in the peaks of a row.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import os
import re
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.frontier import peers
from benchmarks.frontier.networks import draws, loss_of
from benchmarks.frontier.training import Case, Training, alike, peaks, reset_peaks
from benchmarks.frontier.turns import Turn

__all__ = ["Settings", "measure", "measured_in_a_process"]

_STEADY = 16
"""Steps of ours before the timed ones: in these, live steps and CUDA graphs are compared."""
_WARM = 3


@dataclass(frozen=True)
class Settings:
    """How rows are measured."""

    device: str
    steps: int = 10
    seconds: float = 12.0
    """Slow steps are timed for so long, three at least."""
    folder: Path = Path()
    """Plans and costs are written here."""
    compare: bool = True


def measured_in_a_process(
    case: Case, way: str, channels_last: bool, budget: int | None, settings: Settings, pipe: Any
) -> None:
    """What a process does; it asks for the device and gets it by this pipe."""

    _prepare(settings.device)
    pipe.send(measure(case, way, channels_last, budget, settings, Turn.by(pipe, _settle)))


def measure(case: Case, way: str, channels_last: bool, budget: int | None, settings: Settings, turn: Turn) -> Any:
    """A row; what goes wrong is in it."""
    row: dict[str, Any] = {}
    begin = time.perf_counter()
    try:
        _measure(row, case, way, channels_last, budget, settings, turn)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:500]}"
        row["least"] = getattr(error, "least_bytes", None)
        frames = traceback.extract_tb(error.__traceback__)
        row["where"] = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames][-6:]
    row["all_s"] = round(time.perf_counter() - begin, 1)
    turn.give()
    row |= {"waited_s": round(turn.waited_s, 1), "alone_s": round(turn.held_s, 1)}
    return row


def _prepare(device: str) -> None:
    """What holds for the whole process."""
    torch.set_num_threads(1 if device == "cpu" else 4)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    warnings.simplefilter("ignore")
    if device == "cuda":
        import torch._functorch.config as functorch

        functorch.force_non_lazy_backward_lowering = True  # both directions are compiled before anything runs


def _measure(
    row: dict[str, Any],
    case: Case,
    way: str,
    channels_last: bool,
    budget: int | None,
    settings: Settings,
    turn: Turn,
) -> None:
    device, cuda = settings.device, settings.device == "cuda"
    training = case.fresh(device, channels_last)
    row["draws"] = draws(training.model)
    state = training.state()
    with _off_processor(turn, way):
        if way.startswith("ours"):
            _limit(budget)
            row |= _ours(training, way, budget, turn)
            steady = _STEADY if cuda else 2
        else:
            peers.apply(case, way, training)
            turn.take() if not way.startswith("compile") else None
            steady = _WARM if cuda else 1
        reset_peaks(device)
        before = _trouble()
        begin, waited = time.perf_counter(), turn.waited_s
        if not cuda and "compile" in way:
            training.step()  # the profiler would follow the compiler
        first = peaks(training, training.step)
        took = time.perf_counter() - begin - (turn.waited_s - waited)
        turn.take()
        row |= {f"first_{name}": value for name, value in first.items()} | {"first_step_s": round(took, 2)}
        if way.endswith(" graphs"):
            if not peers.can_be_graph(case, way, training.model):
                raise ValueError("a checkpoint that saves the random state cannot be recorded")
            if cuda:
                training.as_graph()
        with turn.quiet():
            row |= {f"warm_{n}": v for n, v in peaks(training, lambda: _steps(training, steady)).items()}
            reset_peaks(device)
            row |= peaks(training, training.step)
            times = training.timed(settings.steps, settings.seconds)
        row |= _times(times)
        if cuda:
            row |= peaks(training, training.step)
        retries, refused = (now - then for now, then in zip(_trouble(), before, strict=True))
        row |= {"retries": retries, "refused": refused}
        if way.startswith("ours"):
            row |= _after(training)
        if settings.compare:
            _limit(None)
            try:
                row |= _compared(case, training, state, channels_last, settings)
            except Exception as error:
                row["not_compared"] = f"{type(error).__name__}: {str(error)[:300]}"
    turn.give()
    if way.startswith("ours"):
        label = f"{case.label} {way} {budget}".replace(" ", "_").replace("/", "-")
        row["plan"] = _stored(training, settings.folder / "plans" / f"{label}.json.gz")


def _ours(training: Training, way: str, budget: int | None, turn: Turn) -> dict[str, Any]:
    """The public call."""
    import outcore
    from outcore.errors import PlanError

    os.environ["OUTCORE_CACHE"] = tempfile.mkdtemp()  # as in a first call on a machine
    begin, waited = time.perf_counter(), turn.waited_s

    def managed(memory: int | None) -> None:
        outcore.within(
            training.model,
            training.args,
            training.kwargs,
            memory=memory,
            loss=loss_of,
            optimizer=training.optimizer,
            quiet=True,
            **({"compile": True} if "compile" in way else {}),
        )

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            managed(budget)
        except PlanError as refused:  # it names the smallest budget that would do
            named = re.search(r'give memory="(\d+)MiB"', str(refused))
            if "least" not in way or named is None:
                raise
            budget = int(named[1]) * 2**20
            _limit(budget)
            managed(budget)
    planning_s = time.perf_counter() - begin - (turn.waited_s - waited)
    plan: Any = outcore.memory_plan(training.model)
    facts = {"budget": budget, "planning_s": round(planning_s, 1), "told": [str(w.message)[:200] for w in told][:4]}
    facts |= {"predicted_peak": getattr(plan, "peak_bytes", None), "predicted_x": getattr(plan, "slowdown", None)}
    facts |= {"predicted_s": getattr(plan, "seconds", None)}
    return facts | {"kind": type(plan).__name__, "exactness": str(getattr(plan, "exactness", ""))}


def _after(training: Training) -> dict[str, Any]:
    """What became of ours while it trained."""
    forward = training.model.__dict__.get("forward")
    choice = getattr(forward, "choice", None)
    entries = getattr(forward, "admitted", {}).values()
    graphed = bool(choice is not None and choice.taken) or any(getattr(e, "graphed", None) for e in entries)
    return {"as_graphs": graphed, "why_live": str(getattr(choice, "reason", ""))[:200]}


def _compared(case: Case, training: Training, state: Any, channels_last: bool, settings: Settings) -> dict[str, Any]:
    """Gradients at the first weights against those of plain training, which runs twice."""
    found = training.gradients(state)
    training.optimizer.zero_grad(set_to_none=True)
    training.optimizer.state.clear()
    gc.collect()
    plain = case.fresh(settings.device, channels_last)
    reset_peaks(settings.device)
    want = plain.gradients(state_in_order(plain, state))
    again = plain.gradients(state_in_order(plain, state))
    repeats = sum(torch.equal(a, b) for a, b in zip(want.values(), again.values(), strict=True))
    return alike(found, want) | {"plain_repeats": repeats}


def state_in_order(training: Training, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under the names of another arrangement of the same layers."""
    return dict(zip(training.model.state_dict(), state.values(), strict=True))


def _stored(training: Training, path: Path) -> str:
    """The plan, and the costs that it was made from, as a compressed file."""
    import outcore

    plan: Any = outcore.memory_plan(training.model)
    document: dict[str, Any] = {"explained": plan.explain() if hasattr(plan, "explain") else str(plan)}
    with contextlib.suppress(Exception):
        document["plan"] = plan.document().to_json()
    with contextlib.suppress(Exception):
        document["costs"] = plan.keeping.costs.to_json()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 6))
    return path.name


@contextlib.contextmanager
def _off_processor(turn: Turn, way: str) -> Iterator[None]:
    """While a plan is searched for or code is compiled, others have the device."""

    def after(run: Any) -> Any:
        """It measures on the device."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            turn.take()
            return run(*args, **kwargs)

        return measured

    def without(run: Any, *, always_after: bool) -> Any:
        """It needs the processor alone."""

        def beside(*args: Any, **kwargs: Any) -> Any:
            with turn.given():
                found = run(*args, **kwargs)
            if always_after:
                turn.take()  # compiled code runs, and chooses variants of its kernels by their times
            return found

        return beside

    with contextlib.ExitStack() as patches:
        if way.startswith("ours"):
            from outcore.cost import cost_cache
            from outcore.memory.saved_tensors import plan_call

            patches.enter_context(patch.object(cost_cache, "measure", after(cost_cache.measure)))
            search = without(plan_call.plan_memory, always_after=False)
            patches.enter_context(patch.object(plan_call, "plan_memory", search))
        if "compile" in way:
            from torch._inductor import compile_fx

            compiler = without(compile_fx.compile_fx, always_after=True)
            patches.enter_context(patch.object(compile_fx, "compile_fx", compiler))
        yield


def _limit(budget: int | None) -> None:
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if budget is None else min(1.0, budget / total))


def _trouble() -> tuple[int, int]:
    """How often the allocator looked again for room, and how often it found none."""
    if not torch.cuda.is_available():
        return 0, 0
    counted = torch.cuda.memory_stats()
    return counted["num_alloc_retries"], counted["num_ooms"]


def _times(times: list[float]) -> dict[str, Any]:
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    names = ("quarter_ms", "ms", "three_quarters_ms")
    return dict(zip(names, quartiles, strict=True)) | {"ms": statistics.median(times), "steps": len(times)}


def _steps(training: Training, count: int) -> None:
    for _ in range(count):
        training.step()


def _settle() -> None:
    """All work is done, and memory that is not used is given back."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
