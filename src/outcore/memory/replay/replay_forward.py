"""One forward pass under policies.

The recording is replayed as it is, with hooks on what autograd saves. A hook is called in the middle of an operation,
when its result has no name yet, so handles are collected and given to their cells when the operation is over. A saved
tensor is recognised by its storage; the addresses are forgotten when a buffer is released, before they can be used
again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outcore.graph.record.recording import Step, Tape, fill
from outcore.graph.strides import same_layout
from outcore.memory.offload.backends import Backend
from outcore.memory.param_offload.buckets import BucketTensor
from outcore.memory.replay.compile_policies import CompiledRecording, ReplayBufferPlan
from outcore.memory.replay.replay_buffer import (
    BackwardProgress,
    Geometry,
    ReplayBuffer,
    SavedHandle,
    is_lazy_view,
    over,
    unpack,
)
from outcore.memory.replay.replay_recompute import States, generator_states
from outcore.memory.saved_tensors.recompute_batch_norm import BatchNormCall, Statistics

if TYPE_CHECKING:
    from outcore.memory.param_offload.offloader import StateOffloader

_ORDINARY = (torch.Tensor, nn.Parameter)
_NOTHING = contextlib.nullcontext()


class ReplayPass(BackwardProgress):
    """What backward needs to know of one forward pass; lives as long as a cell of it."""

    def __init__(
        self,
        compiled: CompiledRecording,
        model: nn.Module,
        tensors: Iterable[torch.Tensor],
        tier: Backend | None,
        perform: Callable[[Tape, Step], None] = Tape.step,
        keeper: StateOffloader | None = None,
    ) -> None:
        super().__init__(len(compiled.positions), compiled.released_late, compiled.fetched)
        recording = compiled.recording
        self.compiled, self.model, self.tier, self.keeper = compiled, model, tier, keeper
        self.constants, self.geometry = recording.constants, compiled.geometry
        given = dict(zip(recording.inputs, tensors, strict=True))
        self.inputs = {n: (t.detach(), t._version) for n, t in given.items() if n in compiled.inputs}
        self.states: dict[str, States] = {}
        """Call -> states of its generators before it."""
        self.statistics: dict[str, Statistics] = {}
        """Norm -> its statistics, for recomputing it."""
        self._tape = _Tape(self, given, perform if keeper is None else keeper.perform)

    def forward(self) -> Any:
        """Run the model; returns what it returns."""
        tape, recording = self._tape, self.compiled.recording
        del self._tape
        try:
            tape.run(recording.steps, recording.ambient)
            return fill(recording.result, tape.get)
        finally:
            tape.forget()

    def given(self) -> dict[str, torch.Tensor]:
        """The inputs of the model, for what is recomputed from them."""
        for name, (tensor, version) in self.inputs.items():
            if tensor._version != version:
                raise RuntimeError(
                    f"the input {name} has been modified between forward and backward; backward needs it"
                )
        views = self.compiled.views.items()
        return {name: tensor for name, (tensor, _) in self.inputs.items()} | {
            name: over(self.inputs[base][0], self.geometry[name]) for name, base in views
        }

    def recompute_norm(self, norm: BatchNormCall | None, values: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Recompute a batch norm from its own statistics, where that is known to give the same numbers."""
        if norm is None or (statistics := self.statistics.get(norm.call)) is None:
            return None
        return self.compiled.renorm.run(norm, values[norm.input], statistics)


class _Tape(Tape):
    """Replays the steps, and does after each what the policies say."""

    def __init__(
        self, owner: ReplayPass, values: dict[str, torch.Tensor], perform: Callable[[Tape, Step], None]
    ) -> None:
        super().__init__(owner.model, owner.constants, values)
        self.perform = perform
        """Runs one step; a caller that needs more done around it passes its own."""
        self.owner, self.compiled = owner, owner.compiled
        self.cells: dict[str, ReplayBuffer] = {}
        self.plans: dict[str, ReplayBufferPlan] = {}
        self.at: dict[int, ReplayBuffer] = {}
        """Address of a storage -> the cell of what is in it."""
        self.pending: list[SavedHandle] = []
        self.hooks: contextlib.AbstractContextManager[None] = self.hooked()
        """Around the calls for which there is something to do; what others save stays with autograd, which is
        faster."""

    def hooked(self) -> contextlib.AbstractContextManager[None]:
        """Hooks that replace what autograd saves by handles."""
        keeper = self.owner.keeper

        def pack(tensor: torch.Tensor) -> Any:
            if type(tensor) not in _ORDINARY or tensor.layout is not torch.strided or is_lazy_view(tensor):
                return tensor.detach()
            if keeper is not None and (handle := keeper.claim(tensor)) is not None:
                self.pending.append(handle)  # it counts among what the call saves
                return handle
            handle = SavedHandle(tensor)
            self.pending.append(handle)
            return handle

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def forget(self) -> None:
        """Drop all references, so that only autograd holds the cells (torch may hold the hooks, and with them this
        tape)."""
        for table in (self.cells, self.at, self.plans, self.values):
            table.clear()
        self.pending.clear()
        self.hooks = _NOTHING  # they hold this tape

    def step(self, step: Step) -> None:
        """Run one step."""
        compiled, name = self.compiled, step.name
        step = compiled.instead.get(name, step)
        if name not in compiled.busy:
            with self.hooks if self.owner.keeper is not None else _NOTHING:
                self.perform(self, step)
            self.pending.clear()
            return
        if name in compiled.random:
            self.owner.states[name] = generator_states(*fill((step.args, step.kwargs), self.get))
        drop, step_ = step.drop, step
        if name in compiled.births:  # its outputs must be seen before they are dropped
            step_ = _without_drops(step)
        with self.hooks:
            self.perform(self, step_)
        if (norm := compiled.norms.get(name)) is not None:
            self.note(norm)
        for value, plan in compiled.births.get(name, ()):
            self.bear(value, plan)
        if name in compiled.stops:
            made = (*step.outputs, *(new for new, _ in step.rebinds))
            self.owner.stop_before(compiled.positions[name], [self.values[v] for v in made if v in self.values])
        if step_ is not step:
            for value in drop:
                del self.values[value]
        for value in (*step.outputs, *(new for new, _ in step.rebinds)):
            if value in compiled.noted and value not in compiled.geometry and value in self.values:
                compiled.geometry[value] = Geometry.of(self.values[value])
        if self.pending:
            self.settle(name)
        for buffer in compiled.counted.get(name, ()):
            self.cells[buffer].count()
        for buffer in compiled.leaving.get(name, ()):
            self.leave(buffer)
        for buffer in compiled.released.get(name, ()):
            if (cell := self.cells.get(buffer)) is not None:
                cell.left()

    def note(self, norm: BatchNormCall) -> None:
        """Keep the statistics of a norm that has run and will be recomputed."""
        saved = [h.tensor for h in self.pending if h.tensor is not None]
        found = self.compiled.renorm.statistics(norm, self.values[norm.input], self.values[norm.output], saved)
        if found is not None:
            self.owner.statistics[norm.call] = found

    def bear(self, value: str, plan: ReplayBufferPlan) -> None:
        """Create the cell of a buffer that was just made."""
        tensor = self.values[value]
        self.compiled.geometry.setdefault(value, Geometry.of(tensor))
        cell = self.cells[value] = self.cell(plan)
        self.plans[value] = plan
        cell.born(tensor)
        self.at[tensor.untyped_storage().data_ptr()] = cell

    def cell(self, plan: ReplayBufferPlan) -> ReplayBuffer:
        """The cell of a plan."""
        cell = ReplayBuffer(
            plan.buffer,
            plan.policy,
            self.owner,
            dependents=plan.dependents,
            rerun=plan.rerun,
            window=plan.window,
        )
        if plan.policy.offloads:
            self.owner.waiting[plan.buffer] = weakref.ref(cell)
        return cell

    def settle(self, name: str) -> None:
        """Give the handles of a step to their cells."""
        position = self.compiled.positions[name]
        plans, shapes = self.compiled.derived.get(name), self.compiled.shape_only.get(name, ())
        seen: dict[int, int] = {}
        made: dict[int, ReplayBuffer] = {}
        for handle in self.pending:
            tensor = handle.tensor
            if isinstance(handle, BucketTensor):
                seen.setdefault(id(handle.member), len(seen))
                continue
            assert tensor is not None
            address = tensor.untyped_storage().data_ptr()
            if (cell := self.at.get(address)) is not None:
                if cell.name in shapes:
                    handle.keep_shape(cell)
                else:
                    handle.point_to(cell, position)
            if plans is not None:
                place = seen.setdefault(address, len(seen))
                plan = plans.get(place)
                # What an operation derives is predicted on fake tensors; where it saves something else, that is kept.
                if cell is None and plan is not None and self.as_predicted(plan, tensor):
                    if address not in made:
                        made[address] = self.cells[plan.buffer] = self.cell(plan)
                        made[address].born(tensor)
                        made[address].sources = {value: self.cells[s] for value, s in plan.sources.items()}
                        made[address].version = handle.version
                    # Parts of one piece may count their versions each for itself (cuDNN's weights do).
                    version = made[address].version
                    handle.point_to(made[address], position)
                    made[address].version = version
        self.pending.clear()
        for cell in made.values():
            cell.leave(self.owner.tier)

    def as_predicted(self, plan: ReplayBufferPlan, tensor: torch.Tensor) -> bool:
        """Whether a derived tensor is the one that was predicted, and can be restored as planned."""
        if tensor.untyped_storage().nbytes() != plan.bytes:
            return False
        if plan.rerun is None:
            return True
        known = self.compiled.like_source
        if plan.buffer not in known:
            (value,) = (*plan.sources, *plan.inputs)
            source = self.owner.geometry.get(value) or Geometry.of(self.owner.inputs[value][0])
            cast = torch.empty_like(torch.empty_strided(source.size, source.stride, device="meta"))
            alike = tensor.shape == cast.shape and same_layout(cast.shape, tensor.stride(), cast.stride())
            flat = tensor.numel() == cast.numel() and tensor.is_contiguous() and cast.is_contiguous()
            known[plan.buffer] = tensor.storage_offset() == 0 and (alike or flat)
        return known[plan.buffer]

    def leave(self, buffer: str) -> None:
        """Handle a buffer after its last use in forward."""
        cell = self.cells[buffer]
        if cell.memory is not None:
            address = cell.memory.untyped_storage().data_ptr()
            if self.at.get(address) is cell:  # another may be there by now, where two calls were fused
                del self.at[address]
        # Only now: what is written into it in place may be made after it was.
        cell.sources = {value: self.cells[source] for value, source in self.plans[buffer].sources.items()}
        cell.leave(self.owner.tier)


def _without_drops(step: Step) -> Step:
    return Step(
        step.name,
        step.kind,
        step.target,
        step.args,
        step.kwargs,
        step.context,
        step.outputs,
        step.rebinds,
        step.shapes,
        step.answer,
    )
