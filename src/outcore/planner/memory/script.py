"""A step under policies, written as a `Script`: what is checked, timed and run is this, and nothing else.

`emit` writes down, call by call, what an assignment of policies means: in forward what is dropped, evicted or encoded
after its last use, and where a copy out has to be over; in backward where each of these starts to come back, is waited
for, recomputed or decoded, and goes for good. The static checks of `outcore.program` run on the result, the simulator
times it and follows its memory, and `outcore.memory` compiles its tables from it.

    policy         forward, after the last use            backward
    Recompute      Drop                                   Recompute … Drop
    Offload        Evict … Release                        Fetch … Wait … Drop
    Encode         Encode                                 Decode … Drop
    Encode+offload Encode Evict … Release                 Fetch … Wait Decode … Drop

Values that stay are part of what each `Run` holds. The figures are those of `StepModel.evaluate`, so the simulated
peak is the evaluated one, and the simulated time differs only by how copies queue on the link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from outcore.cost.buffers import Buffer
from outcore.cost.predicted.step_memory import MemoryCurve
from outcore.errors import PlanError
from outcore.ops.recompute_encode import CODECS, PIXELS, codec_for
from outcore.planner.memory.copy_schedule import BufferCopies, OffloadTarget
from outcore.planner.memory.evaluate import StepModel, StepUnderPolicies
from outcore.program import Backward, Forward, Instruction, Links, OptimizerStep, Program, Stage, Stages
from outcore.program import script as actions
from outcore.program.policies import KEEP, Encode, Keep, Policies, Policy, Recompute
from outcore.program.script import Action, Script


def one_stage(model: StepModel, policies: Policies) -> Program:
    """A step on one device as a program: one forward, one backward, one update."""
    forward, backward = emit(model, policies)
    instructions: list[Instruction] = [Forward(0, 0, script=forward), Backward(0, 0, script=backward)]
    if model.plain.moments[-1].phase == "optimizer":
        instructions.append(OptimizerStep(0))
    return Program("within", (tuple(instructions),))


def stage_of(model: StepModel) -> Stages:
    """The stage of that program: its memory is in the script, so it has none of its own."""
    trains = int(model.plain.moments[-1].phase == "optimizer")
    whole = Stage(tuple(model.order), sum(model.forward_s), sum(model.backward_s), 0, 0, 0, trains, 0)
    return Stages((whole,), ())


def link_of(target: OffloadTarget | None) -> Links | None:
    """The link below the device, for the simulator."""
    if target is None:
        return None
    return Links.to_host(target.out_bytes_per_s, target.in_bytes_per_s)


def emit(model: StepModel, policies: Policies) -> tuple[Script, Script]:
    """The scripts of a step's forward and backward under an assignment.

    Args:
        model: the step.
        policies: buffer -> policy; what is not named is kept.

    Raises:
        PlanError: a buffer is not known, or cannot have its policy.
    """
    for name in policies:
        if name not in model.buffers:
            raise PlanError(f"the plan names {name}, which is no memory of {model.graph.root.type}")
    check_policies(model.buffers, model.resolved(policies))
    return _Writer(model, policies).scripts()


class _Writer:
    """Places the actions of every buffer before and after calls, then writes them in order."""

    def __init__(self, model: StepModel, policies: Policies) -> None:
        self.model, self.policies = model, model.resolved(policies)
        self.step: StepUnderPolicies = model.evaluate(policies)
        self.copies = {c.buffer: c for c in self.step.transfers.moved} if self.step.transfers is not None else {}
        self.first, self.last = model.needs(policies)
        self.after_forward: defaultdict[int, list[Action]] = defaultdict(list)
        self.before_backward: defaultdict[int, list[tuple[float, Action]]] = defaultdict(list)
        self.after_backward: defaultdict[int, list[Action]] = defaultdict(list)
        self.saves: defaultdict[int, int] = defaultdict(int)
        self.readers: defaultdict[str, list[str]] = defaultdict(list)
        """Buffer -> those that are recomputed from it."""
        for name, how in self.policies.items():
            for source in model.buffers[name].sources if isinstance(how, Recompute) else ():
                self.readers[source].append(name)

    def scripts(self) -> tuple[Script, Script]:
        """Both scripts."""
        for name, how in self.policies.items():
            if not isinstance(how, Keep):
                self.place(self.model.buffers[name], how)
        handled = self.handled()
        forward: list[Action] = []
        for i, call in enumerate(self.model.order):
            at = self.model.forward_at[i]
            beside = int(self.step.curve[at]) - handled[at]
            forward.append(actions.Run((call,), self.model.forward_s[i], self.saves[i], max(0, beside)))
            forward += self.after_forward[i]
        backward: list[Action] = []
        for i in reversed(self.model.differentiated):
            at = self.model.backward_at[i]
            backward += [action for _, action in sorted(self.before_backward[i], key=lambda row: row[0])]
            beside = int(self.step.curve[at]) - handled[at]
            backward.append(actions.Run((self.model.order[i],), self.model.backward_s[i], 0, max(0, beside)))
            backward += self.after_backward[i]
        return tuple(forward), tuple(backward)

    def place(self, buffer: Buffer, how: Policy) -> None:
        """The actions of one buffer."""
        name, size = buffer.name, buffer.bytes
        begins, ends = self.first[name], self.last[name]
        self.saves[buffer.born] += size
        leave = self.after_forward[buffer.last]
        if isinstance(how, Recompute):
            leave.append(actions.Drop(name, size))
            again = actions.Recompute(name, buffer.writers, size, buffer.again_s)
            self.before_backward[begins].append((buffer.done, again))
            if not buffer.savers and begins == ends:  # only others are made from it, all of them at this moment
                readers = (self.model.buffers[n].done for n in self.readers[name] if self.first.get(n) == begins)
                made = max(readers, default=buffer.done)
                self.before_backward[begins].append((made + 0.5, actions.Drop(name, size)))
                return
        else:
            held, order = size, buffer.born
            if isinstance(how, Encode):
                small, held = self.model.held(buffer, how)
                half = self.model.coding_s(buffer, how) / 2
                leave.append(actions.Encode(name, how.codec, size - small, half))
                self.before_backward[begins].append((order, actions.Decode(name, how.codec, held - small, half)))
                size = small
            if how.offloads:
                self.copy(buffer, size, begins)
            size = held
        self.after_backward[ends].append(actions.Drop(name, size))

    def copy(self, buffer: Buffer, size: int, begins: int) -> None:
        """A buffer's way out and back, where the copy schedule has put it."""
        name, copies = buffer.name, self.copies.get(buffer.name)
        if copies is None:
            copies = BufferCopies(name, buffer.last, ("forward", buffer.last), begins, 0, 0)
        self.after_forward[copies.evict].append(actions.Evict(name, size, released=True))
        phase, place = copies.wait
        release = actions.Release(name, size)
        if phase == "forward":
            self.after_forward[place].append(release)
        else:
            self.before_backward[place].append((-2, release))
        first = list(self.copies).index(name) / len(self.copies) if name in self.copies else 0.0  # as they are needed
        self.before_backward[copies.fetch].append((-1 + first / 2, actions.Fetch(name, size)))
        self.before_backward[begins].append((buffer.born - 1, actions.Wait(name)))

    def handled(self) -> list[int]:
        """Bytes that the actions account for, at every moment of the step's memory curve."""
        change = [0] * (len(self.step.curve) + 1)
        held = 0
        for i in range(len(self.model.order)):
            held += self.saves[i]
            change[self.model.forward_at[i]] = held
            held -= sum(_freed(action) for action in self.after_forward[i])
        for i in reversed(self.model.differentiated):
            held -= sum(_freed(action) for _, action in self.before_backward[i])
            change[self.model.backward_at[i]] = held
            held -= sum(_freed(action) for action in self.after_backward[i])
        return change


def _freed(action: Action) -> int:
    """Bytes that an action gives back; less than none if it takes some."""
    match action:
        case actions.Drop() | actions.Release() | actions.Encode():
            return action.bytes
        case actions.Fetch() | actions.Recompute() | actions.Decode():
            return -action.bytes
        case _:
            return 0


def check_policies(buffers: Mapping[str, Buffer], policies: Policies) -> None:
    """Refuse policies that their buffers cannot have, alone or together."""
    for name, how in policies.items():
        check_policy(buffers[name], how)
        for source in buffers[name].sources if isinstance(how, Recompute) else ():
            if policies.get(source, KEEP).codec == "sign":
                raise PlanError(
                    f"{source} cannot be encoded as sign: another value is made from it; keep or offload it"
                )


def check_policy(buffer: Buffer, how: Policy) -> None:
    """Refuse a policy that a buffer cannot have."""
    if isinstance(how, Recompute) and buffer.obstacle:
        raise PlanError(f"{buffer.name} cannot be recomputed: {buffer.obstacle}; keep or offload it")
    if isinstance(how, Encode):
        codec = how.codec
        if how.offloads and codec in ("sign", "sparse"):
            reason = "how large it becomes is in the data" if codec == "sparse" else "its bits stay with its operation"
            raise PlanError(f"{buffer.name} cannot leave as {codec}: {reason}; write encode:{codec} or offload")
        if codec not in CODECS:
            raise PlanError(f"policy {how!r} of {buffer.name} is not known; encodings are {', '.join(CODECS)}")
        if codec == "sign" and buffer.need != "sign":
            raise PlanError(f"{buffer.name} cannot be encoded as {codec}: its backward needs all of it")
        if codec == "window" and codec_for(buffer) != "window":
            raise PlanError(
                f"{buffer.name} cannot be encoded as window: these are no indices of a max pool over at most "
                f"{PIXELS} pixels each; keep or offload it"
            )
    if buffer.opaque and not isinstance(how, Keep):
        raise PlanError(f"{buffer.name} is kept by a part that must stay whole; keep it")


def update_parts(plain: MemoryCurve) -> tuple[int, ...]:
    """What is held while the optimizer steps, as parts of a simulated curve: no script has an action for it."""
    held = plain.moments[-1].bytes
    saved = held.inputs + held.feature_maps + held.feature_gradients
    return (held.weights, held.gradients, held.state, saved, 0, held.workspace)
