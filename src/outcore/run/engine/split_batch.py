"""From a batch to a pass: the ranks agree on what they were given, and each cuts out what it needs.

One exchange of a few numbers per step tells every rank how many samples each replica has and of which shape. A shape
that a rank without data meets for the first time is described to it once. Refused here, on all ranks at once: batches
of one replica that differ between its ranks, replicas without samples, and data missing where a stage reads it.

Where there is one replica, and a batch has a shape that was agreed on before, a rank can predict what the others will
send unless somebody made a mistake: it begins to compute, and reads the exchange before it sends or uses anything
(`ProgramRun.agree`).

The loss of a step is the same on every rank: that of each micro-batch by its share of the samples, in their order
(`run_for_loss`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from outcore.errors import EngineError
from outcore.program.plan.document import Plan
from outcore.run.engine import batch as batches
from outcore.run.engine.step_programs import StepPrograms, TaggedProgram
from outcore.run.engine.worker import ProgramRun, RankMicroBatch, Worker
from outcore.run.ranks.world import World
from outcore.run.stage.recorded_stages import RecordedStages, RecordedStagesByShape
from outcore.stream.source import ImageRows


class BatchSplitter:
    """Takes in batches on one rank."""

    def __init__(
        self,
        world: World,
        plan: Plan,
        forms: RecordedStagesByShape,
        step_programs: StepPrograms,
        *,
        reduction: Literal["mean", "sum"],
        accumulate: int,
        seed: int,
    ) -> None:
        self.world, self.plan, self.forms, self.step_programs = world, plan, forms, step_programs
        self.reduction, self.accumulate, self.seed = reduction, accumulate, seed
        self.replica = world.rank // plan.ranks_per_replica
        self.requests: list[int] = []
        """The `request` that every rank gave to `take` in the last exchange."""
        self._described: dict[int, Any] = {}
        self._agreed: set[int] = set()

    def take(
        self, inputs: Any, targets: Any, *, training: bool, step: int, scale: float = 1.0, request: int = 0
    ) -> tuple[ProgramRun, TaggedProgram]:
        """Agree on a batch with all ranks; returns what is to be run, and the program."""
        inputs, images = batches.stand_ins(inputs) if self.plan.spatial is not None else (batches.in_memory(inputs), {})
        description = batches.describe(inputs) if inputs is not None else None
        count = batches.rows(inputs) if inputs is not None else -1
        mark = batches.fingerprint(description) if description is not None else 0
        answers = self.world.start_numbers([count, mark, step, request])
        later = self.plan.replicas == 1 and mark in self._agreed
        counts, description = ([count], description) if later else self._agree(answers(), step, description)
        if inputs is not None:
            self._agreed.add(mark)
        mine = counts[self.replica]
        pieces = min(self.step_programs.pieces, *counts)
        sizes = batches.parts(mine, pieces)
        has_data = inputs is not None
        whole = inputs if has_data else batches.meta_batch(description)
        cut_inputs = batches.cut(whole, mine, sizes)
        cut_targets = [
            batches.rows_of_sources(t, mine, sum(sizes[:i]), n)
            for i, (t, n) in enumerate(zip(batches.cut(targets, mine, sizes), sizes, strict=True))
        ]
        found: list[RankMicroBatch] = []
        flags, by_size = self.forms.flags(), dict[int, RecordedStages]()
        for i, (part, target) in enumerate(zip(cut_inputs, cut_targets, strict=True)):
            if sizes[i] not in by_size:
                by_size[sizes[i]] = self.forms.find(part, flags, training=training)
            form = by_size[sizes[i]]
            rows: list[Any] = batches.tensors_of(part) if has_data else []
            for at, tensor in enumerate(batches.tensors_of(inputs) if images else ()):
                if (image := images.get(id(tensor))) is not None:
                    rows[at] = ImageRows(image, sum(sizes[:i]), sum(sizes[: i + 1]))
            tensors = dict(zip(form.graph.inputs, rows, strict=True)) if has_data else {}
            weight = sizes[i] / sum(counts) if self.reduction == "mean" else 1.0
            found.append(RankMicroBatch(form, tensors, target, weight / self.accumulate, self.replica * pieces + i))
        if any(piece.form.edges != found[0].form.edges for piece in found):
            raise EngineError("micro-batches of this batch lead through the network in different ways; use equal sizes")
        self._refuse_missing(found[0].form, has_data, targets)
        script = self.step_programs.script(found[0].form.edges, pieces, training=training)
        every = [n / sum(counts) if self.reduction == "mean" else 1.0 for c in counts for n in batches.parts(c, pieces)]
        run = ProgramRun(found, training, self.seed, step, scale, every, sum(counts))
        run.agree = (lambda: self._agree(answers(), step, description)) if later else None
        return run, script

    def _agree(self, table: list[list[int]], step: int, description: Any) -> tuple[list[int], Any]:
        """The samples of every replica, and the description of this replica's batch."""
        self.requests = [row[3] for row in table]
        if any(row[2] != step for row in table):
            steps = ", ".join(f"rank {r}: {row[2]}" for r, row in enumerate(table))
            raise EngineError(f"ranks are at different steps ({steps}); resume all from one checkpoint")
        width = self.plan.ranks_per_replica
        counts, marks = [], []
        for replica in range(self.plan.replicas):
            rows = {r: table[r] for r in range(replica * width, (replica + 1) * width) if table[r][0] >= 0}
            if not rows:
                raise EngineError(f"no rank of replica {replica} was given inputs; give them to rank {replica * width}")
            first = min(rows)
            for rank, row in rows.items():
                if row[:2] != rows[first][:2]:
                    shared = self.world.share(description)  # every rank sees the same table, so every rank comes here
                    differs = batches.difference(shared[first], shared[rank]) or "their descriptions"
                    raise EngineError(
                        f"ranks {first} and {rank} belong to one replica, but were given different batches "
                        f"({differs}); give them the same batch"
                    )
            if rows[first][0] == 0:
                raise EngineError(f"replica {replica} was given 0 samples; give every replica at least 1")
            counts.append(rows[first][0])
            marks.append(rows[first][1])
        if any(row[0] < 0 for row in table):
            description = self._describe(table, marks, description)
        return counts, description

    def _describe(self, table: list[list[int]], marks: list[int], description: Any) -> Any:
        """Describe new shapes to ranks without data; all ranks know which shapes these are."""
        if any(mark not in self._described for mark in marks):
            for row, shared in zip(table, self.world.share(description), strict=True):
                if row[0] >= 0:
                    self._described[row[1]] = shared
        return self._described[marks[self.replica]]

    def _refuse_missing(self, form: RecordedStages, has_data: bool, targets: Any) -> None:
        for stage in form.parts:
            if not has_data and form.needs_inputs(stage):
                raise EngineError(
                    f"rank {self.world.rank} holds stage {stage}, which reads the inputs, but was given none; "
                    "give it the batch of its replica"
                )


def run_for_loss(world: World, worker: Worker, run: ProgramRun, script: TaggedProgram, *, update: bool) -> float:
    """Execute this rank's part of a program and add the losses up over all ranks.

    Args:
        world: all ranks.
        worker: of this rank.
        run: the micro-batches, their shares and what becomes of them.
        script: the program.
        update: whether gradients are reduced and the optimizer steps at the end.
    """
    losses = torch.zeros(len(run.weights), dtype=torch.float64, device="cpu")
    exchange: list[Any] = []

    def tell() -> None:
        for micro_batch, loss in run.losses.items():
            losses[run.pieces[micro_batch].number] = loss.item()
        exchange.append(world.start_sum(losses))

    # On the host losses travel while backwards run; on a GPU, reading them earlier would stop the kernels.
    run.after_forwards = tell if worker.forms.device.type == "cpu" else None
    try:
        worker.run(script.program.ranks[world.rank], script.tags, run, update=update)
        if not exchange:
            tell()
        exchange.pop()()
    finally:
        run.after_forwards = None  # it knows the run: without this, both would live until garbage is collected
        exchange.clear()
    every: list[float] = losses.tolist()
    return sum(weight * loss for weight, loss in zip(run.weights, every, strict=True))
