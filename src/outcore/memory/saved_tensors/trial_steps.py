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

Where state lives below the device, a trial has an offloader of its own, which is closed afterwards, and memory is taken
in the optimizer's place (`outcore.memory.param_offload.trial_optimizer`). If no plan of one rung for state holds, the
next one is tried, which keeps less on the device.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from outcore.allocator.process_limit import LimitTrace, limit_bytes
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.structure import leaves, sum_loss
from outcore.machine.units import format_bytes, rounded_up
from outcore.memory.cuda_graphs.pool import give_back, without_limit
from outcore.memory.param_offload.buckets import calls_of, uses_of
from outcore.memory.param_offload.offloader import StateOffloader
from outcore.memory.param_offload.trial_optimizer import TrialOptimizer, like, take_workspace
from outcore.memory.saved_tensors.least_overhead import TriedOverhead, least_overhead
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.plan_cache import known_overhead, remember_overhead
from outcore.memory.saved_tensors.replan import replanned
from outcore.memory.saved_tensors.settings import PlannedCall, Settings
from outcore.planner.memory.state_policy import StatePolicy

_STEP = 0.05
"""Share of the budget that is missing at least where the device had no room for a step, or only after a search."""
_SPARE, _CAREFUL = 1.3, 0.04
"""Below so many times the budget a device has hardly more, and then this share of it is left free from the first."""
_STEPS = ("start", "let go", "start", "let go", "hold", "give back", "hold")
"""Output and loss are let go of at the end of a step, or held until the next ones are there. All unused memory is given
back before a "give back"; before a "start", the optimizer's state too."""
_GRANULE = 20 * 2**20
"""Segments grow by this: what is left free beside for steps that were not tried, at most a hundredth of the budget; all
of it where the process has a limit and state moves, which copies of other lengths put elsewhere."""
_MOVING = 0.15
"""Share of the budget that is left free where no steps can be tried; with half of it, VGG-16 had to look for room."""
_SECONDS = 8.0
"""After so long a plan that holds is not made faster."""


def run_trial_steps(
    managed_forward: ManagedForward,
    key: Hashable,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    graph: Graph,
    optimizer: Any = None,
) -> None:
    """Take steps on the device until what they reserve is within the budget.

    Args:
        managed forward: of the model, with its first plan.
        key: of the call that is tried.
        args: of the call.
        kwargs: of the call.
        loss: of the output; without it the sum of all outputs.
        graph: what was recorded of the call.
        optimizer: that updates the parameters, where there is one already.

    Raises:
        PlanError: the process has a limit in which no step that was found has room.
    """
    entry, asked, device = managed_forward.admitted.get(key), managed_forward.settings, managed_forward.device
    if entry is None or not _counts(managed_forward):
        return
    if not _can(managed_forward, entry, args, kwargs):
        if not entry.plan.state.idle:
            _leave_some(managed_forward, key, args, kwargs, graph)
        return
    budget, costs = asked.budget_bytes, entry.plan.keeping.costs
    assert budget is not None
    trial = _Trial(managed_forward, key, args, kwargs, loss, graph, optimizer)
    limit = limit_bytes(device)
    trial.limited = limit is not None
    others = trial.others() if limit is not None else 0
    room = budget if limit is None else min(budget, limit - others)
    first = trial.rung
    known = known_overhead(costs, asked, limited=trial.limited) if room == budget else None
    if known is not None and trial.take_rung(known[1]) and trial.plan(known[0]):
        return
    found = dict[int, TriedOverhead]()
    with without_limit(device):
        for rung in range(first, len(asked.states)):
            if trial.take_rung(rung):
                found[rung] = trial.best(room)
                if found[rung].taken_bytes <= room:
                    break
    rung, best = min(found.items(), key=lambda item: item[1].taken_bytes)
    trial.rung = rung if best.taken_bytes <= room else first
    trial.choose(found[trial.rung].free_bytes)
    if best.taken_bytes <= room:
        if room == budget:
            remember_overhead(costs, asked, best.free_bytes, rung, limited=trial.limited)
        if best.free_bytes and not asked.quiet:
            print(
                f"outcore: {format_bytes(best.free_bytes)} of the budget are left to the allocator, with which a step "
                f"reserves {format_bytes(best.taken_bytes)}",
                file=sys.stderr,
            )
        return
    if limit is not None and best.taken_bytes + others > limit:
        raise _no_room(budget, best.taken_bytes, others)
    taken = found[first].taken_bytes
    warnings.warn(
        f"outcore: a step reserves {format_bytes(taken)}, more than {format_bytes(budget)}, with what the "
        f'allocator leaves unused between tensors; memory="{rounded_up(taken)}" would hold',
        stacklevel=3,
    )


def _no_room(budget: int, least: int, others: int = 0) -> PlanError:
    """The error that a step would run out of memory under the limit of the process, raised before training begins."""
    beside = f", beside {format_bytes(others)} that this process holds for other things" if others > 2**20 else ""
    refused = PlanError(
        f"a training step cannot be done within {format_bytes(budget)} as a limit of this process: with what the "
        f"allocator leaves unused between tensors, the smallest step that was found reserves {format_bytes(least)}"
        f'{beside}; give memory="{rounded_up(least + others)}" or more and such a limit, or a smaller batch'
    )
    refused.least_bytes = -(-(least + others) // 2**20) * 2**20
    return refused


def _counts(managed_forward: ManagedForward) -> bool:
    """Whether there is a budget of what is reserved, and a plan that may be made again."""
    settings = managed_forward.settings
    return settings.budget_bytes is not None and settings.policy is None and managed_forward.device.type == "cuda"


def _leave_some(managed_forward: ManagedForward, key: Hashable, args: Any, kwargs: Any, graph: Graph) -> None:
    """Where state moves in a step and none can be tried: leave a share of the budget to the allocator.

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
        f'on top; memory="{rounded_up(least)}" would leave room for it',
        stacklevel=4,
    )


def _can(managed_forward: ManagedForward, entry: PlannedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether steps may be taken: on a device that counts, with real numbers, and nothing that they would change."""
    tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
    if not _counts(managed_forward):
        return False
    if entry.graphed is not None:
        return False
    if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        return False
    hooked = ("_backward_hooks", "_post_accumulate_grad_hooks")  # an optimizer could be in them
    return not any(getattr(p, name, None) for p in managed_forward.model.parameters() for name in hooked)


class _Trial:
    """Plans and takes steps that leave more or less of the budget free, on one rung for state after the other."""

    def __init__(
        self,
        managed_forward: ManagedForward,
        key: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], torch.Tensor] | None,
        graph: Graph,
        optimizer: Any,
    ) -> None:
        self.managed_forward, self.key, self.loss, self.graph = managed_forward, key, loss, graph
        self.args, self.kwargs, self.optimizer = args, kwargs, optimizer
        self.asked = managed_forward.settings
        entry = managed_forward.admitted[key]
        assert entry is not None
        self.rung = self.asked.states.index(entry.plan.state) if entry.plan.state in self.asked.states else 0
        """Where state lives, by its place among what was asked for."""
        self.made: dict[tuple[int, int], tuple[PlannedCall, Settings]] = {(self.rung, 0): (entry, self.asked)}
        """By rung, and by what they leave free in addition."""
        self.limited = False
        """Whether the process has a limit of its own."""

    def take_rung(self, rung: int) -> bool:
        """Go on with another rung; whether there is a plan for it."""
        before, self.rung = self.rung, min(rung, len(self.asked.states) - 1)
        if not self.plan(0):
            self.rung = before
            return False
        return True

    def best(self, room: int) -> TriedOverhead:
        """The fastest step of this rung that was seen to stay within so many bytes, or the smallest."""
        device = self.managed_forward.device
        total = torch.cuda.get_device_properties(device).total_memory
        careful = torch.cuda.memory_reserved(device) + _SPARE * room > total
        share = _STEP if not self.asked.states[self.rung].idle else _CAREFUL if careful else 0.0
        free = int(share * room)
        begin = free if free and self.plan(free) else 0
        end = time.monotonic() + _SECONDS
        return least_overhead(self, room, begin, late=lambda: time.monotonic() > end)

    def __call__(self, free_bytes: int) -> TriedOverhead | None:
        """A step that leaves so many bytes free."""
        if not self.plan(free_bytes):
            return None
        entry = self.made[self.rung, free_bytes][0]
        return TriedOverhead(free_bytes, self.reserved(entry), entry.plan.outcome.time_s)

    def plan(self, free_bytes: int) -> bool:
        """Put such a plan in force; whether there is one."""
        if (self.rung, free_bytes) not in self.made:
            here = [made for made in self.made if made[0] == self.rung and made[1] < free_bytes]
            self._put(max(here or self.made))  # to start from
            reserved = self.asked.reserved_bytes + free_bytes
            settings = replace(self.asked, reserved_bytes=reserved, states=(self.asked.states[self.rung],))
            if replanned(self.managed_forward, self.key, settings, self.args, self.kwargs, self.graph) is not None:
                return False
            entry = self.managed_forward.admitted[self.key]
            if entry is None:
                return False
            self.made[self.rung, free_bytes] = entry, settings
        self.choose(free_bytes)
        return True

    def choose(self, free_bytes: int) -> None:
        """Put a plan that was made in force."""
        self._put((self.rung, free_bytes))

    def _put(self, made: tuple[int, int]) -> None:
        entry, settings = self.made[made]
        self.managed_forward.admitted[self.key] = entry
        self.managed_forward.settings = replace(settings, states=self.asked.states)

    def others(self) -> int:
        """Bytes on the device that are neither the model's, its arguments' nor its optimizer's."""
        model, device = self.managed_forward.model, self.managed_forward.device
        torch.cuda.synchronize(device)
        torch.clear_autocast_cache()  # a loop leaves autocast after every forward
        give_back()
        own = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        own += [t for _, t in leaves((self.args, self.kwargs), torch.Tensor)]
        if isinstance(self.optimizer, torch.optim.Optimizer):
            own += [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        here = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own if t.device.type == "cuda"}
        return max(0, torch.cuda.memory_allocated(device) - sum(here.values()))

    def reserved(self, entry: PlannedCall) -> int:
        """Bytes that the allocator reserves for a step, with the optimizer's state, without what others hold; where
        the process has a limit, what that would have to be."""
        managed_forward, budget = self.managed_forward, self.asked.budget_bytes or 0
        model, device = managed_forward.model, managed_forward.device
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = [(p, p.grad) for p in parameters]
        for p in parameters:
            p.grad = None
        before = ModelState(model, state_tensors(model))
        watching, entry.observer = entry.observer, None
        others = self.others()
        trouble, trace = trouble_of(device), LimitTrace(device)
        try:
            with self._state_below(entry.plan.state, parameters) as keeper:
                give_back()
                torch.cuda.reset_peak_memory_stats(device)
                call = self.args, self.kwargs, self.loss, parameters, self.asked.optimizer, device
                with trace.recorded() if self.limited else contextlib.nullcontext():
                    take_steps(managed_forward, *call, update=None if keeper is None else keeper.step)
                torch.cuda.synchronize(device)
                taken: int = max(torch.cuda.max_memory_reserved(device), trace.bytes) - others
            taken += _GRANULE if self.limited and keeper is not None else min(_GRANULE, int(_STEP * budget) // 5)
            return taken if trouble_of(device) == trouble else max(taken, int((1 + _STEP) * budget))
        except torch.OutOfMemoryError:
            return int((1 + _STEP) * budget)
        finally:
            before.restore()
            for p, gradient in gradients:
                p.grad = gradient
            entry.observer = watching
            give_back()

    @contextlib.contextmanager
    def _state_below(self, where: StatePolicy, parameters: Sequence[torch.Tensor]) -> Iterator[StateOffloader | None]:
        """State where a plan says, with memory in the place of the optimizer's work; afterwards where it was."""
        managed_forward = self.managed_forward
        if where.idle:
            yield None
            return
        uses = uses_of(managed_forward.model, calls_of(self.graph))
        partial = functools.partial(TrialOptimizer, cost=self.asked.optimizer)
        keeper = StateOffloader(self.optimizer, uses, where, managed_forward.device, partial=partial)
        managed_forward.keeper = keeper
        try:
            yield keeper
        finally:
            for p in parameters:
                p.grad = None
            managed_forward.keeper = None
            keeper.close()


def take_steps(
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    parameters: Sequence[torch.Tensor],
    optimizer: OptimizerCost,
    device: torch.device,
    *,
    update: Callable[[], None] | None = None,
) -> None:
    """Steps of all kinds of a model's forward, with memory where an optimizer takes it; `update` takes it by itself."""
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
        value = loss(output) if loss is not None else sum_loss(output)
        with torch.autocast(device.type, enabled=False):
            value.backward()
        if update is not None:
            update()
        else:
            state = state or [t for p in parameters for t in like(p, optimizer.state_per_parameter)]
            take_workspace(parameters, optimizer)
        for p in parameters:
            p.grad = None
        if kind in ("start", "let go"):
            output = value = None


def trouble_of(device: torch.device) -> int:
    """How often the allocator had to look again for room, or found none."""
    counted = torch.cuda.memory_stats(device)
    return int(counted.get("num_alloc_retries", 0)) + int(counted.get("num_ooms", 0))
