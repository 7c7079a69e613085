"""A stage's part of the network, as it runs on one rank for one form of micro-batch.

`Part` is a `Subgraph` (the user's own modules and calls) that also seeds random calls, notes which call is running (so
that a failure can be named), and runs on another device than it was recorded on. `Part.run` is the one place through
which every forward of the engine goes: the engine takes an `execute` function in its stead, and that is where policies
for saved values act inside a stage.

`arrive` brings a tensor from another stage into autograd without keeping it: what comes back as gradient is put into a
slot, and the tensor itself lives only as long as the part's own backward needs it.

Random numbers do not depend on where a network is cut (`RandomDraws`). Before every call that may draw (dropout,
anything opaque) the generator is seeded with a hash of the run's seed, the step, the micro-batch and the call's name.
So a mask is a function of these four: it is the same on one rank and on eight, under every schedule, after a restart,
and when a forward is repeated. Micro-batches are numbered over the whole step, over all replicas. The generators the
user draws from elsewhere are left as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from outcore.errors import VaryingError
from outcore.graph import Graph
from outcore.graph.record.recording import Context, Mismatch, Recording, Ref, Step, Tape
from outcore.graph.structure import leaves, substitute
from outcore.graph.subgraph import Subgraph
from outcore.run.ranks.current_work import CurrentWork


class RandomDraws:
    """The random numbers of one micro-batch of one step."""

    def __init__(self, seed: int, step: int, micro_batch: int, device: torch.device) -> None:
        self._prefix = f"{seed}/{step}/{micro_batch}/"
        self._device = device

    def seed(self, call: str) -> None:
        """Seed the generators for a call."""
        number = int.from_bytes(hashlib.blake2b((self._prefix + call).encode(), digest_size=7).digest(), "big")
        torch.default_generator.manual_seed(number)
        if self._device.type == "cuda":
            torch.cuda.default_generators[self._device.index or 0].manual_seed(number)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context after which the user's generators are as they were."""
        state = torch.default_generator.get_state()
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self._device)


Values: TypeAlias = dict[str, torch.Tensor]


class Part(Subgraph):
    """Some calls of a graph on one rank."""

    def __init__(
        self, graph: Graph, model: nn.Module, recording: Recording, calls: set[str], random: frozenset[str]
    ) -> None:
        super().__init__(graph, model, recording, calls)
        self.graph, self.calls = graph, frozenset(calls)
        base = {name: value.base for name, value in graph.values.items()}
        written = {base[v] for name in calls for v in graph.calls[name].mutates}
        self._copied |= {name for name in self.inputs if base[name] in written}  # also through another name
        self.random_calls = frozenset(calls & random)
        """The calls that may draw random numbers."""
        self.place = CurrentWork()
        self.instead: dict[str, Callable[..., Any]] = {}
        """Path -> what is called in place of the module."""

    @property
    def steps(self) -> list[Step]:
        """What it runs, in order."""
        return self._steps

    def run(self, inputs: Values, draws: RandomDraws) -> Values:
        """Run the calls with the random numbers of a micro-batch."""
        if not self.random_calls:
            return self._run(inputs, None)
        with draws.aside():
            return self._run(inputs, draws)

    def received(self, inputs: Values) -> Values:
        """The inputs as the part may use and overwrite them."""
        values = {name: inputs[name].clone() if name in self._copied else inputs[name] for name in self.inputs}
        inputs.clear()  # what is not needed any more must not live until the end
        return values

    def draws_in(self, calls: Iterable[str]) -> bool:
        """Whether one of these calls may draw random numbers."""
        return not self.random_calls.isdisjoint(calls)

    def recording(self) -> Recording:
        """The part as a recording of its own, which returns its outputs by name."""
        results = {name: Ref("value", name) for name in self.outputs}
        return Recording(self.inputs, self._steps, results, self._constants, self._ambient, False, False)

    def perform(self, tape: Tape, step: Step, draws: RandomDraws | None) -> None:
        """Run one step, with its name noted and its random numbers seeded."""
        self.place.call = step.name
        if self.instead and step.kind == "module" and step.target in self.instead:
            step = replace(step, kind="function", target=self.instead[step.target])
        if draws is not None and step.name in self.random_calls:
            draws.seed(step.name)
        try:
            Tape.step(tape, step)
        except Mismatch as question:
            raise VaryingError(
                f"the numbers in a tensor lead forward another way than when it was recorded ({question}), and an "
                "Engine cannot follow; train this model with outcore.within, or decide with torch.where"
            ) from None

    def _run(self, inputs: Values, draws: RandomDraws | None) -> Values:
        tape = _Tape(self, self.received(inputs), draws)
        tape.run(self._steps, self._ambient)
        return {name: tape.values[name] for name in self.outputs}

    def restricted(self, calls: set[str]) -> Part:
        """Some of its calls, with the same modules."""
        return Part(self.graph, self, self.recording(), calls, self.random_calls)

    def relocate(self, device: torch.device) -> None:
        """Prepare to run on another device what was recorded on the host."""
        self._steps = [relocate(step, device, self._ambient) for step in self._steps]
        used = {ref.name for s in self._steps for _, ref in leaves((s.args, s.kwargs), Ref) if ref.kind == "constant"}
        self._constants = {name: self._constants[name].to(device) for name in used}


Execute: TypeAlias = Callable[[Part, Values, RandomDraws], Values]
"""Runs a part on its inputs: `Part.run`, or something that saves less for backward."""


class _Tape(Tape):
    def __init__(self, part: Part, values: Values, draws: RandomDraws | None) -> None:
        super().__init__(part, part._constants, values)
        self._part, self._draws = part, draws

    def step(self, step: Step) -> None:
        """Run one step of the part."""
        self._part.perform(self, step, self._draws)


def relocate(step: Step, device: torch.device, ambient: Context) -> Step:
    """A step recorded on the host, for another device: the devices in its arguments and modes are exchanged."""

    def there(found: torch.device) -> torch.device:
        return device if found.type in ("cpu", "meta") else found

    context = step.context
    if context != ambient:
        context = replace(
            context, autocast=tuple((device.type if d == "cpu" else d, on, t) for d, on, t in context.autocast)
        )
    return replace(
        step,
        args=substitute(step.args, torch.device, there),
        kwargs=substitute(step.kwargs, torch.device, there),
        context=context,
    )


@dataclass(slots=True)
class GradientSlot:
    """Where the gradient of a received tensor is put."""

    shape: torch.Size
    gradient: torch.Tensor | None = field(default=None)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, tensor: torch.Tensor, slot: GradientSlot) -> torch.Tensor:
        ctx.slot = slot
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.slot.gradient = gradients[0]
        return None, None, None


_TRIGGERS: dict[torch.device, torch.Tensor] = {}


def arrive(tensor: torch.Tensor) -> tuple[torch.Tensor, GradientSlot]:
    """The tensor as an input whose gradient is wanted, and the slot for that gradient."""
    trigger = _TRIGGERS.get(tensor.device)
    if trigger is None:
        trigger = _TRIGGERS[tensor.device] = torch.zeros((), device=tensor.device, requires_grad=True)
    slot = GradientSlot(tensor.shape)
    made: torch.Tensor = _Arrive.apply(trigger, tensor, slot)  # type: ignore[no-untyped-call]
    return made, slot
