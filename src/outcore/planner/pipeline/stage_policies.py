"""Policies inside the stages of a pipeline: what a stage that does not fit does not keep.

A cut alone decides how much a rank holds, and the cuts that fit a small budget may be slow ones, or there may be none.
The memory planner knows what to recompute, encode or offload on one device; a stage is a network of its own, so it is
asked for every stage that holds too much. With n micro-batches in flight, a stage holds what n of them keep between
their forwards and their backwards, and what one of them needs beside that in its own:

    always + (n - 1) * kept + peak of one <= limit         kept and peak: of a micro-batch, under the policies

Costs are those of the whole batch, and everything in them but parameters grows with it, so a stage is planned as if the
whole batch went through it, with a budget that is larger in the same proportion, and the figures are scaled down.
What draws random numbers is not recomputed in a stage, and copies to the host are waited for where they begin
(`outcore.run.stage.policies`), so offloading adds the time of both copies; it is tried where nothing else is enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outcore.cost.costs import Costs
from outcore.graph import Graph, Value
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.search import fit
from outcore.planner.pipeline.schedule_model import Pipeline
from outcore.program.policies import Policies, Policy, Recompute, parse_policies
from outcore.program.stages import Stage, Stages

_SEARCH_S = 0.15
_TRIES = 3
_HOST = OffloadTarget(10e9, 10e9, least_bytes=2**16)
"""To the host and back, where the machine does not say."""


@dataclass(frozen=True)
class _StageModel:
    """A stage as a step of its own, without its parameters."""

    step: StepModel
    plain_peak: int
    plain_kept: int
    """Bytes that are held between forward and backward."""

    def under(self, stage: Stage, policies: Policies, fraction: float) -> Stage:
        """The stage's figures under policies, for a micro-batch that is a fraction of the batch."""
        found = self.step.evaluate(policies)
        kept = int(found.curve[self.step.turn - 1 : self.step.turn + 1].min())
        saved = max(0, stage.saved_bytes - int(fraction * (self.plain_kept - kept)))
        whole = stage.saved_bytes + stage.workspace_bytes - int(fraction * (self.plain_peak - found.peak_bytes))
        again_s = found.extra_s
        away = [b for name, how in policies.items() if how.offloads and (b := self.step.buffers[name])]
        out_s = back_s = 0.0
        if away:
            again_s -= found.transfers.stall_s if found.transfers is not None else 0.0
            tier = self.step.tier or _HOST
            moved = sum(self.step.held(b, policies[b.name])[0] if policies[b.name].codec else b.bytes for b in away)
            out_s, back_s = moved / tier.out_bytes_per_s, moved / tier.in_bytes_per_s
        return replace(
            stage,
            forward_s=stage.forward_s + fraction * out_s,
            backward_s=stage.backward_s + fraction * (max(0.0, again_s) + back_s),
            saved_bytes=saved,
            workspace_bytes=max(0, whole - saved),
        )


class StagePlanner:
    """Plans what the stages of one network keep."""

    def __init__(self, graph: Graph, costs: Costs, *, tier: OffloadTarget | None = None) -> None:
        self.graph, self.costs, self.tier = graph, costs, tier
        self._models: dict[tuple[tuple[str, ...], bool], _StageModel] = {}
        self._found: dict[tuple[tuple[str, ...], bool, int], dict[str, Policy]] = {}

    @staticmethod
    def can(graph: Graph, costs: object) -> bool:
        """Whether enough is known: the network itself, and costs of every call."""
        return graph.executable is not None and isinstance(costs, Costs)

    def fitted(
        self, stages: Stages, pipeline: Pipeline, fraction: float, limit: float
    ) -> tuple[Stages, dict[str, Policy]] | None:
        """The stages with policies under which every rank is within a limit; none if there are no such policies.

        Args:
            stages: of a cut, with the figures of one micro-batch.
            pipeline: the schedule.
            fraction: of the batch that a micro-batch is.
            limit: bytes that a rank may hold.
        """
        rows, chosen = list(stages.stages), dict[str, Policy]()
        for k in range(len(rows)):
            if self._excess(stages, rows, pipeline, k, limit) <= 0:
                continue
            better = self._fitted_stage(stages, rows, pipeline, k, fraction, limit)
            if better is None:
                return None
            rows[k], policies = better
            chosen |= policies
        made = replace(stages, stages=tuple(rows))
        return (made, chosen) if max(pipeline.peak_bytes(made)) <= limit else None

    def under(self, stages: Stages, policy: Mapping[str, str], fraction: float) -> Stages:
        """Stages with the figures that they have under a plan's policies."""
        wanted = parse_policies(policy)
        rows = []
        for stage in stages.stages:
            model = self._model(stage.calls, moves=any(how.offloads for how in wanted.values()))
            mine = {name: how for name, how in wanted.items() if name in model.step.buffers}
            rows.append(model.under(stage, mine, fraction) if mine else stage)
        return replace(stages, stages=tuple(rows))

    def _excess(self, stages: Stages, rows: Sequence[Stage], pipeline: Pipeline, k: int, limit: float) -> float:
        """Bytes by which the ranks that hold a stage are above the limit."""
        peaks = pipeline.peak_bytes(replace(stages, stages=tuple(rows)))
        ranks = {k, len(rows) - 1 - k} if pipeline.paired else {k}
        return max(peaks[rank] for rank in ranks) - limit

    def _fitted_stage(
        self, stages: Stages, rows: Sequence[Stage], pipeline: Pipeline, k: int, fraction: float, limit: float
    ) -> tuple[Stage, dict[str, Policy]] | None:
        """A stage that keeps as much as it may; one that offloads only if it must."""
        best: tuple[Stage, dict[str, Policy]] | None = None
        for moves in (False, True) if self.tier is not None else (False,):
            model = self._model(rows[k].calls, moves=moves)
            low, high = model.step.floor[0], model.plain_peak
            for _ in range(_TRIES):
                middle = (low + high) // 2 if best is not None or high < model.plain_peak else int(0.75 * high)
                policies = self._policies(rows[k].calls, model, moves=moves, budget=max(low, middle))
                stage = model.under(rows[k], policies, fraction)
                tried = [*rows[:k], stage, *rows[k + 1 :]]
                if self._excess(stages, tried, pipeline, k, limit) <= 0:
                    best = stage, policies
                    low = middle
                else:
                    high = middle
                if high - low <= 0.03 * model.plain_peak:
                    break
            if best is None:  # as little as there can be
                policies = self._policies(rows[k].calls, model, moves=moves, budget=model.step.floor[0])
                stage = model.under(rows[k], policies, fraction)
                if self._excess(stages, [*rows[:k], stage, *rows[k + 1 :]], pipeline, k, limit) <= 0:
                    best = stage, policies
            if best is not None:
                return best
        return None

    def _policies(self, calls: tuple[str, ...], model: _StageModel, *, moves: bool, budget: int) -> dict[str, Policy]:
        key = calls, moves, budget
        if key not in self._found:
            found = fit(model.step, budget, time_limit_s=_SEARCH_S)
            self._found[key] = {n: how for n, how in found.policy.items() if n in model.step.buffers}
        return self._found[key]

    def _model(self, calls: tuple[str, ...], *, moves: bool) -> _StageModel:
        key = calls, moves
        if key not in self._models:
            self._models[key] = _model(self.graph, self.costs, calls, self.tier or _HOST if moves else None)
        return self._models[key]


def _model(graph: Graph, costs: Costs, calls: Sequence[str], tier: OffloadTarget | None) -> _StageModel:
    """The step of some of a network's calls."""
    assert graph.executable is not None
    names = set(calls)
    module, recording = graph.executable
    inside = graph.restrict([call for name, call in graph.calls.items() if name in names])
    values, renamed = rebased(inside)
    steps = [step for step in recording.steps if step.name in names]
    part = replace(inside, values=values, executable=(module, replace(recording, steps=steps)))
    used = {p for call in part.calls.values() for p in call.parameters}
    rows = {}
    for name in part.calls:
        row = costs.calls[name]
        rows[name] = replace(row, saved=tuple(replace(s, of=renamed.get(s.of, s.of)) for s in row.saved))
    sizes = {name: size for name, size in costs.parameters.items() if name in used}
    own = replace(costs, fingerprint=part.fingerprint, calls=rows, parameters=sizes, fixed_bytes=0)
    step = StepModel(part, own, 0.0, tier, draws=False)
    there = np.array([m.bytes.weights + m.bytes.gradients + m.bytes.state for m in step.plain.moments])
    step.base = step.base - there
    plain = step.evaluate({})
    kept = int(plain.curve[step.turn - 1 : step.turn + 1].min()) if len(plain.curve) > step.turn else 0
    return _StageModel(step, plain.peak_bytes, kept)


def rebased(inside: Graph) -> tuple[dict[str, Value], dict[str, str]]:
    """The values of a part of a graph, and other names of their buffers: those of values that another part made arrive
    as tensors, and the first of them names the memory."""
    values: dict[str, Value] = {}
    first: dict[str, str] = {}
    for name, value in inside.values.items():
        base = value.alias_of
        if base is not None and base not in inside.values:
            begun = first.setdefault(base, name)
            value = replace(value, alias_of=None if begun == name else begun)
        values[name] = value
    return values, first


def described(policies: Mapping[str, Policy], stages: Stages) -> list[str]:
    """What each stage does not keep, in a line each."""
    lines = []
    for k, stage in enumerate(stages.stages):
        calls = set(stage.calls)
        mine = [how for name, how in policies.items() if name.partition(":")[0].partition("~")[0] in calls]
        if mine:
            again = sum(isinstance(how, Recompute) for how in mine)
            away = sum(how.offloads for how in mine)
            coded = len(mine) - again - away
            parts = [(again, "recomputed"), (away, "offloaded"), (coded, "encoded")]
            told = ", ".join(f"{count} {what}" for count, what in parts if count)
            lines.append(f"stage {k}: {told} of the values that it would keep")
    return lines
