"""Does a plan for several ranks train a model as plain PyTorch would?

The plan is run by the engine, every rank a process of this machine, from the weights and on the batch that plain
PyTorch is given too. The oracle is a loop over the same micro-batches in one process, with as many threads as a rank
has: each replica's share of the batch, cut into the plan's pieces, its loss weighted by its samples. Where batch norms
see the whole batch, it is one piece.

Random numbers of a plan are those of (seed, step, micro-batch, call), which plain PyTorch does not draw: a network that
draws any is compared with the engine on one rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from outcore.cost.cropped_job import crop_batch, fitting_side, longest_side
from outcore.errors import PlanError
from outcore.graph.random_calls import random_calls
from outcore.graph.structure import square_loss, substitute
from outcore.job import Job
from outcore.machine.units import counted
from outcore.planner.pipeline.batch_norm_images import batch_norms
from outcore.program.plan.document import Plan
from outcore.run.engine import batch as batches
from outcore.run.engine.engine import Engine
from outcore.run.engine.setup import choose_device
from outcore.run.ranks.launch import launch
from outcore.verification.one_device import plain_bytes
from outcore.verification.verdict import BOUNDS, ParameterRow, Verdict

__all__ = ["JobSource", "verify_on_ranks"]

_MOST_RANKS = 16
_SEED = 0


@dataclass(frozen=True)
class JobSource:
    """What a user typed to name a job; every rank loads it by itself."""

    text: str
    inputs: Sequence[str] = ()
    arguments: Sequence[str] = ()

    def load(self) -> Job:
        """The job."""
        return Job.load(self.text, inputs=self.inputs, arguments=self.arguments)


@dataclass(frozen=True)
class _Trained:
    """What some steps gave."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    """By step; of a rank, those of its parameters."""
    buffers: dict[str, torch.Tensor]


def verify_on_ranks(
    source: JobSource,
    plan: Plan,
    *,
    size: int | None = None,
    image: int | None = None,
    steps: int = 2,
    device: str | None = None,
) -> Verdict:
    """Train a job by a plan for several ranks and in plain PyTorch, and compare.

    Args:
        source: of the job.
        plan: for several ranks, or for one that streams as a rank of a grid.
        size: of the batch, over all replicas.
        image: longest side to crop images to; by default what fits both ways.
        steps: to train.
        device: by default GPUs if there is one for every rank.

    Raises:
        PlanError: there are too many ranks to be tried on one machine.
        EngineError: a rank failed; names it.
    """
    if plan.ranks > _MOST_RANKS:
        raise PlanError(
            f"the plan is for {plan.ranks} ranks, and every rank is a process of this machine here, at most "
            f"{_MOST_RANKS}; verify a plan for fewer: outcore plan {source.text} --devices {_MOST_RANKS} -o small.json"
        )
    few = device is None and torch.cuda.device_count() < plan.ranks
    job, where = source.load(), choose_device("cpu" if few else device)
    whole = job.capture(size)
    plan.validate(whole)
    side = image or fitting_side(job, whole, size, where)
    torch.manual_seed(_SEED)
    model = job.build().train()
    batch = job.example(size)
    crop = (side, longest_side(batch) or side) if side is not None else None
    args, kwargs, target = crop_batch(batch, side) if side is not None else batch
    inputs = kwargs or (args[0] if len(args) == 1 else args)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = bool(random_calls(whole))
    threads = max(1, torch.get_num_threads() // plan.ranks)
    given = (source, state, inputs, target, steps, where.type, threads)
    ours = launch(_rank, plan.ranks, plan.to_json(), *given)
    if drawn:
        pieces = plan.replicas * plan.micro_batches * plan.batches
        alone = Plan(plan.graph, (("",),), micro_batches=pieces, batch_norm=plan.batch_norm)
        (plain,) = launch(_rank, 1, alone.to_json(), *given)
    else:
        norms = plan.batch_norm == "synchronised" and bool(batch_norms(whole))
        with _threads(threads):
            plain = _plain(copy.deepcopy(model).to(where), job, _shares(inputs, target, plan, whole=norms), steps)
    return replace(
        _compared(ours, plain, next((p.dtype for p in model.parameters()), torch.float32)),
        planned_bytes=max(plan.predicted.peak_bytes) if plan.predicted is not None else 0,
        plain_bytes=plain_bytes(job, size, job.update, where) if crop is None else 0,
        explained="\n".join([*_how(plan, drawn=drawn), str(plan)]),
        crop=crop,
        ranks=plan.ranks,
    )


def _how(plan: Plan, *, drawn: bool) -> list[str]:
    """What was compared with what."""
    other = "the engine on one rank, with the same random numbers" if drawn else "plain PyTorch"
    pieces = plan.replicas * plan.micro_batches * plan.batches
    over = f" over the same {counted(pieces, 'micro-batch')}" if pieces > 1 else ""
    return [f"trained on {counted(plan.ranks, 'rank')} of this machine, and by {other}{over}"]


def _rank(
    document: Mapping[str, Any],
    source: JobSource,
    state: Mapping[str, torch.Tensor],
    inputs: Any,
    target: Any,
    steps: int,
    device: str,
    threads: int,
) -> _Trained:
    """One rank's part in training by the plan."""
    torch.set_num_threads(threads)
    job, plan = source.load(), Plan.from_json(dict(document))
    torch.manual_seed(_SEED)
    model = job.build().train()
    model.load_state_dict(state)
    options: dict[str, Any] = {"loss": _loss_of(job), "optimizer": job.update, "seed": _SEED, "device": device}
    engine = Engine(model, plan, example=inputs, **options)
    found: list[dict[str, torch.Tensor]] = []
    engine.update.before_step = lambda: found.append(_gradients(engine.parameters))
    count = batches.rows(inputs)
    mine = batches.parts(count, plan.replicas)
    part, wanted = (batches.cut(data, count, mine)[engine.replica] for data in (inputs, target))
    losses = [engine.step(part, wanted) for _ in range(steps)]
    buffers = dict(model.named_buffers())
    made = {name: tensor for name, tensor in engine.state_dict().items() if name in buffers}
    engine.close()
    return _Trained(losses, found, made)


def _gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().cpu().clone() for n, p in parameters.items() if p.grad is not None}


def _loss_of(job: Job) -> Callable[[Any, Any], torch.Tensor]:
    return job.loss if job.loss is not None else _square_loss


def _square_loss(output: Any, target: Any) -> torch.Tensor:
    return square_loss(output)


def _shares(inputs: Any, target: Any, plan: Plan, *, whole: bool) -> list[tuple[Any, Any, float]]:
    """The micro-batches of a step in their order, each with its share of the samples."""
    count = batches.rows(inputs)
    if whole:
        return [(inputs, target, 1.0)]
    each = plan.micro_batches * plan.batches
    sizes = [size for part in batches.parts(count, plan.replicas) for size in batches.parts(part, each)]
    rows = zip(batches.cut(inputs, count, sizes), batches.cut(target, count, sizes), sizes, strict=True)
    return [(x, wanted, size / count) for x, wanted, size in rows if size]


def _plain(model: nn.Module, job: Job, shares: list[tuple[Any, Any, float]], steps: int) -> _Trained:
    """A loop over the micro-batches in one process."""
    parameters = dict(model.named_parameters())
    optimizer, loss_of = job.update([p for p in parameters.values() if p.requires_grad]), _loss_of(job)
    where = next((p.device for p in parameters.values()), torch.device("cpu"))
    losses, gradients = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for inputs, target, share in shares:
            args, kwargs = batches.arguments(_on(inputs, where))
            loss = loss_of(model(*args, **kwargs), _on(target, where))
            (loss * share).backward()
            total += share * loss.item()
        losses.append(total)
        gradients.append(_gradients(parameters))
        optimizer.step()
    return _Trained(losses, gradients, {name: tensor.detach().cpu() for name, tensor in model.named_buffers()})


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many threads: how sums are divided among them decides their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _on(data: Any, where: torch.device) -> Any:
    return substitute(data, torch.Tensor, lambda t: t.to(where))


def _compared(ours: Sequence[_Trained], plain: _Trained, dtype: torch.dtype) -> Verdict:
    """How far the ranks are from the oracle."""
    largest = max((float(g.abs().max()) for step in plain.gradients for g in step.values()), default=0.0)
    rows = []
    for name in plain.gradients[0]:
        pairs = [
            (mine[name], theirs[name])
            for rank in ours
            for mine, theirs in zip(rank.gradients, plain.gradients, strict=True)
            if name in mine and name in theirs
        ]
        off = max((float((mine - theirs).abs().max()) for mine, theirs in pairs), default=float("inf"))
        rows.append(ParameterRow(name, off, off / largest if largest else 0.0))
    buffers = {name: tensor for name, tensor in plain.buffers.items() if name in ours[0].buffers}
    return Verdict(
        rows=tuple(rows),
        buffers=len(buffers),
        equal_buffers=sum(torch.equal(tensor.cpu(), ours[0].buffers[name].cpu()) for name, tensor in buffers.items()),
        equal_losses=ours[0].losses == plain.losses,
        steps=len(plain.losses),
        bound=BOUNDS.get(dtype, 1e-4),
        planned_bytes=0,
        plain_bytes=0,
        explained="",
    )
