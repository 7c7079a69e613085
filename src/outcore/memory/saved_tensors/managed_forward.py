"""Stands where a model's ``forward`` was, and runs it under the policies of its plan.

Calls that train run the model's own forward (`outcore.memory.saved_tensors.live_forward`); all others (`no_grad`,
inference, tracing, export, ``torch.func``) go straight to the model. A plan serves every call that is no larger than
the one it was made for (`outcore.memory.saved_tensors.call_size`); a larger one is recorded and planned when it first
comes.

Where a recording has to run in the model's place (as a CUDA graph, or with calls merged into one kernel), it is valid
for the shapes, dtypes, modes and flags it was made under (`outcore.graph.record.keys`) and for all else that it read
from Python (`outcore.graph.record.captured_module`). What changes in every call, or is written by ``forward``, is not
for a recording: such a model runs its own code.

It is an attribute of the model, so that the model stays the object it was: its class, parameters, hooks and state_dict
are untouched. A copied or pickled model brings its managed forward along, which records again when it is first called.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.cost.costs import Costs
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes, scaled
from outcore.errors import CaptureError, PlanError, VaryingError
from outcore.graph import Graph
from outcore.graph.memory_format import recorded
from outcore.graph.reads.snapshot import Snapshot
from outcore.graph.record.captured_module import RecordingVersions
from outcore.graph.record.keys import hooks_of, key_of
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.record.recorder import planning
from outcore.graph.record.recording import Mismatch
from outcore.graph.structure import leaves
from outcore.memory.cuda_graphs.budget import planned_again
from outcore.memory.cuda_graphs.choose import GraphChoice
from outcore.memory.cuda_graphs.pool import give_back
from outcore.memory.cuda_graphs.step_graph import StepGraph
from outcore.memory.offload.backends import Backend, tier_for
from outcore.memory.offload.bandwidth import memory_rate
from outcore.memory.op_fusion.profitability import AbTest
from outcore.memory.param_offload.escalation import StatePlacement, follow, move
from outcore.memory.param_offload.offloader import StateOffloader
from outcore.memory.replay.compile_policies import prepare
from outcore.memory.replay.replay_forward import ReplayPass
from outcore.memory.saved_tensors.call_size import CallSize, RememberedParameters
from outcore.memory.saved_tensors.live_forward import LiveForward, is_looked_at
from outcore.memory.saved_tensors.peak_monitor import PeakMonitor, meter_for
from outcore.memory.saved_tensors.plan_call import CallProposal, propose
from outcore.memory.saved_tensors.policy_table import compile_policies
from outcore.memory.saved_tensors.replan import admit_larger, corrected, replanned
from outcore.memory.saved_tensors.settings import PlannedCall, Settings
from outcore.memory.saved_tensors.sharded import NOT_GATHERED, is_sharded
from outcore.planner.memory.plan import MemoryPlan


class ManagedForward:
    """What is called instead of the model's ``forward``."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        costs: Costs | None = None,
        inner: Callable[..., Any] | None = None,
    ) -> None:
        self._model = weakref.ref(model)  # the model holds this object, not the other way round
        self.inner = inner
        """The forward that another tool has put on this one model, if any."""
        self._parameters = RememberedParameters()
        self.covering: dict[Hashable, Hashable] = {}
        """Call -> the call whose plan serves it."""
        self.__signature__ = inspect.signature(self.original)  # some trainers look up which arguments a model takes
        self.settings = settings
        self.costs = costs
        """Measured for the first key; others are scaled from it."""
        self.admitted: dict[Hashable, PlannedCall | None] = {}
        """None for a key under which the model runs as it is."""
        self.tried: dict[Hashable, list[int]] = {}
        """What graphs took that were above the budget."""
        self.versions = RecordingVersions()
        """What the recordings that run in the model's place have read."""
        self.varying: str | None = None
        """What changes in every call, so that none does."""
        self.ab_test = AbTest()
        self.choice: GraphChoice | None = None
        """Whether steps become CUDA graphs by themselves."""
        self.only_graphs = False
        """Whether another managed forward runs what does not become one."""
        self.tier: Backend | None = None
        self.tier_bytes = 0
        self.keeper: StateOffloader | None = None
        """Keeps parameters and optimizer state below the device, where the plan says so."""
        self.placement: StatePlacement | None = None
        """How that is done, and where they are to be."""
        self.elsewhere: torch.device | None = None
        """Where the model computes, if it is the copy of one whose parameters were not there."""
        self.near: MemoryPlan | None = None
        """A plan for the same call in another way, from which a search may start."""
        self.inherited = False
        """Whether the model is a copy, and may have changed since its policies were chosen."""

    @property
    def model(self) -> nn.Module:
        """The model whose forward this is."""
        model = self._model()
        assert model is not None
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if torch.compiler.is_exporting():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            return _call_by_call(self, *args, **kwargs)
        return self.called(*args, **kwargs)

    def called(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; nothing is compiled around it."""
        if self.placement is not None and torch.is_grad_enabled():
            move(self, self.placement)
        if self.keeper is not None:
            return self.keeper.around(self.run, *args, **kwargs)
        if self.elsewhere is not None:
            self.model.to(self.elsewhere)
            self.elsewhere = None
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, whose parameters come when they are needed."""
        if not torch.is_grad_enabled() or is_looked_at():
            if self.choice is not None and self.settings.budget_bytes is not None:
                self.choice.leave(self)
            return self.original(*args, **kwargs) if is_looked_at() else self.plainly(*args, **kwargs)
        if self.keeper is not None and self.settings.free:  # a key takes the host as long as twenty calls of the model
            return self.plainly(*args, **kwargs)
        key = self.key(args, kwargs)
        if key not in self.admitted:
            admit_larger(self, key, args, kwargs)
            if (new := self.admitted[key]) is not None and follow(self, new.plan.state):
                return self(*args, **kwargs)
        entry = self.admitted[key]
        if entry is None or (entry.idle and not self.watched(key, entry) and not self.windowed):
            return self.plainly(*args, **kwargs)
        if entry.diverged >= entry.patience:
            entry = self.realigned(key, entry, args, kwargs)
        if entry.observer is not None:
            tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
            seen = entry.observer.look(tensors, self.keeper)
            if seen is not None and corrected(self, key, entry, seen, args, kwargs):
                new = self.admitted[key]
                moved = new is not None and follow(self, new.plan.state)
                return self(*args, **kwargs) if moved else self.run(*args, **kwargs)
        if entry.idle and not self.windowed:
            return self.plainly(*args, **kwargs)
        if entry.graphed is not None:
            tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
            entry.graphed.forget_moved()
            if entry.graphed.graphs is None and planned_again(self, key, entry, tensors, args, kwargs):
                return self.run(*args, **kwargs)
            if entry.graphed is not None and (result := entry.graphed(tensors)) is not None:
                return result[0]
            self.make_room(entry.table.offloaded_bytes)
        if self.only_graphs:
            raise PlanError("this step does not become CUDA graphs within its budget")
        if entry.merged:
            return self.replayed(entry, args, kwargs)
        if self.choice is not None and (replayed := self.choice.call(self, key, entry, args, kwargs)) is not None:
            return replayed[0]
        return self.live(key, entry, args, kwargs)

    def live(self, key: Hashable, entry: PlannedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward under its policies."""
        order = entry.plan.order.inside
        forward = self.original if order is None else order.turned(self.original)
        running = LiveForward(entry.table, self.tier, self.keeper)
        result = running.run(forward, args, kwargs)
        entry.diverged = entry.diverged + 1 if running.diverged else 0
        if self.choice is not None:
            self.choice.watch(result)
        return result

    def wait(self) -> None:
        """Block until the device has done all it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        """Return what nobody uses to the device."""
        if self.device.type == "cuda":
            give_back()

    def realigned(
        self, key: Hashable, entry: PlannedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PlannedCall:
        """The model has not run as its plan expects for some steps: plan what really runs; less and less often."""
        entry.diverged, patience = 0, 10 * entry.patience
        if self.settings.budget_bytes is not None and self.settings.policy is None:
            refused = replanned(self, key, self.settings, args, kwargs)
            if refused is not None:
                warnings.warn(f"outcore: the model runs otherwise than planned; {refused}", stacklevel=5)
            elif not self.settings.quiet:
                print("outcore: the model runs otherwise than planned; planned again for what runs", file=sys.stderr)
        found = self.admitted[key]
        if found is None:  # it cannot be recorded as it is now
            found = self.admitted[key] = entry
        found.patience = patience
        return found

    def replayed(self, entry: PlannedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the recording, in which calls were merged."""
        assert entry.compiled is not None
        tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
        if not entry.compiled.recording.uses_data:
            return ReplayPass(entry.compiled, self.model, tensors, self.tier, keeper=self.keeper).forward()
        before = ModelState(self.model, state_tensors(self.model), outer=False)
        try:
            return ReplayPass(entry.compiled, self.model, tensors, self.tier, keeper=self.keeper).forward()
        except Mismatch:
            before.restore()
            return self.plainly(*args, **kwargs)

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Under what the plan for a call is found: that of a call which is at least as large, if there is one."""
        if self.settings.replays and self.varying is None:
            same = key_of(self.model, args, kwargs, self.device if self.keeper is not None else None)
            try:
                return self.versions.find(same)
            except VaryingError as error:
                self.leave_recordings(error.what)
        size = CallSize.of(args, kwargs, self._parameters.trained(self.model), self.device.type)
        if size in self.admitted:
            return size
        if (known := self.covering.get(size)) is None or known not in self.admitted:
            free = self.settings.budget_bytes is None
            known = next((k for k in self.admitted if isinstance(k, CallSize) and (free or k.covers(size))), size)
            self.covering[size] = known
        return known

    def leave_recordings(self, what: str) -> None:
        """Something changes in every call: plan anew, for the model's own code alone."""
        warnings.warn(
            f"outcore: {what} changes in every call, so this model runs its own code, without CUDA graphs and merged "
            "calls; keep that out of forward, or give it to forward as a tensor, to have them",
            stacklevel=5,
        )
        self.varying, self.settings = what, replace(self.settings, graphs=False, fuse=False)
        self.admitted.clear()

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model."""
        return self._parameters.of(self.model)

    def watched(self, key: Hashable, entry: PlannedCall) -> bool:
        """Whether steps that run as they are have something to tell."""
        asked = self.settings.budget_bytes is not None or key in self.ab_test.waiting
        return asked and entry.observer is not None

    @property
    def windowed(self) -> bool:
        """Whether parameters pass through a window, in which modules that run as they are would hold what they read
        until they are over."""
        return self.keeper is not None and self.keeper.windowed

    def plainly(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward, every value kept."""
        if self.keeper is None:
            return self.original(*args, **kwargs)
        with self.keeper.hooked(), self.keeper.answering():
            return self.original(*args, **kwargs)

    @property
    def original(self) -> Callable[..., Any]:
        """The model's own forward."""
        if self.inner is not None:
            return self.inner
        own: Callable[..., Any] = type(self.model).forward.__get__(self.model)
        return own

    @property
    def __code__(self) -> Any:
        """Of the model's own forward: torch.export reads it to name a frame."""
        return inspect.unwrap(getattr(self.original, "__func__", self.original)).__code__

    @property
    def plan(self) -> MemoryPlan:
        """The plan of the first way of calling the model."""
        return next(entry.plan for entry in self.admitted.values() if entry is not None)

    def admit(
        self,
        key: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        graph: Graph | None = None,
        found: CallProposal | None = None,
        near: MemoryPlan | None = None,
    ) -> None:
        """Record and plan a way of calling the model, as far as that is not done yet; `near` is its plan before."""
        if is_sharded(self.model):  # other ranks may have met this call before, and would not help to gather
            warnings.warn(f"outcore runs this call as plain PyTorch: {NOT_GATHERED}", stacklevel=3)
            self.admitted[key] = None
            return
        try:
            with self.suspended(), planning():
                graph = graph or recorded(self.model, args, kwargs, self.settings.order.inside)
        except CaptureError as error:
            warnings.warn(f"outcore runs this call as plain PyTorch: {error}", stacklevel=3)
            self.admitted[key] = None
            self.note_reads(key, None)
            return
        recording = graph.recording
        self.note_reads(key, recording.reads)
        if not any(v.requires_grad for v in map(graph.values.get, graph.outputs) if v):
            self.admitted[key] = None
            return
        first = self.plan if any(self.admitted.values()) else None
        # The model's own hooks run around this, and are in the recording too.
        replays = self.settings.replays and self.varying is None and recording.is_pure and not hooks_of(self.model)
        settings = self.settings if replays else replace(self.settings, fuse=False)
        found = found or propose(
            graph,
            self.model,
            self.costs_of(graph),
            settings,
            self.device,
            first,
            inherited=self.inherited,
            near=near or self.near,
        )
        plan = found.plan
        table = compile_policies(
            found.graph,
            self.model,
            plan.keeping.buffers,
            plan.script,
            reassociated=self.settings.reassociated,
            chunked=plan.chunked,
        )
        compiled = None
        if replays and plan.chunked is None:
            compiled = prepare(
                found.graph,
                found.graph.recording,
                self.model,
                plan.keeping.buffers,
                plan.script,
                reassociated=self.settings.reassociated,
                fused=found.fused,
            )
        entry = self.admitted[key] = PlannedCall(plan, table, compiled)
        if self.settings.graphs and (self.device.type != "cuda" or compiled is None or not StepGraph.can(compiled)):
            warnings.warn("outcore: this step cannot be a CUDA graph; it runs call by call", stacklevel=3)
        elif self.settings.graphs and compiled is not None:
            other = next((e.graphed for e in self.admitted.values() if e is not None and e.graphed is not None), None)
            entry.graphed, entry.idle = StepGraph(compiled, self.model, other), False
        if entry.graphed is None:
            self.make_room(table.offloaded_bytes)
        if not self.settings.graphs:
            costs = plan.keeping.costs
            state = self.settings.optimizer.state_bytes(costs.parameters)
            entry.observer = PeakMonitor(self.model, state, costs.library_bytes, meter_for(self.device))
            if found.fused.ab_tested and self.costs is not None:
                entry.library_s = found.library_s

    def note_reads(self, key: Hashable, reads: Snapshot | None) -> None:
        """Remember what a recording has read, if it may run in the model's place."""
        if self.settings.replays and self.varying is None and isinstance(key, tuple):
            for old in self.versions.add(key, reads):
                self.admitted.pop(old, None)

    def costs_of(self, graph: Graph) -> Costs:
        """Costs of a graph: those that were measured, or scaled from them, or from bytes alone."""
        with self.suspended():
            if self.costs is not None and self.costs.belong_to(graph):
                return self.costs
            found = account(graph)
            return scaled(found, self.costs) if self.costs is not None else by_bytes(found, memory_rate(self.device))

    def make_room(self, size: int) -> None:
        """Have a tier with room for so many bytes."""
        if size > self.tier_bytes or (size and self.tier is None):
            old = self.tier
            self.tier, self.tier_bytes = tier_for(self.device, size), size
            del old  # passes that are under way still hold it

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        if self.keeper is not None:
            return self.keeper.device
        first: torch.Tensor | None = self._parameters.first()
        if first is None:
            first = next(itertools.chain(self.parameters(), self.model.buffers()), None)
        return first.device if first is not None else torch.device("cpu")

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """The model as it was."""
        attributes = self.model.__dict__
        here = attributes.pop("forward", None)
        if self.inner is not None:
            attributes["forward"] = self.inner
        try:
            with self.keeper.gathered() if self.keeper is not None else contextlib.nullcontext():
                yield
        finally:
            attributes.pop("forward", None)
            if here is not None:
                attributes["forward"] = here

    def __getstate__(self) -> dict[str, Any]:
        device = self.device if self.keeper is not None else self.elsewhere
        return {
            "model": self.model,
            "settings": self.settings,
            "costs": self.costs,
            "inner": self.inner,
            "elsewhere": device,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        elsewhere = state.pop("elsewhere", None)
        self.__init__(**state)  # type: ignore[misc]
        self.elsewhere, self.inherited = elsewhere, True


@torch._disable_dynamo  # type: ignore[attr-defined]
def _call_by_call(managed_forward: ManagedForward, *args: Any, **kwargs: Any) -> Any:
    """Training under `torch.compile`: a compiler would keep what it likes, so the budget goes first."""
    warnings.warn(
        "outcore: this model trains within its budget call by call, and torch.compile around it has no effect on that; "
        "compile parts inside it, or outcore.release it",
        stacklevel=2,
    )
    return managed_forward.called(*args, **kwargs)
