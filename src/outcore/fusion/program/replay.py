"""The replay of a program for several members: every step once, on stacked values.

A step finds its inputs as they are, one tensor for all members or one with the members stacked in front, and the rules
(`outcore.fusion.rules`) run it for all. Three kinds of step need more care than that, and get it here: one that writes
(its out-of-place form runs, or a copy is written into), one whose arguments differ from member to member, and one in a
chain, whose work a norm does along with its own (`outcore.fusion.program.batch_norm_chain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from outcore.fusion.program.batch_norm_chain import BatchNormChain, pays
from outcore.fusion.program.call import FusedCall, MemberRandomness
from outcore.fusion.program.values import Stacked, UnjoinedConcat, is_repeated
from outcore.fusion.rules import norm_in_one_pass, run, writes_nothing
from outcore.fusion.stack import Stack
from outcore.fusion.training import MemberTraining
from outcore.graph.record.recording import Recording, Ref, Step, Tape, fill
from outcore.graph.structure import leaves
from outcore.ops.traits import out_of_place

if TYPE_CHECKING:
    from outcore.fusion.program.program import StackedProgram


class StackedTape(Tape):
    """The values of a replay for several members, and how each step makes them."""

    def __init__(
        self,
        program: StackedProgram,
        members: Sequence[MemberTraining],
        stack: Stack,
        values: dict[str, Any],
        randomness: MemberRandomness,
        first: int,
    ) -> None:
        super().__init__(members[0], program.recording.constants, values)
        self.program, self.members, self.stack = program, members, stack
        self.randomness, self.first = randomness, first
        self.count = len(members)
        self.unfused = program.unfused
        self.chained: dict[BatchNormChain, bool] = {}
        """Whether the calls of a chain run as one."""
        self.largest: dict[BatchNormChain, Any] = {}
        """For chains that end in a maximum: the values and their indices."""
        self.device = next((t.device for t in stack.parameters.values()), torch.device("cpu"))

    def step(self, step: Step) -> None:
        """Run one step for all members."""
        if step.kind == "guard":
            return  # its answer is always the same, or the program would have an obstacle
        target, kwargs = self._without_writing(step)
        call = FusedCall(
            name=step.name,
            members=self.count,
            first=self.first,
            target=target,
            args=tuple(fill(a, self.get) for a in step.args),
            kwargs={k: fill(v, self.get) for k, v in kwargs.items()},
            randomness=self.randomness,
            ways=self.program.ways,
            kept=self.program.kept,
            written=self.program.written,
            outputs=step.outputs,
        )
        if step.kind == "module":
            call.modules = tuple(attrgetter(step.target)(m) for m in self.members)
            call.target = type(call.modules[0])
            call.state = self._state_of(step.target, call.modules[0])
        if step.name in self.program.differing:
            call.per_member_args = tuple(self._arguments(step, b) for b in range(self.count))
        if (chain := self._chain(step)) is not None:
            result = self._in_chain(step, chain, call)
        elif (joined := self._left_apart(step, call)) is not None:
            result = joined
        elif self._unfused(step.name) and call.varies:
            result = call.one_by_one()
        else:
            result = run(call)
        for name, (_, value) in zip(step.outputs, leaves(result, (torch.Tensor, Stacked, UnjoinedConcat)), strict=True):
            self.values[name] = value
        for new, old in step.rebinds:
            self.values[new] = self.values[old]
        for name in step.drop:
            self.values.pop(name, None)

    def _left_apart(self, step: Step, call: FusedCall) -> UnjoinedConcat | None:
        """The parts of a value that only a 1x1 convolution reads, where concatenating them would repeat one of them."""
        reader = self.program.joins.get(step.name)
        if reader is None or any(name in self.program.differing or self._unfused(name) for name in (step.name, reader)):
            return None
        parts = tuple(call.args[0] if call.args else call.kwargs["tensors"])
        if not all(isinstance(part, Stacked) for part in parts) or len({is_repeated(part) for part in parts}) == 1:
            return None
        call.note("fused")
        return UnjoinedConcat(parts)

    def _unfused(self, name: str) -> bool:
        block = name.removeprefix("model.")
        return any(block.startswith((f"{path}.", f"{path}#")) for path in self.unfused)

    def _chain(self, step: Step) -> BatchNormChain | None:
        """The chain a step runs in, if its calls run as one."""
        chain = self.program.chains.get(step.name)
        if chain is None:
            return None
        if chain not in self.chained:
            modules = [attrgetter(chain.path)(m) for m in self.members]
            state = list(self._state_of(chain.path, modules[0]).values())
            state += [self._state(chain.bias)] if chain.bias is not None else []
            apart = any(name in self.program.differing or self._unfused(name) for name in chain.calls)
            self.chained[chain] = not apart and pays(modules, state, self.device)
        return chain if self.chained[chain] else None

    def _in_chain(self, step: Step, chain: BatchNormChain, call: FusedCall) -> Any:
        """The result of one call of a chain: a convolution without its bias, the norm, or what the norm computed with
        it."""
        if step.name == chain.convolution:
            call.state = {**call.state, "bias": None}
            return run(call)
        if step.name == chain.norm:
            bias = None if chain.bias is None else self._state(chain.bias)
            with_relu, with_maximum = chain.relu is not None, chain.largest is not None
            made = norm_in_one_pass(call, bias, relu=with_relu, largest=with_maximum)
            if isinstance(made, tuple):
                self.largest[chain] = made
            return made[0] if isinstance(made, tuple) else made
        if step.name == chain.largest and chain not in self.largest:
            return run(call)
        call.note("fused")
        if step.name == chain.largest:
            return self.largest.pop(chain)
        return call.args[0] if call.args else call.kwargs["input"]

    def _without_writing(self, step: Step) -> tuple[Any, dict[str, Any]]:
        """Run a step that writes a value in its out-of-place form, or on a copy."""
        mutates = self.program.graph.calls[step.name].mutates
        if not mutates or self.program.state_values.issuperset(mutates):
            return step.target, step.kwargs
        if step.kind == "function":
            target = out_of_place(step.target)
            kwargs = {k: (False if k == "inplace" else v) for k, v in step.kwargs.items()}
            if target is not step.target or kwargs != step.kwargs:
                return target, kwargs
        elif writes_nothing(attrgetter(step.target)(self.model)):
            return step.target, step.kwargs
        for name in mutates:
            values: dict[str, Any] = self.values
            value = values[name]
            if isinstance(value, Stacked):
                values[name] = Stacked(value.tensor.clone())
            else:
                values[name] = Stacked(value.unsqueeze(0).expand(self.count, *value.shape).clone())
        return step.target, step.kwargs

    def get(self, ref: Ref) -> Any:
        """The value of a reference: a shared tensor, or the stacked one of all members."""
        if ref.kind == "state":
            return self._state(ref.name)
        if ref.kind == "constant" and self.program.others:
            return self._constant(ref.name)
        return super().get(ref)

    def _state(self, name: str) -> Any:
        own = name.removeprefix("model.")
        if own == name or own not in self.stack:
            return super().get(Ref("state", name))
        return Stacked(self.stack[own])

    def _state_of(self, path: str, module: nn.Module) -> dict[str, Any]:
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return {name: self._state(f"{path}.{name}") for name, _ in named}

    def _constant(self, name: str) -> Any:
        each = [self._recording(b).constants[name] for b in range(self.count)]
        if all(t is each[0] or (t.shape == each[0].shape and torch.equal(t, each[0])) for t in each[1:]):
            return each[0]
        return Stacked(torch.stack(each))

    def _arguments(self, step: Step, slot: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        index = self.program.recording.steps.index(step)
        own = self._recording(slot).steps[index]
        return tuple(fill(a, self.get) for a in own.args), {k: fill(v, self.get) for k, v in own.kwargs.items()}

    def _recording(self, slot: int) -> Recording:
        return self.program.others.get(self.first + slot, self.program.recording)
