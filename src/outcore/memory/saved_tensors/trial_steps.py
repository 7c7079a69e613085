"""Steps before the first: what a plan really reserves is seen before the user's training begins.

A budget bounds what a card of that size would have to have: reserved memory, with the holes that the allocator leaves
between tensors and what libraries take for themselves. Neither follows from the plan alone, and the first step counts.
So when a model comes under its plan, a few steps are taken with the user's own batch, and the model is put back as it
was: weights, statistics, attributes, gradients and random state. If the allocator had to reserve more than the budget,
had to look twice for room or refused a library's workspace, the plan is made again with more left free, until it fits
with as little as can be (`least_overhead`); if no plan fits, that is said. What was found is remembered
(`outcore.memory.saved_tensors.plan_cache`), and the next start takes no such steps.

An allocator that was never asked for more than the budget behaves the same whether more is there or not. So steps are
tried without a limit (one that the process has set itself is lifted meanwhile), and what they take tells how much less
to plan for. With a limit, a library whose workspace was refused once would go on with another algorithm, in the user's
training too. Where the device itself has hardly more than the budget, the first try is a careful one for that reason.

A loss of the user's is taken if there is one; else the sum of the outputs. Backward runs outside of autocast, as in
loops: inside, its own operations would be cast too, and weights kept in another type. The optimizer does not step:
memory of the size of its state is taken where it would take it. What is reserved still grows in the second and third
step, because what stays from the first lies in between. A few requests more or less put later blocks elsewhere: in the
very first step, casts are compared with what they were made from; loops differ in when they let go of the output and
the loss; memory that was given back in between (for an evaluation, or to record CUDA graphs) is taken anew. So steps of
all these kinds are taken.

Where the process has a limit of its own, that has to be a little larger than what is reserved
(`outcore.allocator.process_limit`), and the plan is made for that.

How much of a budget to leave to the allocator is found by trying. A plan counts the bytes of tensors. What is reserved
for them is more, by the holes between them and by what libraries take, and by how much more differs from plan to plan.
So the least to leave free is bracketed: what was too little, what was enough, what left no plan at all. From too little
it goes up by what was missed; once something holds that costs time over what did not, it goes back by halves.

    too little ───────▶ │ tried │ ◀─────── enough, or no plan
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from outcore.allocator.process_limit import LimitTrace, limit_bytes
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.structure import leaves
from outcore.machine.units import format_bytes
from outcore.memory.cuda_graphs.pool import give_back, without_limit
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.plan_cache import known_overhead, remember_overhead
from outcore.memory.saved_tensors.replan import replanned
from outcore.memory.saved_tensors.settings import PlannedCall, Settings

_STEP = 0.05
"""Share of the budget that is missing at least where the device had no room for a step, or only after a search."""
_SPARE, _CAREFUL = 1.3, 0.04
"""Below so many times the budget a device has hardly more, and then this share of it is left free from the first."""
_STEPS = ("start", "let go", "start", "let go", "hold", "give back", "hold")
"""Output and loss are let go of at the end of a step, or held until the next ones are there. All unused memory is given
back before a "give back"; before a "start", the optimizer's state too."""
_GRANULE = 20 * 2**20
"""Segments grow by this: what is left free beside, at most a hundredth of the budget, for steps that were not tried."""
_MOVING = 0.15
"""Share of the budget that is left free where no steps can be tried; with half of it, VGG-16 had to look for room."""
_SECONDS = 8.0
"""After so long nothing more is tried."""


def run_trial_steps(
    managed_forward: ManagedForward,
    key: Hashable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    graph: Graph,
) -> None:
    """Take steps on the device until what they reserve is within the budget.

    Args:
        managed forward: of the model, with its first plan.
        key: of the call that is tried.
        args: of the call.
        kwargs: of the call.
        loss: of the output; without it the sum of all outputs.
        graph: what was recorded of the call.

    Raises:
        PlanError: the process has a limit in which no step that was found has room.
    """
    entry, asked = managed_forward.admitted.get(key), managed_forward.settings
    if entry is not None and not entry.plan.state.idle and _counts(managed_forward):
        _leave_some(managed_forward, key, args, kwargs, graph)
        return
    if entry is None or not _can(managed_forward, entry, args, kwargs):
        return
    budget, costs = asked.budget_bytes, entry.plan.keeping.costs
    assert budget is not None
    trial = _Trial(managed_forward, key, args, kwargs, loss, graph)
    known = known_overhead(costs, asked)
    if known is not None and (known == 0 or trial.plan(known)):
        return
    limit = limit_bytes(managed_forward.device)
    trial.limited = limit is not None
    with without_limit(managed_forward.device):
        total = torch.cuda.get_device_properties(managed_forward.device).total_memory
        careful = torch.cuda.memory_reserved(managed_forward.device) + _SPARE * budget > total
        best = least_overhead(
            trial, budget, int(_CAREFUL * budget) if careful and trial.plan(int(_CAREFUL * budget)) else 0
        )
    trial.choose(best.free_bytes)
    if best.taken_bytes <= budget:
        remember_overhead(costs, asked, best.free_bytes)
        if best.free_bytes and not asked.quiet:
            print(
                f"outcore: {format_bytes(best.free_bytes)} of the budget are left to the allocator, with which a step "
                f"reserves {format_bytes(best.taken_bytes)}",
                file=sys.stderr,
            )
        return
    if limit is not None and best.taken_bytes > limit:
        raise _no_room(budget, best.taken_bytes)
    warnings.warn(
        f"outcore: a step reserves {format_bytes(best.taken_bytes)}, more than {format_bytes(budget)}, with what the "
        f'allocator leaves unused between tensors; memory="{-(-best.taken_bytes // 2**20)}MiB" would hold',
        stacklevel=3,
    )


def _no_room(budget: int, least: int) -> PlanError:
    """That a step would end out of memory, because the process has a limit: said before training begins."""
    refused = PlanError(
        f"a training step cannot be done within {format_bytes(budget)} as a limit of this process: with what the "
        f"allocator leaves unused between tensors, the smallest step that was found reserves {format_bytes(least)}; "
        f'give memory="{-(-least // 2**20)}MiB" or more and such a limit, or a smaller batch'
    )
    refused.least_bytes = least
    return refused


def _counts(managed_forward: ManagedForward) -> bool:
    """Whether there is a budget of what is reserved, and a plan that may be made again."""
    settings = managed_forward.settings
    return settings.budget_bytes is not None and settings.policy is None and managed_forward.device.type == "cuda"


def _leave_some(managed_forward: ManagedForward, key: Hashable, args: Any, kwargs: Any, graph: Graph) -> None:
    """Where state moves in a step, steps cannot be tried and put back: leave a share of the budget to the allocator.

    Raises:
        PlanError: there is no plan that leaves it, and the process has a limit that does not have it either.
    """
    asked, budget = managed_forward.settings, managed_forward.settings.budget_bytes or 0
    more = replace(asked, reserved_bytes=asked.reserved_bytes + int(_MOVING * budget))
    refused = replanned(managed_forward, key, more, args, kwargs, graph)
    if refused is None:
        return
    least = refused.least_bytes or int((1 + _MOVING) * budget)
    limit = limit_bytes(managed_forward.device)
    if limit is not None and limit < least:
        raise _no_room(budget, least)
    warnings.warn(
        f"outcore: tensors alone fill {format_bytes(budget)}, and what the allocator leaves unused between them comes "
        f'on top; memory="{-(-least // 2**20)}MiB" would leave room for it',
        stacklevel=4,
    )


def _can(managed_forward: ManagedForward, entry: PlannedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether steps may be taken: on a device that counts, with real numbers, and nothing that they would change."""
    tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
    if not _counts(managed_forward):
        return False
    if entry.graphed is not None or not entry.plan.state.idle:
        return False
    if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        return False
    hooked = ("_backward_hooks", "_post_accumulate_grad_hooks")  # an optimizer could be in them
    return not any(getattr(p, name, None) for p in managed_forward.model.parameters() for name in hooked)


class _Trial:
    """Plans and takes steps that leave more or less of the budget free."""

    def __init__(
        self,
        managed_forward: ManagedForward,
        key: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], torch.Tensor] | None,
        graph: Graph,
    ) -> None:
        self.managed_forward, self.key, self.args, self.kwargs, self.loss, self.graph = (
            managed_forward,
            key,
            args,
            kwargs,
            loss,
            graph,
        )
        self.asked = managed_forward.settings
        entry = managed_forward.admitted[key]
        assert entry is not None
        self.made: dict[int, tuple[PlannedCall, Settings]] = {0: (entry, self.asked)}
        """By what they leave free in addition."""
        self.end = time.monotonic() + _SECONDS
        self.limited = False
        """Whether the process has a limit of its own."""

    def __call__(self, free_bytes: int) -> TriedOverhead | None:
        """A step that leaves so many bytes free."""
        if time.monotonic() > self.end or not self.plan(free_bytes):
            return None
        entry = self.made[free_bytes][0]
        taken = _reserved(self.managed_forward, entry, self.args, self.kwargs, self.loss, limited=self.limited)
        return TriedOverhead(free_bytes, taken, entry.plan.outcome.time_s)

    def plan(self, free_bytes: int) -> bool:
        """Put such a plan in force; whether there is one."""
        if free_bytes not in self.made:
            self.choose(max(size for size in self.made if size < free_bytes))  # to start from
            reserved = self.asked.reserved_bytes + free_bytes
            settings = replace(self.asked, reserved_bytes=reserved, states=self.asked.states[:1])
            if replanned(self.managed_forward, self.key, settings, self.args, self.kwargs, self.graph) is not None:
                return False
            entry = self.managed_forward.admitted[self.key]
            if entry is None or not entry.plan.state.idle:
                return False
            self.made[free_bytes] = entry, settings
        self.choose(free_bytes)
        return True

    def choose(self, free_bytes: int) -> None:
        """Put a plan that was made in force."""
        entry, settings = self.made[free_bytes]
        self.managed_forward.admitted[self.key] = entry
        self.managed_forward.settings = replace(settings, states=self.asked.states)


def _reserved(
    managed_forward: ManagedForward,
    entry: PlannedCall,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    *,
    limited: bool = False,
) -> int:
    """Bytes that the allocator reserves for a step, with the optimizer's state, without what others hold.

    With `limited`, what a limit of the process would have to be.
    """
    model, device = managed_forward.model, managed_forward.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [(p, p.grad) for p in parameters]
    for p in parameters:
        p.grad = None
    before = ModelState(model, state_tensors(model))
    watching, entry.observer = entry.observer, None
    torch.cuda.synchronize(device)
    torch.clear_autocast_cache()  # a loop leaves autocast after every forward
    give_back()
    own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    own += sum(t.nbytes for _, t in leaves((args, kwargs), torch.Tensor) if t.device.type == "cuda")
    others = max(0, torch.cuda.memory_allocated(device) - own)
    budget = managed_forward.settings.budget_bytes or 0
    torch.cuda.reset_peak_memory_stats(device)
    trouble, trace = trouble_of(device), LimitTrace(device)
    try:
        with trace.recorded() if limited else contextlib.nullcontext():
            take_steps(managed_forward, args, kwargs, loss, parameters, managed_forward.settings.optimizer, device)
        torch.cuda.synchronize(device)
        taken: int = max(torch.cuda.max_memory_reserved(device), trace.bytes) - others
        taken += min(_GRANULE, int(_STEP * budget) // 5)
        return taken if trouble_of(device) == trouble else max(taken, int((1 + _STEP) * budget))
    except torch.OutOfMemoryError:
        return int((1 + _STEP) * budget)
    finally:
        before.restore()
        for p, gradient in gradients:
            p.grad = gradient
        entry.observer = watching
        give_back()


def take_steps(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    parameters: Sequence[torch.Tensor],
    optimizer: OptimizerCost,
    device: torch.device,
) -> None:
    """Steps of all kinds of a model's forward, with memory where an optimizer takes it."""
    state: list[torch.Tensor] = []
    output = value = None
    for kind in _STEPS:
        if kind in ("start", "give back"):
            output = value = None
            if kind == "start":
                state.clear()
            give_back(collect=False)
        output = run(*args, **kwargs)
        torch.clear_autocast_cache()
        value = loss(output) if loss is not None else _total(output)
        with torch.autocast(device.type, enabled=False):
            value.backward()
        copies = 0 if state else round(optimizer.state_per_parameter)
        state += [torch.empty_like(p) for p in parameters for _ in range(copies)]
        moment = [torch.empty_like(p) for p in parameters for _ in range(round(optimizer.workspace_per_parameter))]
        del moment
        for p in parameters:
            p.grad = None
        if kind in ("start", "let go"):
            output = value = None


def trouble_of(device: torch.device) -> int:
    """How often the allocator had to look again for room, or found none."""
    counted = torch.cuda.memory_stats(device)
    return int(counted.get("num_alloc_retries", 0)) + int(counted.get("num_ooms", 0))


def _total(output: Any) -> torch.Tensor:
    """The sum of all outputs that lead back to parameters."""
    found = [t for _, t in leaves(output, torch.Tensor) if t.requires_grad and t.is_floating_point()]
    return torch.stack([t.float().sum() for t in found]).sum()


_TRIES = 6
_FINE = 0.015
"""Share of the budget below which differences are not worth another try."""
_MORE = 1.2
"""Of what was missed, how much more to leave: holes do not shrink with the plan."""
_SLOWER = 1.02
"""What holds and is predicted to take more than this over what did not is worth another try."""


@dataclass(frozen=True, slots=True)
class TriedOverhead:
    """A step under a plan that leaves so many bytes free."""

    free_bytes: int
    taken_bytes: int
    """What was reserved for it."""
    time_s: float
    """Predicted by its plan."""


def least_overhead(
    attempt: Callable[[int], TriedOverhead | None], budget_bytes: int, begin_bytes: int = 0, tries: int = _TRIES
) -> TriedOverhead:
    """The fastest step that was seen to stay within a budget; if none did, the one that took least.

    Args:
        attempt: plans a step that leaves so many bytes free, and takes it; none if there is no such plan. The first
            has one.
        budget_bytes: the most that may be reserved.
        begin_bytes: to leave free at first.
        tries: at most so many.
    """
    fine = int(_FINE * budget_bytes)
    first = attempt(begin_bytes)
    assert first is not None
    seen, none, free = [first], None, begin_bytes
    for _ in range(tries - 1):
        over = [t for t in seen if t.taken_bytes > budget_bytes]
        held = [t for t in seen if t.taken_bytes <= budget_bytes]
        if not over:
            break
        low = max(over, key=lambda t: t.free_bytes)
        if held:
            best = min(held, key=lambda t: t.free_bytes)
            if best.time_s <= _SLOWER * low.time_s or best.free_bytes - low.free_bytes <= fine:
                break
            free = (low.free_bytes + best.free_bytes) // 2
        else:
            free = low.free_bytes + max(int(_MORE * (low.taken_bytes - budget_bytes)), fine // 2)
            if none is not None and free >= none:
                free = (low.free_bytes + none) // 2
                if none - low.free_bytes <= fine // 2:
                    break
        if (found := attempt(free)) is not None:
            seen.append(found)
        else:
            none = free
    held = [t for t in seen if t.taken_bytes <= budget_bytes]
    return min(held, key=lambda t: t.time_s) if held else min(seen, key=lambda t: t.taken_bytes)
