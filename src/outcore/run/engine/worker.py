"""Executes the instructions of one rank, one step at a time.

Instructions are taken in order. Forwards and backwards compute at once; sends and receives are posted to the transport
and return at once; a compute waits for what it needs and nothing else does. A value is computed once and sent directly
to every stage that uses it; the gradients that come back from several users are added, the furthest user's first, as
autograd would. What a forward leaves for its backward is the edge into autograd's graph, not the tensor: memory that
backward does not need is free as soon as it has been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from outcore.errors import EngineError
from outcore.graph.record.recording import Ref, fill
from outcore.graph.structure import leaves, substitute
from outcore.program import Backward, Edge, Event, Forward, OptimizerStep, Receive, Reduce, Send
from outcore.program.instructions import Instruction, Key
from outcore.program.timeline import COMPUTE
from outcore.run.engine.build import EngineParts
from outcore.run.engine.setup import check_loss
from outcore.run.engine.step_meters import DeviceClock, Moment, PeakGauge
from outcore.run.engine.update import GradientUpdate
from outcore.run.stage.idle_state_offload import IdleStateOffload
from outcore.run.stage.parameter_owners import SharedParameters
from outcore.run.stage.policies import StagePolicies
from outcore.run.stage.recorded_stages import RecordedStages
from outcore.run.stage.split_stage import LOSS_TERM, SplitStage
from outcore.run.stage.stage_module import Execute, GradientSlot, RandomDraws, Values, arrive
from outcore.run.transport.p2p import IncomingTensor, OutgoingTensor, PointToPoint, TensorLayout
from outcore.run.transport.part_messages import PartMessages
from outcore.stream.source import ImageRows

Of = tuple[int, int, int]
"""Stage, micro-batch, replica."""


@dataclass(slots=True)
class RankMicroBatch:
    """A micro-batch as this rank knows it."""

    form: RecordedStages
    inputs: Mapping[str, torch.Tensor | ImageRows]
    """What the model is given, by name; empty where the rank has no data."""
    targets: Any
    weight: float
    """Its share in the loss of the step."""
    number: int
    """Its number among all micro-batches of the step, over all replicas."""


@dataclass(slots=True)
class ProgramRun:
    """The inputs of one run through a program, and its results."""

    pieces: Sequence[RankMicroBatch]
    training: bool
    seed: int
    step: int
    scale: float
    weights: Sequence[float]
    """Share of every micro-batch of the step in its loss, over all replicas."""
    samples: int
    """The samples of all replicas."""
    agree: Callable[[], object] | None = None
    """Checks that all ranks were given the same batch; called before anything is sent."""
    after_forwards: Callable[[], None] | None = None
    """Called when the last forward of this rank is over."""
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """Loss of each micro-batch, where the last stage is here."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """What the model returned, where it is asked for."""


@dataclass(slots=True)
class _SavedForward:
    """What a forward left for its backward."""

    roots: dict[str, GradientEdge | None]
    slots: dict[str, GradientSlot]
    loss: torch.Tensor | None
    token: torch.Tensor | None = None
    """The end of the messages between the ranks that share an image."""


_IDLE = ProgramRun((), False, 0, 0, 1.0, (), 0)


class Worker:
    """One rank's part in running programs."""

    def __init__(
        self,
        made: EngineParts,
        p2p: PointToPoint | None,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        execute: Execute,
        update: GradientUpdate,
    ) -> None:
        self.forms, self.statistics, self.first_holders = made.forms, made.statistics, made.first_holders
        self.rank, self.place = made.rank, made.world.place
        self.p2p, self.loss, self.execute, self.update = p2p, loss, execute, update
        update.on_reduced = self._reduced
        self.clock, self.gauge = DeviceClock(made.device), PeakGauge(made.device)
        self.started_s = 0.0
        self._noted: list[tuple[str, str, str, Moment, Moment, tuple[int, ...]]] = []
        self.keep_outputs = False
        self.idle_state: IdleStateOffload | None = None
        """Offloads the stages that do not compute, if that was asked for."""
        self.split: SplitStage | None = None
        """Runs the first stage on a part of the image, if the plan has a grid."""
        self._run = _IDLE
        self._flights: dict[Of, _SavedForward] = {}
        self._made: dict[Key, torch.Tensor] = {}
        self._coming: dict[Key, IncomingTensor] = {}
        self._going: list[OutgoingTensor] = []
        self._leftovers = made.world.leftovers
        self.messages: PartMessages | None = None
        if made.plan.spatial is not None and (at := made.grid_rank) is not None:
            self.messages = PartMessages(p2p, at, made.plan.parts, made.rank - at, self.place, self.record)
            self.split = SplitStage(made.plan.spatial, self.messages, made.device, loss)

    def run(
        self, instructions: Sequence[Instruction], tags: Mapping[Key, int], run: ProgramRun, *, update: bool
    ) -> None:
        """Execute a program's instructions for this rank; with `update` also reductions and the optimizer."""
        self._begin(run, tags)
        incoming, outgoing = self._edges(run.pieces[0].form)
        forwards = sum(isinstance(i, Forward) for i in instructions)
        steps = trained = sum(isinstance(i, OptimizerStep) for i in instructions)
        for instruction in instructions:
            if not isinstance(instruction, Forward | Receive):
                self._agree()
            match instruction:
                case Receive():
                    self._receive(instruction)
                case Send():
                    self._send(instruction)
                case Forward():
                    self._at("forward", instruction)
                    self._forward(instruction, incoming, outgoing)
                    forwards -= 1
                    if not forwards:
                        self._agree()
                        if run.after_forwards is not None:
                            run.after_forwards()
                case Backward():
                    self._at("backward", instruction)
                    self._backward(instruction, incoming, outgoing)
                case Reduce() if update:
                    self.place.stage, self.place.doing = instruction.stage, "reduce"
                    if self.idle_state is not None:
                        self.idle_state.leave()
                    self.update.reduce(instruction)
                case OptimizerStep() if update:
                    steps -= 1
                    if not steps:
                        self._step(instruction)
        if update and not trained:
            self._start_statistics()
            self.update.finish_reductions()
            self.update.step()  # nothing to train here, but norms and overflows concern all ranks
        self._end(run)

    def _begin(self, run: ProgramRun, tags: Mapping[Key, int]) -> None:
        self._noted.clear()
        given: list[Any] = [(piece.inputs, piece.targets) for piece in run.pieces]
        if self.idle_state is not None:
            given.append(self.idle_state.offloaded)
        if self.p2p is not None:
            given.append(self.p2p.shared_rows.sent_rows)
        self.gauge.start(tensor for _, tensor in leaves(given, torch.Tensor))
        self.started_s = self.clock.start()
        self._run, self._tags = run, tags

    def _step(self, last: OptimizerStep) -> None:
        """Step the optimizer for all stages of this rank, when it comes to the last of them."""
        self.place.stage, self.place.doing = last.stage, "optimizer step"
        self._start_statistics()
        self.update.finish_reductions()
        began = self.clock.now()
        self.update.step()
        self.record(COMPUTE, "step", str(last), began, self.clock.now(), last.stage)
        self.gauge.sample()

    def _start_statistics(self) -> None:
        """Send what batch norms collected while gradients travel; of a GPU later, reading it would stop the kernels."""
        if self._run.training and self.forms.device.type == "cpu":
            self.statistics.start(self._run.pieces[0].form)

    def _end(self, run: ProgramRun) -> None:
        if self.idle_state is not None:
            self.idle_state.leave()
        self.place.doing = "end of step"
        if run.training:
            self.statistics.update_running(run.pieces[0].form)
            self.statistics.share_buffers(run.pieces[0].form, self.first_holders)
        for going in self._going:
            going.finish()
        self._going.clear()
        if self.messages is not None:
            self.messages.finish()
        if self.p2p is not None:
            self.p2p.end_step()
        self.gauge.stop()
        self._run = _IDLE  # what the user gave is the user's again

    def abandon(self) -> None:
        """Drop what is in flight after a failure."""
        self.gauge.stop()
        self._run = _IDLE
        self.update.abandon()
        self._leftovers += [*self._coming.values(), *self._going, *self.statistics.abandon()]
        if self.messages is not None:
            self._leftovers += self.messages.abandon()
        for held in (self._flights, self._made, self._coming, self._going):
            held.clear()

    def close(self) -> None:
        """Close all connections."""
        self.abandon()
        self.update.close()
        if isinstance(self.execute, StagePolicies):
            self.execute.close()
        if self.p2p is not None:
            self.p2p.close()
            self.p2p = None

    def record(self, stream: str, kind: str, name: str, start: Moment, end: Moment, *labels: int) -> None:
        """Record an event of the timeline; labels are stage, micro-batch, replica and bytes."""
        self._noted.append((stream, kind, name, start, end, labels))

    def events(self) -> list[Event]:
        """The events of the last step, in seconds since it began on this rank."""
        found = []
        for stream, kind, name, start, end, labels in self._noted:
            since, until = (self.clock.seconds(moment) - self.started_s for moment in (start, end))
            found.append(Event(self.rank, stream, kind, name, since, until, *labels))
        return sorted(found, key=lambda event: event.start_s)

    # Computing

    def _forward(self, of: Forward, incoming: Sequence[Sequence[Edge]], outgoing: Sequence[Sequence[Edge]]) -> None:
        run, piece = self._run, self._run.pieces[of.micro_batch]
        form, part = piece.form, piece.form.parts[of.stage]
        values: dict[str, torch.Tensor] = {}
        slots: dict[str, GradientSlot] = {}
        for edge in incoming[of.stage]:
            tensor = self._take((edge.value, of.stage, of.micro_batch, of.replica, False))
            if edge.has_gradient and run.training:
                tensor, slots[edge.value] = arrive(tensor)
            values[edge.value] = tensor
        is_last = of.stage == form.last
        of_loss = {n: values[n] for n in form.graph.outputs if n in values} if is_last else {}
        # Of an image that ranks share, each moves its part to its device, not all of it.
        shared = self.split is not None and of.stage == 0
        given: dict[str, Any] = {n: values.pop(n) if n in values else piece.inputs[n] for n in part.inputs}
        given = given if shared else self._here(given)
        values.clear()
        began = self.clock.now()
        part.place = self.place
        draws = RandomDraws(run.seed, run.step, piece.number, self.forms.device)
        with torch.set_grad_enabled(run.training), self.forms.modes():
            if run.training:
                with self.statistics.collecting(form, of.stage, piece.number, len(run.weights)):
                    made, token = self._execute(of.stage, piece, given, draws)
            else:
                made, token = self._execute(of.stage, piece, given, draws)
            whole = of.stage > 0 or self.split is None or self.split.is_first
            term = made.pop(LOSS_TERM, None)
            if term is not None:
                loss = self._noted_loss(of, piece, term)
            else:
                loss = self._loss(of, piece, made | of_loss) if is_last and whole else None
        roots: dict[str, GradientEdge | None] = {}
        for edge in outgoing[of.stage] if whole else ():
            tensor = made[edge.value]
            if edge.has_gradient and run.training:
                roots[edge.value] = get_gradient_edge(tensor) if tensor.requires_grad else None
            for user in edge.targets:
                self._made[edge.value, user, of.micro_batch, of.replica, False] = tensor.detach()
        if run.training:
            self._flights[of.stage, of.micro_batch, of.replica] = _SavedForward(roots, slots, loss, token)
        self._ended("forward", of, began)

    def _execute(
        self, stage: int, piece: RankMicroBatch, given: dict[str, Any], draws: RandomDraws
    ) -> tuple[Values, torch.Tensor | None]:
        part = piece.form.parts[stage]
        if self.split is None or stage > 0:
            return self.execute(part, given, draws), None
        if self.split.takes_loss and not self.keep_outputs:
            return self.split.run_loss(part, given, piece.targets, draws)
        return self.split.run(part, given, draws)

    def _loss(self, of: Forward, piece: RankMicroBatch, made: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The weighted loss of a micro-batch, from what the model returns."""
        recording, part = piece.form.recording, piece.form.parts[of.stage]

        def look(ref: Ref) -> Any:
            if ref.kind == "value":
                return made[ref.name] if ref.name in made else self._here(piece.inputs[ref.name])
            return recording.constants[ref.name] if ref.kind == "constant" else part.get_parameter(ref.name)

        output = fill(recording.result, look)
        if self.keep_outputs:
            self._run.outputs[of.micro_batch] = output
        if self.loss is None or (not self._run.training and piece.targets is None):
            return None
        self.place.call = "loss"
        return self._noted_loss(of, piece, self.loss(output, self._here(piece.targets)))

    def _noted_loss(self, of: Forward, piece: RankMicroBatch, loss: torch.Tensor) -> torch.Tensor | None:
        """The loss with the weight of its micro-batch; its value, or this rank's term of it, is noted."""
        if self._run.training:
            check_loss(loss, EngineError)
        # A copy: some losses (mse_loss on a CPU) are a number in memory of the size of the output.
        self._run.losses[of.micro_batch] = loss.detach().clone()
        return loss * (piece.weight * self._run.scale) if self._run.training else None

    def _backward(self, of: Backward, incoming: Sequence[Sequence[Edge]], outgoing: Sequence[Sequence[Edge]]) -> None:
        flight = self._flights.pop((of.stage, of.micro_batch, of.replica))
        roots: list[GradientEdge] = []
        gradients: list[torch.Tensor] = []
        if flight.loss is not None:
            roots.append(get_gradient_edge(flight.loss))
            gradients.append(torch.ones_like(flight.loss))
        if flight.token is not None:
            roots.append(get_gradient_edge(flight.token))
            gradients.append(torch.zeros_like(flight.token))
        for edge in outgoing[of.stage]:
            if not edge.has_gradient or edge.value not in flight.roots:
                continue
            back = [self._take((edge.value, u, of.micro_batch, of.replica, True)) for u in reversed(edge.targets)]
            if (root := flight.roots[edge.value]) is not None:
                total = back[0]
                for gradient in back[1:]:
                    total = total + gradient
                roots.append(root)
                gradients.append(total)
            del back
        slots, flight = flight.slots, _SavedForward({}, {}, None)
        began = self.clock.now()
        if roots:
            torch.autograd.backward(roots, gradients)
        del roots, gradients
        layouts, device = self._run.pieces[of.micro_batch].form.layouts, self.forms.device
        for edge in incoming[of.stage]:
            if edge.has_gradient:
                got = slots[edge.value].gradient
                if got is None:
                    layout = layouts[edge.value]
                    got = torch.zeros(layout.shape, dtype=layout.dtype, device=device)
                self._made[edge.value, of.stage, of.micro_batch, of.replica, True] = got
        self._ended("backward", of, began)

    # Moving

    def _agree(self) -> None:
        """Check, once in a run, that all ranks were given the same: before the first message, and after the last
        forward."""
        agree, self._run.agree = self._run.agree, None
        if agree is not None:
            agree()

    def _here(self, data: Any) -> Any:
        """A micro-batch of the user's data on this rank's device."""
        device = self.forms.device
        read = substitute(data, ImageRows, lambda rows: rows.to(device))
        return substitute(read, torch.Tensor, lambda t: t.to(device, non_blocking=True))

    def _take(self, key: Key) -> torch.Tensor:
        """A value or gradient that a compute uses: made on this rank, or received."""
        if key in self._made:
            return self._made.pop(key)
        self._agree()
        with self.place.communicating():
            return self._coming.pop(key).wait()

    def _layout(self, transfer: Send | Receive) -> TensorLayout:
        return self._run.pieces[transfer.micro_batch].form.layouts[transfer.value]

    def _receive(self, to: Receive) -> None:
        assert self.p2p is not None
        layout = self._layout(to)
        labels = (to.stage, to.micro_batch, to.replica, layout.nbytes)
        kind, name = "gradient" if to.gradient else "value", str(to)

        def done(stream: str, start: Moment, end: Moment) -> None:
            self.record(stream, kind, name, start, end, *labels)

        with self.place.communicating():
            self._coming[to.key] = self.p2p.receive(layout, to.source, self._tags[to.key], done)

    def _send(self, of: Send) -> None:
        assert self.p2p is not None
        layout = self._layout(of)
        labels = (of.stage, of.micro_batch, of.replica, layout.nbytes)
        kind, name = "gradient" if of.gradient else "value", str(of)

        def done(stream: str, start: Moment, end: Moment) -> None:
            self.record(stream, kind, name, start, end, *labels)

        with self.place.communicating():
            self._going = [going for going in self._going if not going.ended()]
            self._going.append(self.p2p.send(self._made.pop(of.key), layout, of.target, self._tags[of.key], done))

    # Notes

    def _at(self, doing: str, of: Forward | Backward) -> None:
        if self.idle_state is not None:
            self.idle_state.enter(of.stage)
        place = self.place
        place.stage, place.doing, place.micro_batch, place.call = of.stage, doing, of.micro_batch, ""

    def _reduced(self, share: SharedParameters, start: float, end: float, nbytes: int) -> None:
        self.record("reduce", "reduce", f"R{share.stages[0]}", start, end, share.stages[0], -1, 0, nbytes)

    def _ended(self, kind: str, of: Forward | Backward, began: Moment) -> None:
        ended = self.clock.now()
        waits = self.messages.waits if self.messages is not None and isinstance(began, float) else []
        # What waited for a neighbour's message was not computed; on a GPU the stream goes on meanwhile.
        for since, until in waits:
            self.record(COMPUTE, kind, str(of), began, since, of.stage, of.micro_batch, of.replica)
            began = until
        waits.clear()
        self.record(COMPUTE, kind, str(of), began, ended, of.stage, of.micro_batch, of.replica)
        self.gauge.sample()

    def _edges(self, form: RecordedStages) -> tuple[list[list[Edge]], list[list[Edge]]]:
        depth = form.last + 1
        incoming: list[list[Edge]] = [[] for _ in range(depth)]
        outgoing: list[list[Edge]] = [[] for _ in range(depth)]
        for edge in form.edges:
            outgoing[edge.source].append(edge)
            for target in edge.targets:
                incoming[target].append(edge)
        return incoming, outgoing
