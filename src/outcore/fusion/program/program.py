"""A recorded training step of one member, and how to run it for many.

Members of one architecture usually do the very same steps, so one recording serves all. Where their modules differ in a
number (a dropout rate, a slope), that member is recorded too, and the recordings are compared step by step: steps must
agree; a step whose numbers differ keeps one set of arguments per member.

What cannot be replayed for many at once is found here, before anything runs (`StackedProgram.obstacle`): a model that
reads its data, parts that hide what they use, writes that others read (`outcore.fusion.program.aliasing`). Such a model
runs member by member, which is always right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from outcore.errors import FuseError
from outcore.fusion.program.aliasing import state_in_place, unsafe_write, written_values
from outcore.fusion.program.batch_norm_chain import BatchNormChain, chains_of
from outcore.fusion.program.call import MemberRandomness, rnn_weights_anywhere, settings
from outcore.fusion.program.concat_conv import joins_of
from outcore.fusion.program.replay import StackedTape
from outcore.fusion.program.values import Stacked
from outcore.fusion.rules import is_random
from outcore.fusion.stack import Stack
from outcore.fusion.training import MemberTraining
from outcore.graph import Graph, capture
from outcore.graph.naming import function_name
from outcore.graph.reads.snapshot import Snapshot
from outcore.graph.reads.writes import Effects
from outcore.graph.record.keys import hooks_of
from outcore.graph.record.preserve import ModelState
from outcore.graph.record.recording import Recording, Ref, Step, fill, schedule_drops
from outcore.graph.structure import leaves
from outcore.ops.traits import RANDOM

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)

_Attribute = tuple[dict[str, Any], str, Any]
"""An attribute of a module: its dictionary, the name in it, the value that was there."""


@dataclass
class StackedProgram:
    """The recording of a step, side by side for all members."""

    graph: Graph
    recording: Recording
    others: dict[int, Recording]
    """Recordings of members whose modules have other settings, by slot."""
    obstacle: str | None
    """Why it cannot run for many members at once; None if it can."""
    varying: bool = False
    """Whether something that its models read changes in every call."""
    members: tuple[MemberTraining, ...] = ()
    unfused: tuple[str, ...] = ()
    """Blocks whose calls run member by member all the same."""
    ways: dict[str, str] = field(default_factory=dict)
    """How each call was run last: fused, vmap, members, shared."""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    differing: frozenset[str] = frozenset()
    """Steps whose arguments differ from member to member."""
    watched: tuple[tuple[_Attribute, ...], ...] = ()
    """Attributes of each member's modules, as they were."""
    reads: tuple[Snapshot, ...] = ()
    """What the recording has read, of each member."""
    written: frozenset[str] = frozenset()
    state_values: frozenset[str] = frozenset()
    """Values that are parameters or buffers themselves, and are written as such."""
    chains: dict[str, BatchNormChain] = field(default_factory=dict)
    """Norms that are fused with their neighbours, by each call in them."""
    joins: dict[str, str] = field(default_factory=dict)
    """Concatenations that only a 1x1 convolution reads, and that convolution."""

    @classmethod
    def record(
        cls, members: Sequence[MemberTraining], args: tuple[Any, ...], unfused: Sequence[str] = ()
    ) -> StackedProgram:
        """Record a step of the members on a batch."""
        with rnn_weights_anywhere():
            graph = _settled(members, args)
        recording = graph.recording
        others: dict[int, Recording] = {}
        reference = _signature(members[0])
        for slot, member in enumerate(members[1:], 1):
            if _signature(member) != reference:
                made = capture(member, args)
                others[slot] = made.recording
        for slot, other in others.items():
            _check_alike(recording, other, slot)
        differing = frozenset(
            step.name
            for other in others.values()
            for step, theirs in zip(recording.steps, other.steps, strict=True)
            if not _equal((step.args, step.kwargs), (theirs.args, theirs.kwargs))
        )
        schedule_drops(recording.steps, [ref.name for _, ref in leaves(recording.result, Ref)])
        hooks = {tuple(len(hooks_of(module)) for module in member.modules()) for member in members}
        obstacle = _obstacle(graph, recording) or ("not all of them have hooks" if len(hooks) > 1 else None)
        return cls(
            graph,
            recording,
            others,
            obstacle,
            members=tuple(members),
            unfused=tuple(unfused),
            watched=tuple(tuple(_watched(member)) for member in members),
            reads=tuple(_reads(members, slot, recording, others) for slot in range(len(members))),
            differing=differing,
            written=written_values(graph),
            state_values=state_in_place(recording),
            chains=chains_of(graph, recording.steps, members[0]),
            joins=joins_of(graph, recording.steps, members[0]),
        )

    def outdated(self) -> bool:
        """Whether a number that a member's forward may have read has changed since."""
        seen = any(attributes.get(name, _GONE) != value for own in self.watched for attributes, name, value in own)
        return seen or not all(snapshot.holds() for snapshot in self.reads)

    def changed(self) -> Iterator[str]:
        """What has changed, each described in words."""
        for snapshot in self.reads:
            yield from snapshot.changed()

    def rebound(self, members: Sequence[MemberTraining]) -> StackedProgram:
        """The same for other members of the very same settings, or for the first of them.

        The new members' attributes are watched, with the values of the recording: one of evaluation stays one.
        """
        others = {slot: recording for slot, recording in self.others.items() if slot < len(members)}
        before = zip(members, self.members, self.watched, strict=False)
        watched = tuple(seen if new is old else _seen_on(new, seen) for new, old, seen in before)
        reads = tuple(
            seen if new is old else seen.moved(old, new)
            for new, old, seen in zip(members, self.members, self.reads, strict=False)
        )
        return replace(self, others=others, members=tuple(members), watched=watched, reads=reads)

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[bool]:
        """A context in which dropout layers pass everything; yields whether the step then draws no random numbers at
        all."""
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
        members: Sequence[MemberTraining],
        stack: Stack,
        tensors: Sequence[torch.Tensor | Stacked],
        randomness: MemberRandomness,
        first: int = 0,
    ) -> Any:
        """Run the step for consecutive members; returns what one returns, with stacked values in it."""
        given = dict(zip(self.recording.inputs, tensors, strict=True))
        tape = StackedTape(self, members, stack, given, randomness, first)
        tape.run(self.recording.steps, self.recording.ambient)
        return fill(self.recording.result, tape.get)


_GONE = object()


def _settled(members: Sequence[MemberTraining], args: tuple[Any, ...]) -> Graph:
    """The graph of the first member, after all have done what forward does in their first call: hooks that it
    registers, settings that it completes."""
    graph = capture(members[0], args)
    effects = graph.recording.effects
    if not effects or not effects.repeatable:
        return graph
    before = ModelState(members[0], ())
    _repeat(effects, members[0])
    settled = capture(members[0], args)
    if settled.recording.effects:  # it is done in every call
        before.restore()
        return graph
    for member in members[1:]:
        own = capture(member, args).executable
        if own is not None and own[1].effects is not None:
            _repeat(own[1].effects, member)
    return settled


def _repeat(effects: Effects, member: MemberTraining) -> None:
    effects.register(member)
    replace(effects, hooks=()).apply_plain(member, "a fused model")


def _reads(
    members: Sequence[MemberTraining], slot: int, recording: Recording, others: dict[int, Recording]
) -> Snapshot:
    """What was read of a member: by its own recording, or by the one that serves for it."""
    own = others.get(slot, recording).reads
    assert own is not None
    return own if slot == 0 or slot in others else own.moved(members[0], members[slot])


def _watched(member: MemberTraining) -> Iterator[_Attribute]:
    """What users change between steps: numbers on modules of their own, modes, rates of dropout."""
    for module in member.modules():
        own = not type(module).__module__.startswith("torch.nn.")
        for name, value in module.__dict__.items():
            plain = isinstance(value, bool | int | float | str)
            if plain and (own or name in ("training", "p")) and name != "call_super_init":
                yield module.__dict__, name, value


def _seen_on(member: MemberTraining, before: Sequence[_Attribute]) -> tuple[_Attribute, ...]:
    """The attributes of another member, with the values that were seen."""
    return tuple((now[0], now[1], seen[2]) for now, seen in zip(_watched(member), before, strict=False))


def _signature(member: MemberTraining) -> list[Any]:
    """All that a member's forward can read beside tensors."""
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
    if recording.effects:
        effects = [*recording.effects.lost, *(write.description for write in recording.effects.writes)]
        return f"its forward writes {effects[0]}"
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
    """The name of a guard on numbers that depend on the batch or the weights; None if every guard always has one
    answer."""
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
    """Whether an argument is an object that cannot be inspected."""
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
