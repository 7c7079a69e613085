"""From a plan to the programs of a run: one for training, one for evaluation, shorter ones for a last small batch.

The engine asks for the program of so many micro-batches over the values that cross between stages. A batch with fewer
samples than the plan has micro-batches runs a shorter program, but reduces and steps as the full one: a replica that
had nothing to do still takes part, so copies stay equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outcore.errors import PlanError
from outcore.planner.pipeline.lower import SCHEDULE_NAMES
from outcore.program import Edge, OptimizerStep, Program, Reduce, Send, Stages, check, compile_program
from outcore.program.compile import split_first_stage
from outcore.program.instructions import Key
from outcore.program.plan.document import Plan
from outcore.program.written_order import program_in_order


@dataclass(frozen=True, slots=True)
class TaggedProgram:
    """A program with the tags of its transfers."""

    program: Program
    tags: dict[Key, int]


@dataclass
class StepPrograms:
    """Makes programs of a plan."""

    plan: Plan
    stages: Stages
    """The stages as recorded in training."""
    given: Program | None = None
    """A program to run in place of the plan's own schedule."""
    _known: dict[tuple[object, ...], TaggedProgram] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.given is not None:
            check(self.given, self.stages)
            if len(self.given) != self.plan.ranks:
                raise PlanError(f"the program is for {len(self.given)} ranks, the plan for {self.plan.ranks}")

    @property
    def pieces(self) -> int:
        """Micro-batches of a step, in each data-parallel replica."""
        if self.given is not None:
            return 1 + max(c.micro_batch for rank in range(len(self.given)) for c in self.given.computes(rank))
        return self.plan.micro_batches * self.plan.batches

    @property
    def training(self) -> Program:
        """The program of a full step."""
        return self.script(self._edges, self.pieces, training=True).program

    @property
    def _edges(self) -> tuple[Edge, ...]:
        return tuple(replace(edge, bytes=0) for edge in self.stages.edges)

    def script(self, edges: tuple[Edge, ...], pieces: int, *, training: bool) -> TaggedProgram:
        """The program of so many micro-batches over these values."""
        key = (edges, pieces, training)
        if key not in self._known:
            stages = Stages(self.stages.stages, edges, self.stages.ties)
            program = self._train(stages, pieces) if training else self._evaluate(stages, pieces)
            sends = [i.key for rank in program.ranks for i in rank if isinstance(i, Send)]
            self._known[key] = TaggedProgram(program, {k: tag for tag, k in enumerate(sorted(sends), start=1)})
        return self._known[key]

    def _train(self, stages: Stages, pieces: int) -> Program:
        if self.given is not None:
            if pieces == self.pieces and stages.edges == self._edges:
                return self.given
            raise PlanError(
                f"the given program is for {self.pieces} micro-batches of one form; this batch has {pieces}, or "
                "another form: leave it out, or give batches of one size"
            )
        if self.plan.order:
            program = self._ordered(stages, pieces)
        else:
            batches = min(self.plan.batches, pieces)
            program = self._compile(stages, self.plan.schedule, pieces // batches, batches, training=True)
        if pieces == self.pieces:
            return program
        updates = [[i for i in row if isinstance(i, Reduce | OptimizerStep)] for row in self.training.ranks]
        computes = [[i for i in row if not isinstance(i, Reduce | OptimizerStep)] for row in program.ranks]
        return Program(program.name, tuple((*c, *u) for c, u in zip(computes, updates, strict=True)))

    def _ordered(self, stages: Stages, pieces: int) -> Program:
        inverted, replicas = self.plan.schedule == "gems", self.plan.replicas
        program = program_in_order(stages, self.plan.order, inverted=inverted, replicas=replicas, micro_batches=pieces)
        check(program, stages)
        return program

    def _evaluate(self, stages: Stages, pieces: int) -> Program:
        return self._compile(stages, "gpipe", pieces, 1, training=False)

    def _compile(self, stages: Stages, schedule: str, micro_batches: int, batches: int, *, training: bool) -> Program:
        program = compile_program(
            stages,
            SCHEDULE_NAMES[schedule],
            micro_batches=micro_batches,
            batches=batches,
            replicas=self.plan.replicas,
            training=training,
            placement=self.plan.placement,
        )
        return split_first_stage(program, self.plan.parts, self.plan.replicas) if self.plan.parts > 1 else program
