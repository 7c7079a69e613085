"""A recorded training step of one member, and how to run it for many.

Members of one architecture usually do the very same steps, so one recording stands for all. Where their modules
differ in a number (a dropout rate, a slope), that member is recorded too, and the recordings are laid side by side:
steps must agree; a step whose numbers differ keeps one set of arguments per member.

What cannot be replayed for many at once is found here, before anything runs (`Program.obstacle`): a model that looks
at its data, parts that hide what they use, writes that others read (`outcore.fusion.aliasing`). Such a model runs
member by member, which is always right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from outcore.errors import FuseError
from outcore.fusion.aliasing import state_in_place, unsafe_write, written_values
from outcore.fusion.call import FusedCall, Randomness, rnn_weights_anywhere, settings
from outcore.fusion.chain import Chain, chains_of, pays
from outcore.fusion.rules import RANDOM, is_random, norm_in_one_pass, out_of_place, run, writes_nothing
from outcore.fusion.stack import Stack
from outcore.fusion.training import Training
from outcore.fusion.values import Stacked
from outcore.graph import Graph, capture
from outcore.graph.naming import function_name
from outcore.graph.recording import Recording, Ref, Step, Tape, fill, schedule_drops
from outcore.graph.structure import leaves

__all__ = ["Program"]

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)

_Attribute = tuple[dict[str, Any], str, Any]
"""Of a module: its dictionary, the name in it, the value that was there."""


@dataclass
class Program:
    """The recording of a step, side by side for all members."""

    graph: Graph
    recording: Recording
    others: dict[int, Recording]
    """Recordings of members whose modules have other settings, by slot."""
    obstacle: str | None
    """Why it cannot run for many members at once; none if it can."""
    members: tuple[Training, ...] = ()
    unfused: tuple[str, ...] = ()
    """Blocks whose calls run member by member all the same."""
    ways: dict[str, str] = field(default_factory=dict)
    """How each call was run last: fused, vmap, members, shared."""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    differing: frozenset[str] = frozenset()
    """Steps whose arguments differ from member to member."""
    watched: tuple[tuple[_Attribute, ...], ...] = ()
    """Attributes of each member's modules, as they were."""
    written: frozenset[str] = frozenset()
    state_values: frozenset[str] = frozenset()
    """Values that are parameters or buffers themselves, and are written as such."""
    chains: dict[str, Chain] = field(default_factory=dict)
    """Norms that take what stands around them along, by each call in them."""

    @classmethod
    def record(cls, members: Sequence[Training], args: tuple[Any, ...], unfused: Sequence[str] = ()) -> Program:
        """Record a step of the members on a batch."""
        with rnn_weights_anywhere():
            graph = capture(members[0], args)
        assert graph.executable is not None
        recording = graph.executable[1]
        others: dict[int, Recording] = {}
        reference = _signature(members[0])
        for slot, member in enumerate(members[1:], 1):
            if _signature(member) != reference:
                made = capture(member, args)
                assert made.executable is not None
                others[slot] = made.executable[1]
        for slot, other in others.items():
            _check_alike(recording, other, slot)
        differing = frozenset(
            step.name
            for other in others.values()
            for step, theirs in zip(recording.steps, other.steps, strict=True)
            if not _equal((step.args, step.kwargs), (theirs.args, theirs.kwargs))
        )
        schedule_drops(recording.steps, [ref.name for _, ref in leaves(recording.result, Ref)])
        obstacle = _obstacle(graph, recording)
        return cls(
            graph,
            recording,
            others,
            obstacle,
            members=tuple(members),
            unfused=tuple(unfused),
            watched=tuple(tuple(_watched(member)) for member in members),
            differing=differing,
            written=written_values(graph),
            state_values=state_in_place(recording),
            chains=chains_of(graph, recording.steps, members[0]),
        )

    def outdated(self) -> bool:
        """Whether a number that a member's forward may have looked at has changed since."""
        return any(attributes.get(name, _GONE) != value for own in self.watched for attributes, name, value in own)

    def rebound(self, members: Sequence[Training]) -> Program:
        """The same for other members of the very same settings, or for the first of them.

        What is watched is the new members', beside the values of the recording: one of evaluation stays one.
        """
        others = {slot: recording for slot, recording in self.others.items() if slot < len(members)}
        before = zip(members, self.members, self.watched, strict=False)
        watched = tuple(seen if new is old else _seen_on(new, seen) for new, old, seen in before)
        return replace(self, others=others, members=tuple(members), watched=watched)

    @contextlib.contextmanager
    def without_chance(self) -> Iterator[bool]:
        """Inside, dropout layers let everything pass; yields whether the step then draws no random numbers at all."""
        layers = [m for member in self.members for m in member.modules() if isinstance(m, _DropoutNd)]
        rates = [layer.p for layer in layers]
        try:
            for layer in layers:
                layer.p = 0.0
            steps = [step for recording in (self.recording, *self.others.values()) for step in recording.steps]
            yield not any(is_random(step, model) for step in steps for model in self.members)
        finally:
            for layer, rate in zip(layers, rates, strict=True):
                layer.p = rate

    def replay(
        self,
        members: Sequence[Training],
        stack: Stack,
        tensors: Sequence[torch.Tensor | Stacked],
        randomness: Randomness,
        first: int = 0,
    ) -> Any:
        """Run the step for consecutive members; returns what one returns, with stacked values in it."""
        tape = _FusedTape(
            self, members, stack, dict(zip(self.recording.inputs, tensors, strict=True)), randomness, first
        )
        tape.run(self.recording.steps, self.recording.ambient)
        return fill(self.recording.result, tape.get)


class _FusedTape(Tape):
    """The values of a replay for several members."""

    def __init__(
        self,
        program: Program,
        members: Sequence[Training],
        stack: Stack,
        values: dict[str, Any],
        randomness: Randomness,
        first: int,
    ) -> None:
        super().__init__(members[0], program.recording.constants, values)
        self.program, self.members, self.stack = program, members, stack
        self.randomness, self.first = randomness, first
        self.count = len(members)
        self.unfused = program.unfused
        self.chained: dict[Chain, bool] = {}
        """Whether the calls of a chain run as one."""
        self.largest: dict[Chain, Any] = {}
        """Of chains that end in a maximum: it, and where."""
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
        elif self._unfused(step.name) and call.varies:
            result = call.one_by_one()
        else:
            result = run(call)
        for name, (_, value) in zip(step.outputs, leaves(result, (torch.Tensor, Stacked)), strict=True):
            self.values[name] = value
        for new, old in step.rebinds:
            self.values[new] = self.values[old]
        for name in step.drop:
            self.values.pop(name, None)

    def _unfused(self, name: str) -> bool:
        block = name.removeprefix("model.")
        return any(block.startswith((f"{path}.", f"{path}#")) for path in self.unfused)

    def _chain(self, step: Step) -> Chain | None:
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

    def _in_chain(self, step: Step, chain: Chain, call: FusedCall) -> Any:
        """A convolution without its bias, the norm, or what the norm was asked for besides."""
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
        """A step that writes a value gets its out-of-place form, or a copy to write into."""
        mutates = self.program.graph.calls[step.name].mutates
        if not mutates or self.program.state_values.issuperset(mutates):
            return step.target, step.kwargs
        if step.kind == "function":
            target, kwargs = out_of_place(step.target, step.kwargs)
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
        """What a reference stands for: a shared tensor, or the stacked one of all members."""
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


_GONE = object()


def _watched(member: Training) -> Iterator[_Attribute]:
    """What users change between steps: numbers on modules of their own, modes, rates of dropout."""
    for module in member.modules():
        own = not type(module).__module__.startswith("torch.nn.")
        for name, value in module.__dict__.items():
            plain = isinstance(value, bool | int | float | str)
            if plain and (own or name in ("training", "p")) and name != "call_super_init":
                yield module.__dict__, name, value


def _seen_on(member: Training, before: Sequence[_Attribute]) -> tuple[_Attribute, ...]:
    """The attributes of another member, with the values that were seen."""
    return tuple((now[0], now[1], seen[2]) for now, seen in zip(_watched(member), before, strict=False))


def _signature(member: Training) -> list[Any]:
    """All that a member's forward can look at beside tensors."""
    found: list[Any] = []
    for path, module in member.named_modules():
        if path and not path.startswith("model"):
            continue  # the loss is the same object for all
        plain = {k: v for k, v in settings(module).items() if k not in ("objective", "metrics", "loss")}
        tensors = [k for k, v in module.__dict__.items() if isinstance(v, torch.Tensor)]
        found.append((path, type(module), plain, [(k, id(module.__dict__[k])) for k in tensors]))
    return found


def _check_alike(ours: Recording, theirs: Recording, slot: int) -> None:
    for a, b in zip(ours.steps, theirs.steps, strict=False):
        if (a.name, a.kind, a.outputs) != (b.name, b.kind, b.outputs):
            raise FuseError(
                f"model {slot} does something else than model 0: {b.name} where the other has {a.name}; "
                "fuse models of one architecture together, and others in another call"
            )
    if len(ours.steps) != len(theirs.steps):
        raise FuseError(
            f"model {slot} makes {len(theirs.steps)} calls in a step, model 0 {len(ours.steps)}; fuse models of one "
            "architecture together, and others in another call"
        )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    return bool(a is b or a == b)


def _obstacle(graph: Graph, recording: Recording) -> str | None:
    if (asked := _asks(recording)) is not None:
        return f"it looks at numbers in tensors: {asked}"
    if recording.volatile:
        return "it draws numbers outside of torch"
    for step in recording.steps:
        call = graph.calls.get(step.name)
        if call is None or graph.blocks[call.block].kind != "opaque":
            continue
        refs = [ref for _, ref in leaves((step.args, step.kwargs), Ref)]
        if call.parameters or step.kind == "module" or _hides(step) or any(r.kind == "module" for r in refs):
            return f"{step.name} must stay whole and may use more than it is given"
    if (name := unsafe_write(graph, recording)) is not None:
        return f"{name} writes memory that is read under another name"
    return None


def _asks(recording: Recording) -> str | None:
    """A question about numbers that depend on the batch or the weights; what has always the same answer is none."""
    varying = set(recording.inputs)
    for step in recording.steps:
        refs = [ref for _, ref in leaves((step.args, step.kwargs), Ref)]
        drawn = step.kind == "function" and function_name(step.target) in RANDOM
        if drawn or step.kind == "module" or any(r.kind == "state" or r.name in varying for r in refs):
            varying |= {*step.outputs, *(new for new, _ in step.rebinds)}
            if step.kind == "guard":
                return step.name
    return None


def _hides(step: Step) -> bool:
    """Whether an argument is something we cannot look into."""
    flat: list[Any] = list(step.args) + list(step.kwargs.values())
    while flat:
        value = flat.pop()
        if isinstance(value, tuple | list):
            flat.extend(value)
        elif isinstance(value, dict):
            flat.extend(value.values())
        elif not isinstance(value, (*_PLAIN, Ref)):
            return True
    return False
