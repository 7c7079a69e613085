"""The forward that stands in a model's place when it is compiled within a budget.

A model is compiled for each way of calling it: shapes, types, mode, autocast, and whether gradients are wanted. When it
comes under its plan, steps are taken with the user's own batch, as for plans that are not compiled
(`outcore.memory.saved_tensors.trial_steps`), and the model is put back as it was. If a step takes more than the
budget, the difference is left free and the model compiled again, at most three times; if it still does not fit, or no
choice is within the budget, that is refused with the smallest that would do. What cannot be compiled at all raises
`CompilationError`, and the caller goes on without.

Inductor's cache of compiled kernels works as ever. AOTAutograd's cache, which would skip the partitioner and so the
plan, is off while a model is compiled.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from outcore.allocator.process_limit import has_limit
from outcore.compiled.discard import discard, recorded_functions
from outcore.compiled.joint_graph import Rates
from outcore.compiled.lifetimes import StepOfGraph
from outcore.compiled.micro_batch.sample_wise import SampleWise, samples_of
from outcore.compiled.offload_ops import Reservation
from outcore.compiled.pieces import Piece, PieceChooser, peak_of, seconds_of, smaller, within
from outcore.compiled.plan import CompiledPlan
from outcore.compiled.reserved import Allocator
from outcore.compiled.room import Room, library_bytes, refusal, room_of
from outcore.compiled.settings import CompileSettings
from outcore.compiled.torch_partitioner import (
    CompilationError,
    Partitioner,
    TracedStep,
    compile_planned,
    compiling,
    without_autograd_cache,
)
from outcore.compiled.trial_step import Tried, try_step, with_content
from outcore.errors import OutcoreError, PlanError
from outcore.graph.structure import device_of, leaves, substitute
from outcore.memory.cuda_graphs.pool import grow_segments_from_now_on
from outcore.memory.cuda_graphs.static_grads import GraphGradients
from outcore.memory.saved_tensors.live_forward import is_looked_at

__all__ = ["CompiledEntry", "CompiledForward"]

_COMPILATIONS = 4
_AS_PLANNED = {"layout_optimization": False, "reorder_for_peak_memory": False, "allow_buffer_reuse": False}
"""Inductor's options where values leave the device: copies stay where they were planned to be; values are laid out as
the traced graph has them, which is how the backward expects them back; and memory is given back between a buffer and
the next one of its size, so that what comes back finds it."""
_GRANULE = 20 * 2**20
"""Segments grow by this: what is left free, at most a hundredth of the budget, for steps that were not tried."""
_CLOSE = 0.97
"""Of what is left by proportion, how much to choose for."""
_NO_ROOM = 0.1
"""What a step that did not fit on the device at all is taken to need, beyond the budget."""
_HOLES = 0.2
"""Of what a step took too much, how much more to leave: holes between buffers do not shrink with the plan."""
_FASTER = 0.97
"""What a step must take over another, by prediction, to be compiled in its place."""


@dataclass
class CompiledEntry:
    """One way of calling the model."""

    run: Callable[..., Any]
    chooser: PieceChooser
    partitioner: Partitioner
    ready: bool = False
    recorded: frozenset[Hashable] = frozenset()
    """Its functions that are CUDA graphs."""


class CompiledForward:
    """Runs the model's forward as compiled pieces."""

    def __init__(
        self,
        model: nn.Module,
        inner: Callable[..., Any] | None,
        settings: CompileSettings,
        device: torch.device | None = None,
    ) -> None:
        self.model, self.own_inner, self.settings = model, inner, settings
        if device is None:
            device = device_of(model)
        self.device = device
        self.as_graphs = settings.graphs and self.device.type == "cuda"
        self.offloads = settings.offload and settings.budget_bytes is not None and not self.as_graphs
        self.reservation = Reservation(self.device)
        self.gradients = GraphGradients()
        self.entries: dict[Hashable, CompiledEntry] = {}
        self.corrected_bytes = 0
        self.compile_s = 0.0
        self.least_seen: int | None = None
        """The smallest budget in which a step that was tried would have fitted."""
        self.measured_bytes: int | None = None
        self.measured_s: float | None = None
        self.plan: CompiledPlan | None = None
        self.skipped = 0
        """Graphs that torch.compile could not record."""
        self.samples: SampleWise | None = None
        """The forward of the whole batch, where every sample is for itself."""
        self.seen: list[Piece] = []
        """The pieces of the last attempt."""
        self.given: list[torch.Tensor] = []
        self.before: dict[str, Any] = {}
        """What stood in the model's attributes, to be put back."""

    @functools.cached_property
    def rates(self) -> Rates:
        """How fast the device computes and copies."""
        found = Rates.of(self.device, link=self.offloads)
        return replace(found, host_s=0.0) if self.as_graphs else found

    @functools.cached_property
    def allocator(self) -> Allocator | None:
        """A model of the GPU's allocator, because what it reserves counts against the budget; None on a CPU."""
        if self.device.type != "cuda":
            return None
        copies = round(self.settings.optimizer.state_per_parameter)
        state = tuple(p.nbytes for p in self.model.parameters() if p.requires_grad for _ in range(copies))
        workspaces = (library_bytes(self.device),) * 2
        return Allocator(workspaces, state, self.settings.loss_bytes, limited=has_limit(self.device))

    @functools.cached_property
    def inner(self) -> Callable[..., Any]:
        """What is compiled: the model's forward as it was."""
        if self.own_inner is not None:
            return self.own_inner
        wrapped = getattr(self.model, "_orig_mod", None)
        if isinstance(wrapped, nn.Module):  # called, with its hooks; torch.compile does not trace a module's own call
            return lambda *args, **kwargs: wrapped(*args, **kwargs)
        return cast("Callable[..., Any]", type(self.model).forward.__get__(self.model))

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the model and models that are stored: they are compiled when they are called first."""
        names = ("model", "own_inner", "device", "plan", "before", "corrected_bytes")
        settings = replace(self.settings, loss=None)  # it was for trials, and may be a function that cannot be stored
        return {name: self.__dict__[name] for name in names} | {"settings": settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*(state[name] for name in ("model", "own_inner", "settings", "device")))  # type: ignore[misc]
        self.plan, self.before, self.corrected_bytes = state["plan"], state["before"], state["corrected_bytes"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            return _not_traced(self, *args, **kwargs)
        if is_looked_at():
            return self.inner(*args, **kwargs)
        key = self.key(args, kwargs)
        entry = self.entries.get(key)
        if entry is None:
            self._refuse_sharded_blocks()
            copies = True if self.plan is not None and self.plan.offloaded_bytes else None
            entry = self.entries[key] = self.entry(self.budget(self.room(args, kwargs)), copies=copies)
            entry.chooser.ends = False  # this is a step of training
        if entry.ready:
            with without_autograd_cache():
                return self._run(entry, args, kwargs)
        before = recorded_functions(self.device)
        with compiling():
            output = self._run(entry, args, kwargs)
        entry.recorded |= recorded_functions(self.device) - before
        entry.ready = True
        entry.chooser.restart()
        return output

    def _run(self, entry: CompiledEntry, args: Any, kwargs: Any) -> Any:
        """A forward. What the loop may keep of CUDA graphs, which the next step overwrites, gets its own memory."""
        if not self.as_graphs:
            return entry.run(*args, **kwargs)
        self.gradients.keep()
        output = substitute(entry.run(*args, **kwargs), torch.Tensor, torch.Tensor.clone)
        if torch.is_grad_enabled():
            inputs = [t for _, t in leaves((args, kwargs), torch.Tensor) if t.requires_grad and t.is_leaf]
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.gradients.watch([t for _, t in leaves(output, torch.Tensor)], [*trained, *inputs])
        return output

    def _refuse_sharded_blocks(self) -> None:
        """The backward of one compiled graph needs all parameters at once; blocks that are sharded have theirs in turn,
        so that here, inside the model's own forward, they are still in shards."""
        if any(hasattr(parameter, "device_mesh") for parameter in self.model.parameters()):
            raise OutcoreError(
                "blocks of this model were sharded one by one after outcore.within(..., compile=True); call "
                "outcore.within on each of these blocks before fully_shard, or shard the model as a whole"
            )

    def key(self, args: Any, kwargs: Any) -> Hashable:
        """What a compiled forward depends on of a call."""
        kind = self.device.type
        shapes = tuple(
            (p, t.shape, t.stride(), t.dtype, t.requires_grad) for p, t in leaves((args, kwargs), torch.Tensor)
        )
        modes = hash(tuple((module.training, type(module)) for module in self.model.modules()))
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return shapes, modes, torch.is_grad_enabled(), cast

    def entry(
        self, budget_bytes: int | None, known: list[Piece] | None = None, *, copies: bool | None = False
    ) -> CompiledEntry:
        """The model, to be compiled when it is called first.

        Args:
            budget_bytes: what is left for the values of a step.
            known: pieces of a compilation before, with what was chosen for them.
            copies: whether values may leave the device; none for only if nothing else is within the budget.
        """
        head = self.settings.head
        beside = self.settings.loss_bytes if head is None else head.held_bytes
        chooser = PieceChooser(budget_bytes, self.rates, known or (), beside, self.reservation, copies, self.allocator)
        options = dict(self.settings.options) | ({"triton.cudagraphs": True} if self.as_graphs else {})
        options |= _AS_PLANNED if copies else {}
        chooser.look = self._look_for_samples if known is None or not known else None
        partitioner = Partitioner(chooser)
        run = compile_planned(self.inner, partitioner, kernels=self.settings.kernels, head=head, **options)
        return CompiledEntry(run, chooser, partitioner)

    def _look_for_samples(self, partition: TracedStep) -> None:
        """Note whether every sample is for itself, in case that the batch has to be divided."""
        self.samples = samples_of(partition, self.given, (*self.model.parameters(), *self.model.buffers()))

    def discard(self, entry: CompiledEntry | None = None) -> None:
        """Give back what was compiled for one way of calling the model, or for all."""
        for each in list(self.entries.values()) if entry is None else [entry]:
            discard(each.partitioner, self.device, each.recorded)
        if entry is None:
            self.entries.clear()

    def room(self, args: Any, kwargs: Any) -> Room:
        """The memory of a call that is not the values of a step: weights, arguments, optimizer, workspaces."""
        return room_of(self.model, args, kwargs, self.settings.optimizer, self.device, graphs=self.as_graphs)

    def budget(self, room: Room) -> int | None:
        """Bytes of the budget that the values of a step may take; None without a budget."""
        budget = self.settings.budget_bytes
        return None if budget is None else room.left(budget, self.corrected_bytes)

    def compile_first(self, args: Any, kwargs: Any) -> CompiledPlan:
        """Compile for the first call, try a step, and correct.

        Raises:
            CompilationError: torch.compile cannot do it.
            PlanError: the budget is too small.
        """
        args, kwargs = with_content(args, kwargs, self.device)
        self.given = [tensor for _, tensor in leaves((args, kwargs), torch.Tensor)]
        room = self.room(args, kwargs)
        own, budget = room.own_bytes, self.settings.budget_bytes
        if budget is not None and own + room.update_bytes > budget:
            raise refusal(budget, own + room.update_bytes, "the weights with their gradients and the optimizer alone")
        if budget is not None and self.device.type == "cuda":
            grow_segments_from_now_on()
        key = self.key(args, kwargs)
        known: list[Piece] = []
        asked: list[Any] = []
        needed = 0
        best: tuple[float, CompiledEntry, CompiledPlan] | None = None
        undecided = None if self.rates.link is not None else False
        spare = min(_GRANULE, (budget or 0) // 100) if self.device.type == "cuda" else 0
        for _ in range(_COMPILATIONS):
            left = self.budget(room)
            try:
                known = (
                    self._next(known, room, asked, needed) if known and best is None else self._together(known, room)
                )
            except PlanError:
                if best is None:
                    raise
                break
            copies = any(p.chosen.ways for p in known) if known else undecided
            entry, tried = self._compiled(left, known, copies, args, kwargs)
            pieces = entry.chooser.pieces
            entry.chooser.restart()
            if not pieces:
                self.discard(entry)
                raise CompilationError("torch.compile found nothing to compile that leads back to parameters")
            known = self.seen = pieces
            asked.append([p.kept for p in known])
            taken = tried.taken_bytes
            needed = tried.needed_bytes + spare if taken is not None else int((1 + _NO_ROOM) * ((budget or 0) - own))
            self.least_seen = min(self.least_seen or sys.maxsize, own + needed)
            self.measured_bytes = None if taken is None else own + taken
            missed = needed - self._reserved([p.chosen for p in known]) - room.fixed_bytes
            fits = taken is not None and own + needed <= (budget or sys.maxsize)
            if fits:
                self.corrected_bytes = min(self.corrected_bytes, max(0, missed))
            plan = self.plan_of(known, room)
            step_s = self.measured_s if self.measured_s is not None else plan.seconds
            if budget is None:
                best = step_s, entry, plan
                break
            worse: CompiledEntry | None = entry
            if fits and (best is None or step_s < best[0]):
                worse, best = best[1] if best is not None else None, (step_s, entry, plan)
            if worse is not None:
                self.discard(worse)
            if best is not None and self.as_graphs:
                break  # what is recorded later in the same memory would make it larger for good
            if best is None:
                over = max(0, own + needed - budget)
                self.corrected_bytes = max(self.corrected_bytes + int(0.01 * budget), missed + int(_HOLES * over))
            elif not self._worthwhile(known, asked, missed, room):
                break
        if best is None:
            assert budget is not None and self.least_seen is not None
            raise refusal(budget, self.least_seen, "the smallest step that was tried")
        _, entry, self.plan = best
        if not self.plan.offloaded_bytes:  # what was only tried gives its room back
            self.reservation = entry.chooser.reservation = Reservation(self.device)
        self.entries[key] = entry
        return self.plan

    def _compiled(
        self, left: int | None, known: list[Piece], copies: bool | None, args: Any, kwargs: Any
    ) -> tuple[CompiledEntry, Tried]:
        """Compile the model for the bytes that are left, and try a step; once more with copies, where it needs them."""
        start = time.perf_counter()
        entry = self.entry(left, known, copies=copies)
        try:
            tried = self._try(entry, args, kwargs)
        except CompilationError:
            if not entry.chooser.needs_copies:
                raise
            entry = self.entry(left, known, copies=True)
            tried = self._try(entry, args, kwargs)
        self.compile_s += time.perf_counter() - start
        return entry, tried

    def _worthwhile(self, known: list[Piece], asked: list[Any], missed: int, room: Room) -> bool:
        """Whether a step that fits should be compiled once more: pieces that were chosen one after the other may do
        better together, and a prediction that was too high has left room."""
        before = self.corrected_bytes
        self.corrected_bytes = missed if missed < 0 else before
        try:
            together = self._together(known, room)
        except PlanError:
            self.corrected_bytes = before
            return False
        gained = sum(p.chosen.seconds for p in together) < _FASTER * sum(p.chosen.seconds for p in known)
        return gained and [p.kept for p in together] not in asked

    def _next(self, known: list[Piece], room: Room, asked: list[Any], needed: int) -> list[Piece]:
        """Choose again after a step that needed too much: with as much less as predictions missed; else smaller in
        proportion, since what libraries take inside of an operation is not added to every peak."""
        budget, left = self.settings.budget_bytes, self.budget(room)
        assert budget is not None and left is not None and self.least_seen is not None
        expected = self._reserved([p.chosen for p in known]) + room.fixed_bytes
        share = (budget - room.own_bytes) / max(1, needed)
        budgets = (left, int(_CLOSE * share * expected) - room.fixed_bytes)
        found = smaller(known, budgets, asked, self.allocator, staying_first=self.device.type != "cuda")
        if found is None:
            raise refusal(budget, self.least_seen, "the smallest step that was tried")
        return found

    def _together(self, known: list[Piece], room: Room) -> list[Piece]:
        """Choose again for pieces that are known."""
        if not known:
            return []
        found = within(known, self.budget(room), self.allocator, staying_first=self.device.type != "cuda")
        if found is None:
            assert self.settings.budget_bytes is not None
            raise refusal(self.settings.budget_bytes, self._least(known, room), "the smallest step that was found")
        return found

    def _least(self, pieces: list[Piece], room: Room) -> int:
        """The smallest budget that would do, with what predictions were seen to miss."""
        return room.least(self._reserved([p.frontier.least for p in pieces]), self.corrected_bytes)

    def _reserved(self, points: list[StepOfGraph]) -> int:
        """Bytes that the allocator reserves for the values of a step whose pieces run by `points`."""
        return peak_of(points) + (0 if self.allocator is None else self.allocator.overhead(points))

    def _try(self, entry: CompiledEntry, args: Any, kwargs: Any) -> Tried:
        """Run a few steps, and return the memory and time they took; on failure the entry is discarded."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(entry, args, kwargs)

        before = recorded_functions(self.device)
        try:
            loss, optimizer = self.settings.loss, self.settings.optimizer
            tried = try_step(self.model, run, args, kwargs, loss, self.device, optimizer, graphs=self.as_graphs)
            entry.recorded |= recorded_functions(self.device) - before
        except OutcoreError:
            entry.recorded |= recorded_functions(self.device) - before
            self.discard(entry)
            raise
        entry.ready = True
        self.measured_s, self.skipped = tried.seconds, tried.skipped
        return tried

    def _step_s(self, points: list[StepOfGraph]) -> float:
        """Predicted seconds of a step whose pieces run by `points`, the optimizer's update included."""
        trained = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        update_s = self.settings.optimizer.traffic_per_parameter * trained / self.rates.bytes_per_s
        return seconds_of(points, update_s)

    def plan_of(self, pieces: list[Piece], room: Room) -> CompiledPlan:
        """What was chosen, and what it takes."""
        own, update = room.own_bytes, room.update_bytes
        chosen, fastest = [p.chosen for p in pieces], [p.fastest for p in pieces]
        return CompiledPlan(
            budget_bytes=self.settings.budget_bytes,
            peak_bytes=own + max(self._reserved(chosen) + room.fixed_bytes + self.corrected_bytes, update),
            fastest_bytes=own + max(self._reserved(fastest) + room.workspace_bytes, update),
            plain_bytes=self.settings.plain_bytes,
            least_bytes=own + max(self._reserved([p.frontier.least for p in pieces]) + room.fixed_bytes, update),
            measured_bytes=self.measured_bytes,
            measured_s=self.measured_s,
            corrected_bytes=self.corrected_bytes,
            seconds=self._step_s(chosen),
            fastest_s=self._step_s(fastest),
            host_s=sum(p.host_s for p in chosen),
            pieces=len(pieces),
            saved_bytes=sum(p.saved_bytes for p in chosen),
            offloaded_bytes=sum(p.offloaded_bytes for p in chosen),
            again=sum(p.again for p in pieces),
            compile_s=self.compile_s,
            chunk_rows=self.settings.head.rows_per_chunk if self.settings.head is not None else None,
            graphs=self.as_graphs and self.skipped == 0,
        )


@torch._disable_dynamo  # type: ignore[attr-defined]
def _not_traced(forward: CompiledForward, *args: Any, **kwargs: Any) -> Any:
    """A model that is compiled once more runs as it was planned."""
    return forward(*args, **kwargs)
