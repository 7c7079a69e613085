"""The engine: trains a network by a plan, on one rank or many, with the gradients of plain PyTorch.

    engine = outcore.Engine(job, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    for inputs, targets in batches:
        loss = engine.step(inputs, targets)

The same lines run on every rank, whoever launched it. Each rank holds the stages that the plan's program gives it. A
step is given the batch of this rank's data-parallel replica; ranks whose stages read neither inputs nor targets may
give None. It begins with one small exchange (who has data, of which shape, is anybody asked to stop) and ends with one
more, so that every rank returns the same loss.

What is computed: the loss of each micro-batch, weighted by its share of the samples, differentiated, and added up over
all micro-batches of the step. On one rank that is plain gradient accumulation, and it is the oracle for all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from outcore.errors import EngineError
from outcore.graph.structure import leaves, substitute
from outcore.job import Job
from outcore.plan_document import Plan
from outcore.program import Program
from outcore.run.blueprint import Blueprint
from outcore.run.form import Form, Forms
from outcore.run.holdings import Holdings
from outcore.run.intake import Intake
from outcore.run.part import Execute, Part, Place
from outcore.run.setup import (
    Groups,
    MakeOptimizer,
    agree,
    build,
    choose_device,
    example_of,
    first_graph,
    make_optimizer,
    strip,
)
from outcore.run.update import LossScale, Update
from outcore.run.wire import HostWire, Wire
from outcore.run.worker import Pass, Worker
from outcore.run.world import World

__all__ = ["Engine"]

Loss = Callable[[Any, Any], torch.Tensor]


class Engine:
    """Executes a plan, step by step.

    >>> import torch, outcore
    >>> job = outcore.Job(
    ...     model=lambda: torch.nn.Linear(4, 2),
    ...     batch=lambda size: (torch.randn(size, 4), torch.randn(size, 2)),
    ...     loss=torch.nn.functional.mse_loss,
    ...     size=8,
    ... )
    >>> engine = Engine(job, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> inputs, targets = job.batch(8)
    >>> engine.step(inputs, targets) > engine.step(inputs, targets)
    True

    Args:
        source: a job, or a module, which is then trained in place.
        plan: a plan or the path of one; on one rank it may be left out.
        loss: ``loss(output, target)``; the job's own if not given.
        optimizer: makes the optimizer from parameters (or groups of them); the job's own if not given. Without any, the
            engine computes gradients and leaves them in ``parameter.grad``.
        scheduler: makes a learning-rate scheduler from the optimizer; it advances with every update.
        groups: options of the optimizer by a parameter's name.
        example: inputs of one batch, needed if a module is given.
        program: an order to run in place of the plan's schedule, as `outcore.program.synthesise` finds them.
        reduction: whether the loss is a mean over samples or a sum.
        clip_norm: largest norm of the gradients of all stages together.
        autocast: dtype of mixed precision; with float16 one loss scale is kept for all ranks.
        accumulate: calls of `step` before an update.
        seed: of initial weights (of a job) and of random masks.
        device: "cpu" or "cuda"; this rank's GPU if there is one.
        timeout_s: after which a silent rank ends the run.
        execute: runs a stage's part of the network; where policies for saved values act.
    """

    def __init__(
        self,
        source: Job | nn.Module,
        plan: Plan | str | Path | None = None,
        *,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        groups: Groups | None = None,
        example: Any = None,
        program: Program | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        loss_scale: LossScale | None = None,
        accumulate: int = 1,
        seed: int = 0,
        device: str | torch.device | None = None,
        timeout_s: float = 300.0,
        execute: Execute = Part.run,
    ) -> None:
        self.reduction, self.accumulate, self.seed = reduction, accumulate, seed
        self.steps = 0
        """Calls of `step` so far."""
        self.place = Place()
        self.world = World.join(timeout_s=timeout_s)
        self.rank = self.world.rank
        self.device = choose_device(device, self.world)
        self._timeout_s = timeout_s
        plan = Plan.load(plan) if isinstance(plan, str | Path) else plan
        graph = self._cut(source, plan, example, program, autocast)
        self._hold(graph)
        job_loss = source.loss if isinstance(source, Job) else None
        job_optimizer = source.optimizer if isinstance(source, Job) else None
        if (loss or job_loss) is None:
            raise EngineError("there is no loss to train for; pass loss=..., or a job with loss(output, target)")
        if autocast is torch.float16 and loss_scale is None:
            loss_scale = LossScale()
        self.update = self._make_update(clip_norm, loss_scale)
        if (make := optimizer or job_optimizer) is not None:
            self.update.optimizer = make_optimizer(make, groups, list(self.model.named_parameters()), self.parameters)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None and self.optimizer is not None else None
        self.intake = Intake(
            self.world,
            self.plan,
            self.forms,
            self.blueprint,
            reduction=reduction,
            accumulate=accumulate,
            seed=seed,
        )
        wire: Wire | None = HostWire(self.world.group) if self.world.size > 1 else None
        self.worker = Worker(
            self.forms, wire, loss or job_loss, execute, self.place, rank=self.rank, update=self.update
        )

    # Making

    def _cut(
        self, source: Job | nn.Module, plan: Plan | None, example: Any, program: Program | None, autocast: Any
    ) -> Any:
        """Build the model, record it, and find this rank's stages."""
        pieces = plan.micro_batches * plan.batches * plan.replicas if plan is not None else 1
        inputs = example_of(source, example, pieces)
        model, skeleton = build(source, seed=self.seed, lean=self.world.size > 1, bare=False)
        graph = None
        while graph is None:
            forms = Forms(model, skeleton, plan, self.device, autocast)  # type: ignore[arg-type]
            graph = first_graph(skeleton, model, lambda f=forms: f.record(inputs))  # type: ignore[misc]
            skeleton = model
        if plan is None:
            if self.world.size > 1:
                raise EngineError(f"{self.world.size} ranks need a plan; make one with outcore.plan(...)")
            plan = Plan(graph.fingerprint, (("",),))
        forms.plan = self.plan = plan
        agree(self.world, plan, graph)
        self.forms, self.model = forms, model
        self.blueprint = Blueprint(plan, forms.first(graph), program)
        placement = self.blueprint.training.placement()
        self.stages = tuple(sorted({stage for (stage, _), rank in placement.items() if rank == self.rank}))
        forms.own = self.stages
        return graph

    def _hold(self, graph: Any) -> None:
        """Keep this rank's stages on its device, and equal to those of the other ranks that hold them."""
        self.holdings = Holdings.of(self.model, graph, self.forms.stage_of, self.blueprint.training)
        form = Form(graph, self.model, self.forms.stage_of, self.stages, self.device, len(self.plan.stages))
        for part in form.parts.values():
            part.to(self.device)
        if self.forms.skeleton is not self.model:
            strip(self.model, (t for part in form.parts.values() for t in (*part.parameters(), *part.buffers())))
        every = dict(self.model.named_parameters())
        self.parameters = {name: every[name] for name in self.holdings.on(self.rank)}
        """The parameters this rank holds, by name."""
        self._home = form

    def _make_update(self, clip_norm: float | None, scale: LossScale | None) -> Update:
        groups = {
            share.stages: self.world.new_group(share.ranks, self._timeout_s)
            for share in self.holdings.shares
            if len(share.ranks) > 1
        }
        names = [name for name, _ in self.model.named_parameters()]
        update = Update(self.world, self.holdings, self.parameters, names, groups, clip_norm=clip_norm, scale=scale)
        update.set_precision({p.dtype for p in self.model.parameters()})
        return update

    # Facts

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer over the parameters of this rank."""
        return self.update.optimizer

    @property
    def replica(self) -> int:
        """The data-parallel replica this rank belongs to."""
        return self.rank // self.plan.ranks_per_replica

    def local_state(self) -> dict[str, torch.Tensor]:
        """Weights and buffers of this rank's stages under the model's own names."""
        return {name: t for part in self._home.parts.values() for name, t in part.state_dict().items()}

    # Running

    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Train on one batch (of this replica); returns the loss, the same on every rank."""
        with self._guarded():
            scale = self.update.scale.scale if self.update.scale is not None else 1.0
            run, script = self.intake.take(inputs, targets, training=True, step=self.steps, scale=scale)
            self.steps += 1
            update = self.steps % self.accumulate == 0
            self.worker.run(script.program.ranks[self.rank], script.tags, run, update=update)
            if update and self.scheduler is not None:
                self.scheduler.step()
            return self._total(run)

    def evaluate(self, inputs: Any = None, targets: Any = None) -> float:
        """The loss on one batch in eval mode; changes nothing."""
        with self._guarded(), self._evaluating():
            run, script = self.intake.take(inputs, targets, training=False, step=self.steps)
            self.worker.run(script.program.ranks[self.rank], script.tags, run, update=False)
            return self._total(run)

    def predict(self, inputs: Any = None) -> Any:
        """What the model returns for a batch in eval mode, on ranks that hold the last stage; None on others."""
        with self._guarded(), self._evaluating():
            run, script = self.intake.take(inputs, None, training=False, step=self.steps)
            self.worker.keep_outputs = True
            try:
                self.worker.run(script.program.ranks[self.rank], script.tags, run, update=False)
            finally:
                self.worker.keep_outputs = False
        return _joined([run.outputs[i] for i in sorted(run.outputs)]) if run.outputs else None

    def _total(self, run: Pass) -> float:
        """The loss of the whole step: that of every micro-batch by its share, in their order."""
        losses = torch.zeros(len(run.weights), dtype=torch.float64)
        for micro_batch, loss in run.losses.items():
            losses[run.pieces[micro_batch].number] = loss.item()
        every: list[float] = self.world.sum_(losses).tolist()
        return sum(weight * loss for weight, loss in zip(run.weights, every, strict=True))

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        """All modules in eval mode, and back as they were."""
        flags = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, training in flags:
                module.training = training

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """After a failure nothing is left in flight."""
        try:
            yield
        except BaseException:
            self.worker.abandon()
            self.update.abandon()
            raise

    def close(self) -> None:
        """Leave the other ranks."""
        self.world.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _joined(outputs: list[Any]) -> Any:
    """Outputs of micro-batches as one: tensors are put together along the first dimension."""
    columns = [[t for _, t in leaves(output, torch.Tensor)] for output in outputs]
    whole = iter([torch.cat(row) if row[0].ndim else torch.stack(row) for row in zip(*columns, strict=True)])
    return substitute(outputs[0], torch.Tensor, lambda _: next(whole))
