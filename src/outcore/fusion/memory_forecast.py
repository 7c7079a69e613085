"""How many members fit: predicted from the memory of one, before anything is allocated.

Each member keeps its weights and optimizer state all the time; its feature maps and gradients only while it runs.
Members that run at the same time need both, groups that run one after the other share the room for the second. A group
on a stream of its own has a memory pool of its own, and holds what its allocator once reserved.

Where members are fused, a step of the group is tried on fake tensors (`dry_run`). Some layers are not the same when
fused: cuDNN's LSTM saves little, the one that steps through time for all members saves every gate. So the memory of a
group is not that of its members' own graphs; but a replay on fake tensors, with backward, makes and drops exactly the
tensors that the real one will, and counting them takes no device memory. Fed to the simulated allocator, they also give
what a graph with a pool of its own will reserve.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from outcore.allocator.caching_allocator import ReservedBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import FuseError
from outcore.fusion.program.call import MemberRandomness
from outcore.fusion.program.values import Stacked, member_of
from outcore.fusion.runner import cut
from outcore.graph.structure import leaves, substitute
from outcore.machine.units import format_bytes

if TYPE_CHECKING:
    from outcore.fusion.array import FusedArray
    from outcore.fusion.group import Group
    from outcore.fusion.program.program import StackedProgram


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes of one member, and of several."""

    members: int
    resting_bytes: int
    """Weights and optimizer state of one member."""
    running_bytes: int
    """What one member needs in addition while it runs: feature maps, and gradients of both kinds."""
    batch_bytes: int
    group_bytes: int = 0
    """What a group needs in addition, for libraries and for its graph."""
    groups: int = 1
    """How many run at once."""
    width: int | None = None
    """Members that run at once, where it is not all."""

    def peak_bytes(self, members: int | None = None, at_once: int | None = None) -> int:
        """The peak of an array, some or all of whose members run at once."""
        count = self.members if members is None else members
        running = min(at_once or self.width or count, count)
        groups = -(-running * self.groups // self.members)
        return count * self.resting_bytes + running * self.running_bytes + groups * self.group_bytes + self.batch_bytes

    def at_once(self, memory_bytes: int) -> int:
        """How many members can run at the same time if all of them are kept on the device.

        Raises:
            FuseError: not even one can.
        """
        least = self.peak_bytes(at_once=1)
        fitting = [n for n in range(1, self.members + 1) if self.peak_bytes(at_once=n) <= memory_bytes]
        if not fitting:
            kept = (memory_bytes - (least - self.members * self.resting_bytes)) // max(1, self.resting_bytes)
            raise FuseError(
                f"{self.members} members need {least / 2**20:,.0f} MiB or more, there are {memory_bytes / 2**20:,.0f}; "
                f"{max(0, kept)} members would fit: train them in several arrays, or take a smaller batch"
            )
        return fitting[-1]

    def __str__(self) -> str:
        each = format_bytes(self.resting_bytes + self.running_bytes)
        return f"{each} per member, {format_bytes(self.peak_bytes())} for {self.members}"


def forecast(array: FusedArray, *batch: Any, each: Sequence[tuple[Any, ...]] | None = None) -> Forecast:
    """Predict the memory of an array on a batch, as it is arranged: of fused members by a dry run."""
    resting = running = shared = 0
    on_gpu = array.device.type == "cuda"
    args = array.arguments(batch, each)
    group = array.groups[0]
    for name, training in array.slots[0].trainings.items():
        _, program = array.program(name, args)
        graph = program.graph
        optimizer = OptimizerCost.of(array.slots[0].optimizers[name], array.device.type)
        peak = memory_curve(graph, account(graph, array.device.type), optimizer=optimizer).at_peak
        own = _bytes(p for p in training.model.parameters() if p.requires_grad)
        kept = _bytes(training.model.parameters()) + _bytes(training.model.buffers())
        if on_gpu:
            kept += own  # the one-kernel update gathers the gradients in one piece
        resting = max(resting, kept + round(optimizer.state_per_parameter * own))
        needed = own + peak.feature_maps + peak.feature_gradients + peak.workspace
        if (made := _dry_run(array, name, program, args)) is not None:
            needed = -(-(made.reserved if array.way.parallel else made.peak) // len(group))
        if len(group) == 1 and on_gpu and _time_steps(program):
            needed += _RECURRENT_BYTES
        running = max(running, needed)
        shared = max(shared, peak.inputs)
    besides = (_LIBRARY_BYTES + (_STREAM_BYTES if array.way.parallel else 0)) if on_gpu else 0
    if array.way.parallel:
        return Forecast(len(array), resting, running, shared, besides, len(array.groups))
    return Forecast(len(array), resting, running, shared, besides, width=len(group))


_LIBRARY_BYTES = 64 * 2**20
"""Workspace of cuBLAS for a stream of an H200: 32 MiB each for the threads of forward and backward."""
_STREAM_BYTES = 20 * 2**20
"""Fragments that the first steps of a stream, before its graph was captured, leave: 10 to 60 MiB were measured, above
200 where feature maps are of hundreds."""
_RECURRENT_BYTES = 43 * 2**20
"""Workspace of cuDNN's recurrent layers; 38 and 43 MiB were measured."""
_LONG = 256
"""Time steps of recurrent layers beyond which a dry run takes too long."""


def _dry_run(array: FusedArray, name: str, program: StackedProgram, args: tuple[Any, ...]) -> DryRunBytes | None:
    """A step of the first group on fake tensors, where that tells more than the memory model of one member."""
    group = array.groups[0]
    own_model = len(group) == 1
    short = program.obstacle is None and _time_steps(program) <= _LONG
    if not (array.way.parallel if own_model else short):
        return None
    with contextlib.suppress(NotImplementedError, RuntimeError):  # an operation that fake tensors cannot do
        return dry_run(group, name, program, cut(group, args), own_model=own_model)
    return None


def _time_steps(program: StackedProgram) -> int:
    """How often recurrent layers step in a replay."""
    count = 0
    for step in program.recording.steps:
        module = program.members[0].get_submodule(step.target) if step.kind == "module" else None
        if isinstance(module, torch.nn.RNNBase):
            shape = program.graph.values[program.graph.calls[step.name].inputs[0]].shape
            longest = shape[1 if module.batch_first else 0] if len(shape) == 3 else shape[0]
            count += longest * module.num_layers * (2 if module.bidirectional else 1)
    return count


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


@dataclass(frozen=True, slots=True)
class DryRunBytes:
    """Bytes of forward and backward of a group, without its weights, with their gradients."""

    peak: int
    """Of living tensors."""
    reserved: int
    """Of the allocator's segments, if it starts with none."""


def dry_run(
    group: Group, objective: str, program: StackedProgram, args: tuple[Any, ...], *, own_model: bool
) -> DryRunBytes:
    """Count a step of a group; with `own_model`, of one member's own model."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            if isinstance(value, Stacked):
                return Stacked(fake(value.tensor))
            made = mode.from_tensor(value.detach(), static_shapes=True)
            return made.requires_grad_(value.requires_grad)

        stack = copy.copy(group.stack)
        stack.parameters = {name: fake(t) for name, t in group.stack.parameters.items()}
        stack.buffers = {name: fake(t) for name, t in group.stack.buffers.items()}
        given = substitute(args, (Tensor, Stacked), fake)
        tensors = [t for _, t in leaves(given, (Tensor, Stacked))]
        there = [*stack.parameters.values(), *stack.buffers.values(), *(_tensor(t) for t in tensors)]
        views = {first: stack[first][0] for first in stack.names.values()}
        own = {f"model.{name}": views[first] for name, first in stack.names.items()} if own_model else {}
        trained = [n for n in group.steppers[objective].names if stack.parameters[n].requires_grad]
        wanted = [own[f"model.{n}"] if own_model else stack.parameters[n] for n in trained]
        apart = replace(program, ways={}, kept={})  # what is tried on fake tensors must not be remembered
        with ReservedBytes([*there, *own.values()]) as live, group.autocast():
            if own_model:
                loss = functional_call(group.trainings[objective][0], own, member_of(given, 0))[0]
            else:
                made = apart.replay(group.trainings[objective], stack, tensors, MemberRandomness(None), group.first)
                loss = made[0].tensor.sum()
                del made
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            del loss, found
        return DryRunBytes(live.peak, live.allocator.reserved)


def _tensor(value: Tensor | Stacked) -> Tensor:
    return value.tensor if isinstance(value, Stacked) else value
