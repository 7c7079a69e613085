"""A model whose calls run in micro-batches, by one compiled forward and backward of a micro-batch.

Where a step of the whole batch cannot be compiled within a budget, and every sample was shown to be for itself
(`sample_wise`), the batch is divided into as few equal parts as are within the budget. All that is
known of steps holds for a part; beside it there are the results of all parts with their gradients, the sum of the
parameters' gradients, and what parts keep that do not run again (`micro_batches`). Of how many that is
kept follows from what is left of the budget, and is lowered when steps that are tried take more.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.compiled.compiled_forward import CompiledEntry, CompiledForward
from outcore.compiled.in_place import forward_of, install
from outcore.compiled.lifetimes import StepOfGraph
from outcore.compiled.micro_batch.micro_batches import MicroBatches, divisors
from outcore.compiled.pieces import Piece, PieceChooser
from outcore.compiled.plan import CompiledPlan
from outcore.compiled.room import Room
from outcore.compiled.settings import CompileSettings, Parts
from outcore.compiled.times.host_times import host_and_device_s
from outcore.compiled.torch_partitioner import CompilationError, TracedStep
from outcore.compiled.trial_step import Tried
from outcore.errors import OutcoreError, PlanError
from outcore.graph import Graph
from outcore.graph.record.keys import hooks_of
from outcore.graph.structure import leaves

__all__ = ["ForwardInParts", "install_in_parts"]

_ROOM = 0.95
"""Of what is left, how much a part is chosen for."""
_DIVISIONS = 3
"""Sizes that are tried."""
_FEWER = 6
"""How often fewer parts are kept after a step that took too much."""


class ForwardInParts(CompiledForward):
    """Runs the model's forward in micro-batches."""

    def __init__(self, model: nn.Module, inner: Any, settings: CompileSettings, device: Any = None) -> None:
        super().__init__(model, inner, settings, device)
        self.mixed: set[Hashable] = set()
        """Ways of calling the model for which its samples may depend on each other."""
        self.looking_at: Hashable = None
        self._size = 1
        self.not_kept = 0
        """Parts that would be kept by prediction, and are not."""
        self.left: int | None = None
        """For the values of a part, of the call that was compiled last."""

    @property
    def parts(self) -> Parts:
        """How the batch is divided."""
        assert self.settings.parts is not None
        return self.settings.parts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; of a call that cannot be divided, whole."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception:
            if self.looking_at not in self.mixed or self.looking_at not in self.entries:
                raise
            del self.entries[self.looking_at]
        return super().__call__(*args, **kwargs)

    def key(self, args: Any, kwargs: Any) -> Hashable:
        """What a compiled forward depends on of a call."""
        self.looking_at = super().key(args, kwargs)
        return self.looking_at

    def budget(self, room: Room) -> int | None:
        """What is left for the values of a part."""
        left = super().budget(room)
        self.left = left - self.parts.held_bytes if left is not None else None
        return self.left

    def entry(self, *args: Any, **kwargs: Any) -> CompiledEntry:
        """The model, to be compiled when it is called first."""
        made = super().entry(*args, **kwargs)
        made.chooser.look = self._compare
        return made

    def _compare(self, partition: TracedStep) -> None:
        """Refuse a part that does something else than the whole does."""
        if self.looking_at in self.mixed:
            return
        nodes = [node for node in partition.graph.nodes if node in partition.forward]
        if partition.overwrites or not self.parts.whole.holds_for(nodes, self._size):
            self.mixed.add(self.looking_at)
            raise OutcoreError("a micro-batch is not treated as the same samples are in the whole batch")

    def _run(self, entry: CompiledEntry, args: Any, kwargs: Any) -> Any:
        if self.looking_at in self.mixed:
            return entry.run(*args, **kwargs)
        batch = next((t.shape[0] for _, t in leaves((args, kwargs), torch.Tensor) if t.dim()), 1)
        sizes = [size for size in (batch, *divisors(batch)) if size <= self.parts.size]
        self._size = sizes[0] if sizes else 1
        count, trains, chooser = batch // self._size, torch.is_grad_enabled(), entry.chooser

        def kept() -> int:
            return self._kept(chooser, count) if trains else 0

        return MicroBatches(self._size, kept).run(entry.run, self.model, args, kwargs)

    def _kept(self, chooser: PieceChooser, count: int) -> int:
        """Parts whose values for backward there is room for."""
        pieces = chooser.pieces or chooser.known
        return self._keeps([piece.chosen for piece in pieces], count, chooser.budget_bytes) if pieces else 0

    def _keeps(self, points: list[StepOfGraph], count: int, left: int | None) -> int:
        if left is None:
            return count
        more = (left - super()._reserved(points)) // max(1, sum(p.forward_bytes for p in points))
        return max(0, min(count, 1 + max(0, more)) - self.not_kept)

    def _reserved(self, points: list[StepOfGraph]) -> int:
        """What is reserved for the values of a step, all parts together."""
        kept = max(0, self._keeps(points, self.parts.number, self.left) - 1)
        held = self.parts.held_bytes + kept * sum(p.forward_bytes for p in points)
        return super()._reserved(points) + held

    def _try(self, entry: CompiledEntry, args: Any, kwargs: Any) -> Tried:
        """What steps take, with fewer parts kept until they are within the budget."""
        self.not_kept = 0
        tried = super()._try(entry, args, kwargs)
        budget = self.settings.budget_bytes
        for _ in range(_FEWER if budget is not None else 0):
            pieces = entry.chooser.pieces or entry.chooser.known
            kept = self._kept(entry.chooser, self.parts.number)
            own = self.room(args, kwargs).own_bytes
            over = own + tried.needed_bytes - budget if tried.taken_bytes is not None else budget // 4  # type: ignore[operator]
            if over <= 0 or kept == 0:
                break
            each = sum(piece.chosen.forward_bytes for piece in pieces)
            self.not_kept += min(kept, -(-over // max(1, each)))
            tried = super()._try(entry, args, kwargs)
        return tried

    def plan_of(self, pieces: list[Piece], room: Room) -> CompiledPlan:
        """What was chosen, and what it takes."""
        plan, parts = super().plan_of(pieces, room), self.parts
        points = [piece.chosen for piece in pieces]
        kept = self._keeps(points, parts.number, self.left)
        again_s = (parts.number - kept) * sum(p.forward_s for p in points)
        return replace(
            plan,
            seconds=plan.seconds + (parts.number - 1) * sum(p.seconds for p in points) + again_s,
            fastest_s=parts.fastest_s,
            fastest_bytes=parts.fastest_bytes,
            micro_batches=parts.number,
            kept=kept,
        )


def install_in_parts(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], attempt: CompiledForward, graph: Graph
) -> CompiledPlan | None:
    """Put a forward in micro-batches in a model's place; none if its batch cannot be divided, or none is small enough.

    Args:
        model: the user's.
        args: of a call.
        kwargs: of a call.
        attempt: what was compiled for the whole batch, and is not within the budget.
        graph: what was recorded of the model.
    """
    whole, pieces = attempt.samples, attempt.seen
    recording = graph.executable[1] if graph.executable is not None else None
    if whole is None or len(pieces) != 1 or recording is None or not recording.is_pure or recording.uses_data:
        return None
    if any(hooks_of(module) for module in model.modules()):
        return None
    results = 2 * sum(graph.values[name].bytes for name in graph.outputs)
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    room = attempt.room(args, kwargs)
    fastest = attempt.plan_of(pieces, room)
    parts = Parts(1, whole, results + gradients, fastest.fastest_bytes, fastest.fastest_s)
    left = attempt.budget(room)
    assert left is not None
    sizes = _sizes(whole.batch, pieces[0], left + attempt.corrected_bytes - parts.held_bytes, gradients)
    for size in sizes:
        settings = replace(attempt.settings, parts=replace(parts, size=size), graphs=False)
        try:
            return install(forward_of(model, settings, ForwardInParts), args, kwargs)
        except (PlanError, CompilationError):
            continue
    return None


def _sizes(batch: int, piece: Piece, left: int, gradients: int) -> list[int]:
    """Sizes of parts to try, the fastest by prediction first; the smallest last, should predictions be wrong."""
    seconds: dict[int, float] = {}
    for size in divisors(batch):
        share, count = size / batch, batch // size
        for point in piece.frontier.points:
            peak = gradients + share * (point.peak_bytes - gradients)
            if point.ways or peak > _ROOM * left:
                continue
            part_s = host_and_device_s(point.host_s, share * point.device_s)
            kept = 1 + int((left - peak) // max(1.0, share * point.forward_bytes))
            again_s = max(0, count - kept) * part_s * point.forward_s / max(point.seconds, 1e-12)
            seconds[size] = min(seconds.get(size, float("inf")), count * part_s + again_s)
    best = sorted(seconds, key=lambda size: (seconds[size], -size))[: _DIVISIONS - 1]
    return list(dict.fromkeys([*best, *divisors(batch)[-1:]]))
