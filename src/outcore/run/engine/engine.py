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
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from outcore.errors import CheckpointError, EngineError
from outcore.graph.record.preserve import evaluating
from outcore.job import Job
from outcore.machine.host_allocator import keep_freed_memory
from outcore.program import Timeline
from outcore.program.plan.document import Plan
from outcore.program.policies import parse_policies
from outcore.run.checkpoint.engine_state import EngineState
from outcore.run.checkpoint.signals import STOP, SaveSignals
from outcore.run.engine import batch as batches
from outcore.run.engine.build import EngineParts
from outcore.run.engine.default_plan import own_plan
from outcore.run.engine.loader import Loader
from outcore.run.engine.measured import Comparison, gather, held_tensors
from outcore.run.engine.settings import EngineOptions, EngineSettings
from outcore.run.engine.setup import check_optimizer, check_separable, choose_device, make_optimizer
from outcore.run.engine.split_batch import BatchSplitter, run_for_loss
from outcore.run.engine.update import GradientUpdate
from outcore.run.engine.worker import Worker
from outcore.run.ranks.faults import FaultMonitor
from outcore.run.ranks.world import World
from outcore.run.stage.idle_state_offload import IdleStateOffload
from outcore.run.stage.policies import StagePolicies
from outcore.run.stage.stage_module import Part
from outcore.run.transport.choose import point_to_point
from outcore.run.transport.shared_memory import SharedRows

_DIRECT = 16
"""As many ranks send each other a few bytes in every step; more of them add up in a tree, as gloo does."""
_WRITTEN = 4
"""A flag among the requests of a rank: its part of a checkpoint is on the disk."""


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
        plan: a plan or the path of one; if left out, several ranks make one (`outcore.plan`), in which each is given
            a batch of its own where the network fits.
        settings: how it trains; `options` are its fields as keyword arguments, and go before it.
        options: ``loss``, ``optimizer``, ``scheduler``, ``groups``, ``example``, ``program``, ``reduction``,
            ``clip_norm``, ``autocast``, ``loss_scale``, ``accumulate``, ``seed``, ``device``, ``timeout_s``,
            ``grace_s``, ``offload_idle``, ``execute``, ``weights``, ``checkpoints``
            (`outcore.run.EngineSettings` says what each is).
    """

    _made = 0

    def __init__(
        self,
        source: Job | nn.Module,
        plan: Plan | str | Path | None = None,
        *,
        settings: EngineSettings | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        asked = replace(settings or EngineSettings(), **options)
        self.accumulate, self.seed = asked.accumulate, asked.seed
        self.steps = 0
        """Calls of `step` so far."""
        self.samples = 0
        """Samples trained on so far, over all replicas."""
        self.loader_state: Loader | None = None
        self.checkpoints = Path(asked.checkpoints) if asked.checkpoints is not None else None
        self.world = World.join(timeout_s=asked.timeout_s)
        self.rank, self.place = self.world.rank, self.world.place
        self.signals = SaveSignals() if self.checkpoints is not None else None
        self.watch = self._start_watch(asked.grace_s)
        with self._guarded():
            self.device = choose_device(asked.device, self.world.local_rank)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            elif self.world.size > 1:
                keep_freed_memory()
            given = Plan.load(plan) if isinstance(plan, str | Path) else plan
            if given is None and self.world.size > 1:
                given = own_plan(self.world, source, asked.example)
            self.assembly = EngineParts(self.world, self.device, source, given, asked)
            complete = asked.completed(source)
            self._prepare(complete)
            if asked.offload_idle and len(self.stages) > 1:
                self._offload_idle_stages()
            self._make_optimizer(complete)
            self.engine_state = EngineState(self)

    def _make_optimizer(self, settings: EngineSettings) -> None:
        """The user's optimizer over this rank's parameters, and its scheduler."""
        if settings.optimizer is not None:
            every = list(self.model.named_parameters())
            holders = [share.ranks for share in self.assembly.owners.shares]
            check_separable(
                settings.optimizer,
                divided=self.worker.idle_state is not None or any(len(ranks) < self.world.size for ranks in holders),
                copied=any(len(ranks) > 1 for ranks in holders),
            )
            self.update.optimizer = make_optimizer(settings.optimizer, settings.groups, every, self.parameters)
            check_optimizer(self.update.optimizer, self.parameters.values(), EngineError)
        wanted, optimizer = settings.scheduler, self.optimizer
        self.scheduler = wanted(optimizer) if wanted is not None and optimizer is not None else None

    def _start_watch(self, grace_s: float) -> FaultMonitor | None:
        if self.world.size == 1:
            return None
        Engine._made += 1
        number = self.world.numbers([Engine._made])[0][0]
        meeting = self.world.meeting
        assert meeting is not None
        watch = FaultMonitor(
            meeting.store,
            self.rank,
            self.world.size,
            self.place,
            number,
            grace_s=grace_s,
            store_rank=meeting.store_rank,
        )
        self.world.watched_wait.look = watch.look
        return watch

    def _prepare(self, settings: EngineSettings) -> None:
        execute = settings.execute or Part.run
        if execute is Part.run and self.plan.policy:
            execute = StagePolicies(parse_policies(self.plan.policy), self.device)
        assert settings.loss is not None
        made = self.assembly
        every = dict(self.model.named_parameters())
        self._shared_rows = shared_rows = SharedRows(self.world, self.device) if self.world.size > 1 else None
        if shared_rows is not None and self.world.size <= _DIRECT and shared_rows.connect(range(self.world.size), 0):
            self.world.exchange = shared_rows.exchange
        self.update = GradientUpdate(
            self.world,
            made.owners,
            made.parameters,
            list(every),
            made.groups,
            clip_norm=settings.clip_norm,
            scale=settings.loss_scale,
            dtypes={p.dtype for p in every.values()},
            shared_rows=shared_rows,
        )
        self.splitter = BatchSplitter(
            self.world,
            made.plan,
            made.forms,
            made.step_programs,
            reduction=settings.reduction,
            accumulate=self.accumulate,
            seed=self.seed,
        )
        wire = point_to_point(self.world, self.device, shared_rows) if shared_rows is not None else None
        self.worker = Worker(made, wire, settings.loss, execute, self.update)
        self.worker.gauge.holding = lambda: held_tensors(made, self.worker, self.optimizer)

    def _offload_idle_stages(self) -> None:
        """Keep one of this rank's stages at a time on the device, the others offloaded."""
        parts = self.assembly.recorded.parts
        idle_state = IdleStateOffload({stage: list(parts[stage].parameters()) for stage in self.stages}, self.device)
        self.worker.idle_state = idle_state
        self.update.take_step, self.update.make_row = idle_state.step, idle_state.make_row

    # Facts

    @property
    def plan(self) -> Plan:
        """The plan that is executed."""
        return self.assembly.plan

    @property
    def model(self) -> nn.Module:
        """The model; parts of it that other ranks hold may be without content."""
        return self.assembly.model

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages this rank holds."""
        return self.assembly.stages

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters this rank holds, by name."""
        return self.assembly.parameters

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The user's optimizer over the parameters of this rank."""
        return self.update.optimizer

    @property
    def replica(self) -> int:
        """The data-parallel replica this rank belongs to."""
        return self.rank // self.plan.ranks_per_replica

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights and buffers of the model, on the host of every rank; collective."""
        found = self.world.gather(self.assembly.local_state())
        return {name: found[name] for name in self.model.state_dict() if name in found}

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Loader:
        """Batches of a dataset of (input, target) for this rank; its position is saved and loaded with the engine."""
        first, last = 0 in self.stages, len(self.plan.stages) - 1 in self.stages
        wanted = first or last or any(self.assembly.recorded.needs_inputs(stage) for stage in self.stages)
        self.loader_state = Loader(
            dataset,
            batch_size,
            replica=self.replica,
            replicas=self.plan.replicas,
            wanted=wanted,
            shuffle=shuffle,
            seed=self.seed,
            workers=workers,
            collate=collate,
        )
        return self.loader_state

    def set_seed(self, seed: int) -> None:
        """Draw random masks from another seed from now on."""
        self.seed = self.splitter.seed = seed

    # Running

    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Train on one batch (of this replica); returns the loss, the same on every rank."""
        with self._guarded():
            scale = self.update.scale.scale if self.update.scale is not None else 1.0
            run, script = self.splitter.take(
                inputs, targets, training=True, step=self.steps, scale=scale, request=self._own_request()
            )
            self.steps, self.samples = self.steps + 1, self.samples + run.samples
            update = self.steps % self.accumulate == 0
            loss = run_for_loss(self.world, self.worker, run, script, update=update)
            if update and self.scheduler is not None:
                self.scheduler.step()
            self._serve_requests(self.splitter.requests)
            return loss

    def _own_request(self) -> int:
        """The flags this rank sends to all others: save a checkpoint, stop, or my checkpoint is written."""
        asked = self.signals.request if self.signals is not None else 0
        return asked | (_WRITTEN if self.engine_state.is_ready else 0)

    def _serve_requests(self, requests: list[int]) -> None:
        """Do what any rank asked for, when an update is complete."""
        if self.engine_state.is_writing and all(w & _WRITTEN for w in requests):
            self.engine_state.finish()
        asked = max(w & ~_WRITTEN for w in requests)
        if not asked or self.steps % self.accumulate:
            return
        if self.checkpoints is not None:
            self.engine_state.save(self.checkpoints, None, keep=2, wait=True)
        if self.signals is not None:
            self.signals.request = 0
        if asked & STOP:
            self.close()
            raise SystemExit(128 + signal.SIGTERM)

    def save(self, path: str | Path, *, extra: Any = None, keep: int = 2, wait: bool = True) -> Path | None:
        """Write a checkpoint under a directory; collective.

        Args:
            path: the directory; checkpoints are directories inside it.
            extra: plain values to store with it, which `load` returns.
            keep: how many checkpoints are kept.
            wait: False to write in the background; it becomes valid at a later step, or when the engine is closed.
        """
        with self._guarded(CheckpointError):
            return self.engine_state.save(Path(path), extra, keep=keep, wait=wait)

    def load(self, path: str | Path) -> Any:
        """Go on from a checkpoint (the newest good one in a directory), whoever saved it; returns its `extra`."""
        with self._guarded(CheckpointError):
            return self.engine_state.load(path)

    def evaluate(self, inputs: Any = None, targets: Any = None) -> float:
        """The loss on one batch in eval mode; changes nothing."""
        with self._guarded(), evaluating(self.model):
            run, script = self.splitter.take(inputs, targets, training=False, step=self.steps)
            return run_for_loss(self.world, self.worker, run, script, update=False)

    def predict(self, inputs: Any = None) -> Any:
        """What the model returns for a batch in eval mode, on ranks that hold the last stage; None on others."""
        with self._guarded(), evaluating(self.model):
            run, script = self.splitter.take(inputs, None, training=False, step=self.steps)
            self.worker.keep_outputs = True
            try:
                run_for_loss(self.world, self.worker, run, script, update=False)
            finally:
                self.worker.keep_outputs = False
        return batches.joined([run.outputs[i] for i in sorted(run.outputs)]) if run.outputs else None

    def share(self, value: Any) -> list[Any]:
        """One JSON value from every rank, by rank; collective, and a rank that fails meanwhile is named."""
        with self._guarded():
            self._between_steps()
            return self.world.share(value)

    def largest(self, number: int) -> int:
        """The largest of the whole numbers that the ranks give; collective, as `share`."""
        with self._guarded():
            self._between_steps()
            return max(row[0] for row in self.world.numbers([number]))

    def _between_steps(self) -> None:
        place = self.place
        place.stage, place.micro_batch, place.doing, place.call = -1, -1, "between steps", ""

    def timeline(self) -> Timeline:
        """What happened in the last step on every rank; collective."""
        return gather(self.world, self.worker, self.plan.arrangement)

    def comparison(self) -> Comparison:
        """The last step beside what its schedule predicts from the measured times of single stages; collective."""
        step_programs = self.assembly.step_programs
        return Comparison.with_schedule(
            step_programs.training, step_programs.stages, self.timeline(), max(1, self.plan.parts)
        )

    def count_memory(self, on: bool = True) -> None:
        """Count live bytes of tensors in the following steps, on a CPU; slower, but `timeline` then shows memory."""
        self.worker.gauge.counting = on

    @contextlib.contextmanager
    def _guarded(self, harmless: type[BaseException] = SystemExit) -> Iterator[None]:
        """A context after whose failure nothing is left in flight and all ranks learn of it; errors of the `harmless`
        types, which all ranks raise alike, leave the engine usable."""
        self.place.step = self.steps
        try:
            yield
        except BaseException as error:
            if isinstance(error, SystemExit | harmless):
                raise
            if hasattr(self, "worker"):
                self.worker.abandon()
            reported = self.watch.failed(error) if self.watch is not None else None
            self.world.cut()
            self._shared_rows = None  # nobody reads what was sent
            self.close()
            if reported is None:
                raise
            raise reported from error

    def close(self) -> None:
        """Leave the other ranks; the engine cannot be used afterwards."""
        shared_rows, self._shared_rows = getattr(self, "_shared_rows", None), None
        if shared_rows is not None:
            with contextlib.suppress(Exception):  # whoever has left, or is stuck, reads nothing
                shared_rows.wait_for_readers()
        if self.signals is not None:
            self.signals.close()
        if hasattr(self, "worker"):
            self.worker.close()
        if hasattr(self, "assembly"):
            self.assembly.close()
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()
        self.world.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.engine_state.finish()
        else:
            self._shared_rows = None
        self.close()
