"""Does a plan train a model as plain PyTorch would?

Both train the same weights on the same batch for a few steps, with the user's own loss and optimizer, and every
parameter, gradient, buffer and loss is compared (`outcore.verification.verdict`). Images that are too large for that
are cropped (`outcore.cost.cropped_job`); the plan is then made for the whole ones, and applied to the crop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from outcore.cost.cropped_job import crop_batch, fitting_side, longest_side
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.rough import by_bytes
from outcore.cost.predicted.step_memory import memory_curve
from outcore.cost.training_network import capture_training
from outcore.errors import PlanError, StreamError
from outcore.graph import Graph
from outcore.graph.record.capture import capture
from outcore.graph.structure import square_loss, substitute
from outcore.job import Job
from outcore.machine.units import counted, parse_budget
from outcore.memory.offload.bandwidth import memory_rate, tier_below
from outcore.memory.saved_tensors.lossy_error import lossy_buffers
from outcore.one_device.within import memory_plan, within
from outcore.planner.memory.plan import MemoryPlan, plan_memory
from outcore.planner.memory.search import smallest
from outcore.program.plan.document import Plan
from outcore.program.policies import parse_policies
from outcore.stream.execute.map_store import cut
from outcore.stream.managed_forward import refused_both_ways
from outcore.stream.plan.step_document import StreamedStep
from outcore.stream.source import FunctionSource
from outcore.verification.verdict import BOUNDS, ParameterRow, Verdict

__all__ = ["plain_bytes", "verify_job"]


def verify_job(
    job: Job,
    *,
    plan: Plan | None = None,
    memory: str | int | None = None,
    size: int | None = None,
    image: int | None = None,
    steps: int = 2,
    device: str | None = None,
) -> Verdict:
    """Train a job both ways and compare.

    >>> import torch
    >>> from outcore import Job
    >>> layers = lambda: [layer for _ in range(9) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())]
    >>> job = Job(lambda: torch.nn.Sequential(*layers()), lambda size: (torch.randn(size, 8), None))
    >>> verify_job(job, size=512).grade
    'bitwise equal'

    Args:
        job: the job.
        plan: policies to verify; without it a budget is planned for.
        memory: the budget, in bytes or like ``"8GiB"`` or ``"50%"`` of what plain training takes; without it, halfway
            between plain training and the smallest budget.
        size: of the batch.
        image: longest side to crop images to; by default what fits both ways.
        steps: to train.
        device: by default a GPU if there is one.
    """
    from outcore.run.engine.setup import choose_device

    if plan is not None and (plan.ranks > 1 or plan.spatial is not None):
        raise PlanError(
            f"the plan is for {counted(plan.ranks, 'rank')}, which load the job by its name; "
            "verify it with: outcore verify JOB PLAN"
        )
    where = choose_device(device)
    whole = job.capture(size)
    side = image or fitting_side(job, whole, size, where)
    torch.manual_seed(0)
    model = job.build().train().to(where)
    batch = job.example(size)
    crop = (side, longest_side(batch) or side) if side is not None else None
    args, kwargs, target = substitute(
        crop_batch(batch, side) if side is not None else batch, torch.Tensor, lambda t: t.to(where)
    )
    plain_model = copy.deepcopy(model)
    costs = by_bytes(account(capture(model, args, kwargs)), memory_rate(where))
    options: dict[str, Any] = {"optimizer": job.update, "costs": costs, "quiet": True}
    if job.loss is not None:
        options["loss"] = lambda output: job.loss(output, target)
    whole_bytes = plain_bytes(job, size, job.update, where)
    budget_bytes = parse_budget(memory, whole_bytes) if isinstance(memory, str) else memory
    whole_planned_bytes = None
    if crop is not None and plan is None:
        made = _for_whole(whole, job.update, budget_bytes, where)
        plan, budget_bytes, whole_planned_bytes = made.document(), None, made.peak_bytes
    if plan is None and budget_bytes is None:
        within(model, args, kwargs, memory=None, **options)
        budget_bytes = _halfway(model)
    given = _manage(model, args, kwargs, memory=budget_bytes, plan=plan, **options)
    chosen = memory_plan(model)
    assert isinstance(chosen, (MemoryPlan, StreamedStep))  # nothing is compiled, and Keras' models come as torch's
    if crop is None and isinstance(chosen, MemoryPlan):
        chosen = replace(chosen, known_plain_bytes=whole_bytes)
    elif crop is None and isinstance(chosen, StreamedStep):
        chosen = replace(chosen, plain_bytes=whole_bytes)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        ours = list(_train(model, job, *given, target, job.update, steps))
        plain = list(_train(plain_model, job, args, kwargs, target, job.update, steps))
    finally:
        torch.use_deterministic_algorithms(deterministic)
    largest = max((float(g.abs().max()) for _, grads in plain for g in grads.values()), default=0.0)
    rows = []
    for name in plain[0][1]:
        off = max(float((a[name] - b[name]).abs().max()) for (_, a), (_, b) in zip(ours, plain, strict=True))
        rows.append(ParameterRow(name, off, off / largest if largest else 0.0))
    theirs = dict(plain_model.named_buffers())
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return Verdict(
        rows=tuple(rows),
        buffers=len(theirs),
        equal_buffers=sum(torch.equal(b, theirs[n]) for n, b in model.named_buffers()),
        equal_losses=[loss for loss, _ in ours] == [loss for loss, _ in plain],
        steps=steps,
        bound=BOUNDS.get(dtype, 1e-4),
        planned_bytes=chosen.peak_bytes,
        plain_bytes=chosen.plain_bytes,
        explained=chosen.explain(timed=False),  # calls are weighed by their bytes alone
        lossy=len(lossy_buffers(parse_policies(chosen.policy))),
        crop=crop,
        whole_plain_bytes=whole_bytes if crop is not None else None,
        whole_planned_bytes=whole_planned_bytes,
    )


def _manage(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, plan: Plan | None, **options: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put a model under policies, or in tiles where those are not enough; returns the arguments to call it with.

    Tiles read images lazily, as `outcore plan` counts them and as `outcore train` reads slides.
    """
    refused = None
    if plan is None or plan.stream is None:
        try:
            within(model, args, kwargs, plan=plan, stream=False, **options)
            return args, kwargs
        except PlanError as error:
            if plan is not None:
                raise
            refused = error
    lazy = substitute((args, kwargs), torch.Tensor, lambda t: _lazy(t) if t.dim() > 2 else t)
    try:
        within(model, *lazy, plan=plan, stream=True, **options)
    except (PlanError, StreamError) as error:
        if refused is None:
            raise
        raise refused_both_ways(refused, error) from None
    return lazy  # type: ignore[no-any-return]


def _lazy(image: torch.Tensor) -> FunctionSource:
    """A tensor that is read region by region."""
    return FunctionSource(tuple(image.shape), partial(cut, image), image.dtype)


def plain_bytes(job: Job, size: int | None, optimizer: Any, where: torch.device) -> int:
    """What a plain step is predicted to hold, with its loss: the number that `outcore profile` shows."""
    graph = capture_training(job, size)
    return memory_curve(graph, account(graph, where), optimizer=optimizer).peak_bytes


def _for_whole(graph: Graph, optimizer: Any, budget_bytes: int | None, where: torch.device) -> MemoryPlan:
    """A plan for images that are too large to be tried."""
    rate = memory_rate(where)
    costs = by_bytes(account(graph, where), rate)
    cost = OptimizerCost.of(optimizer, where.type)
    tier = tier_below(where, costs.total().saved_bytes, spills=True)
    made = partial(plan_memory, graph, costs, optimizer=cost, tier=tier, memory_bytes_per_s=rate)
    if budget_bytes is None:
        keeping = made(budget_bytes=None).keeping
        budget_bytes = (keeping.plain.peak_bytes + smallest(keeping, time_limit_s=1.0).outcome.peak_bytes) // 2
    return made(budget_bytes=budget_bytes)


def _halfway(model: nn.Module) -> int:
    """A budget between plain training and the smallest that works."""
    plan = memory_plan(model)
    assert isinstance(plan, MemoryPlan)
    least = smallest(plan.keeping, time_limit_s=1.0).outcome.peak_bytes
    return plan.reserved_bytes + (plan.keeping.plain.peak_bytes + least) // 2


def _train(
    model: nn.Module,
    job: Job,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    optimizer: Any,
    steps: int,
) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients of every step."""
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        torch.manual_seed(step)
        output = model(*args, **kwargs)
        loss = job.loss(output, target) if job.loss is not None else square_loss(output)
        loss.backward()
        yield loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        stepper.step()
        stepper.zero_grad()
