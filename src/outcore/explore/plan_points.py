"""Plans for one device, computed ahead: the frontier of time against memory, each with all that a page shows.

A point says what happens to every buffer (`policy`), block by block, and how the step would go (`timeline`, by the same
simulator as everywhere). Times are those of the planner's model multiplied up to the whole step, as `outcore plan`
prints them; the simulated step stands beside it. `PlanTable.by_hand` changes the policy of whole blocks and simulates
again, which takes milliseconds.

A plan's document is for the model alone, without the loss, which is the user's to call: what the loss saves is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.rough import without_gaps
from outcore.cost.profile import Profile
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.parts import ROOT, ancestors
from outcore.job import Job
from outcore.machine import Machine
from outcore.planner.memory.copy_schedule import tier_of
from outcore.planner.memory.evaluate import StepModel, StepUnderPolicies
from outcore.planner.memory.plan import fastest_by_peak
from outcore.planner.memory.script import link_of, one_stage, stage_of, update_parts
from outcore.planner.memory.search import Assignment, fit, smallest
from outcore.program import Timeline, simulate
from outcore.program.plan.document import Plan, PredictedStep
from outcore.program.plan.stage_names import name_stages
from outcore.program.policies import KEEP, Policies, Policy, kind_of_policy, parse_policy, policies_to_json

__all__ = ["PlanTable", "timeline_json"]

_POINTS = 8
STREAMS = ("compute", "copy out", "copy in", "send", "receive", "reduce")


@dataclass(frozen=True)
class PlanTable:
    """A network's step on one device, and what it takes under any policies."""

    model: StepModel
    shown: Profile
    plain_graph: Graph
    """The model without its loss: what a plan's document is for."""

    @classmethod
    def of(cls, job: Job, shown: Profile, where: Machine) -> PlanTable:
        """The table of a profiled job."""
        device = where.devices[0]
        optimizer = OptimizerCost.of(job.update, device.kind)
        costs = without_gaps(shown.costs)
        model = StepModel(shown.graph, costs, optimizer, tier_of(where), device.bandwidth_bytes_per_s)
        plain = shown.graph if job.loss is None else job.capture(shown.size)
        return cls(model, shown, replace(plain, executable=None))

    @property
    def capacity_bytes(self) -> int:
        """Of the device."""
        return self.shown.device.memory_bytes

    def plain(self) -> Assignment:
        """Plain training: everything is kept."""
        return Assignment({}, self.model.evaluate({}))

    def frontier(self, *, search_s: float = 0.5) -> Iterator[list[Assignment]]:
        """The frontier, again and again with more points, each list from the fastest to the smallest."""
        found = [self.plain(), smallest(self.model, time_limit_s=2 * search_s)]
        yield _frontier(found)
        high, low = (one.outcome.peak_bytes for one in found)
        budgets = [low + (high - low) * k // _POINTS for k in range(1, _POINTS)]
        if low < self.capacity_bytes < high:  # the fastest that fits is what most will look for
            budgets = [self.capacity_bytes, *(b for b in budgets if abs(b - self.capacity_bytes) > (high - low) // 20)]
        for i, budget in enumerate(budgets):
            found.append(fit(self.model, budget, time_limit_s=search_s))
            if i % 3 == 2 or i == len(budgets) - 1:
                yield _frontier(found)

    def by_hand(self, policy: Mapping[str, str], change: Mapping[str, str]) -> Assignment:
        """An assignment in which every buffer that a block makes has another policy, where it can have it.

        Args:
            policy: what it is changed from, by buffer.
            change: block -> keep, recompute, offload or encode.

        Raises:
            PlanError: a name or a policy is not known, or nothing in a block can have it.
        """
        chosen: dict[str, Policy] = {}
        for name, how in policy.items():
            if name not in self.model.buffers:
                raise PlanError(f"no buffer {name!r} in this network")
            chosen[name] = parse_policy(how)
        for path, kind in change.items():
            if path not in self.model.graph.blocks:
                raise PlanError(f"no block {path!r} in this network")
            if kind not in ("keep", "recompute", "offload", "encode"):
                raise PlanError(f"policy {kind!r} is not known; choose keep, recompute, offload or encode")
            changed = 0
            for name in self._inside(path, on_the_way=kind in ("recompute", "keep")):
                options = {kind_of_policy(p): p for p in reversed(self.model.choices(self.model.buffers[name]))}
                if kind == "keep" and name in chosen:
                    del chosen[name]
                    changed += 1
                elif kind in options:
                    chosen[name] = options[kind]
                    changed += 1
            if not changed and kind != "keep":
                raise PlanError(f"nothing that {path or 'the network'} saves for backward can have the policy {kind}")
        outcome = self.model.evaluate(chosen)
        if outcome.time_s == float("inf"):
            raise PlanError("these policies cannot be combined: a recomputed value needs one that is gone by then")
        return Assignment(chosen, outcome)

    def _inside(self, path: str, *, on_the_way: bool) -> list[str]:
        """The buffers that a block makes and backward needs; also those that others are made from again on the way."""
        found = []
        for name, buffer in self.model.buffers.items():
            if buffer.kind == "given" or buffer.born < 0 or not (buffer.savers or on_the_way):
                continue
            block = self.model.graph.calls[self.model.order[buffer.born]].block
            if path in (ROOT, block) or path in ancestors(block):
                found.append(name)
        return found

    def point_json(self, one: Assignment) -> dict[str, Any]:
        """A point with its policies, its blocks and its timeline."""
        step_s = self.shown.step.step_s + one.outcome.extra_s
        timeline = simulate(one_stage(self.model, one.policy), stage_of(self.model), link_of(self.model.tier))
        policies = self.model.resolved(one.policy)
        return {
            "peak_bytes": one.outcome.peak_bytes,
            "time_s": step_s,
            "over_plain": step_s / max(self.shown.step.step_s, 1e-12),
            "plain": not policies,
            "policy": policies_to_json(policies),
            "blocks": self._blocks(policies, one.outcome),
            "timeline": timeline_json(
                timeline, self.model, self.shown.step.optimizer_s, self.shown.step.step_s - self.model.plain_s
            ),
            "moved_bytes": one.outcome.transfers.bytes if one.outcome.transfers is not None else 0,
        }

    def _blocks(self, policies: Policies, outcome: StepUnderPolicies) -> dict[str, dict[str, float]]:
        """Bytes by policy in every block, and the seconds that making them again takes."""
        found: dict[str, dict[str, float]] = {}
        for name, buffer in self.model.buffers.items():
            if buffer.kind == "given" or buffer.born < 0:
                continue
            kind = kind_of_policy(policies.get(name, KEEP))
            block = self.model.graph.calls[self.model.order[buffer.born]].block
            for path in (ROOT, *ancestors(block), block):
                row = found.setdefault(path, {})
                if buffer.savers:
                    row[kind] = row.get(kind, 0) + buffer.bytes
                if name in outcome.recomputed:
                    row["seconds"] = row.get("seconds", 0.0) + buffer.again_s
        return found

    def document(self, one: Assignment) -> Plan:
        """The plan as a document that `outcore verify` and `outcore train` take."""
        graph = self.plain_graph
        calls = {name.partition("~")[0] for name in graph.calls}
        known = {
            name: how
            for name, how in self.model.resolved(one.policy).items()
            if name in graph.values or name.partition("~")[0] in calls
        }
        step_s = self.shown.step.step_s + one.outcome.extra_s
        over = step_s / max(self.shown.step.step_s, 1e-12)
        return Plan(
            graph=graph.fingerprint,
            stages=name_stages(graph, [list(graph.calls)]),
            policy=policies_to_json(known),
            memory_bytes=one.outcome.peak_bytes,
            predicted=PredictedStep(step_s, (one.outcome.peak_bytes,), 0.0, "memory curve"),
            why=(f"{over:.3f}x the time of plain training at {one.outcome.peak_bytes:,} bytes, by prediction",),
        )


def _frontier(found: list[Assignment]) -> list[Assignment]:
    kept = fastest_by_peak(found)
    if not any(one is found[0] for one in kept):  # plain training is shown even where something smaller is as fast
        kept.insert(0, found[0])
    return kept


def timeline_json(
    timeline: Timeline, model: StepModel | None = None, optimizer_s: float = 0.0, beside_s: float = 0.0
) -> dict[str, Any]:
    """A timeline in few bytes: rows of rank, stream, kind, name, start and length in microseconds, bytes.

    Names are positions in the list of calls where an event is the forward or backward of one call. What a step takes
    beside these (`beside_s`) is the wait for the host and, at its end, the update.
    """
    beside_s = max(beside_s, optimizer_s)
    forward: Iterator[int] = iter(range(len(model.order))) if model is not None else iter(())
    backward = iter(list(reversed(model.differentiated))) if model is not None else iter(())
    kinds: dict[str, int] = {}
    rows: list[list[Any]] = []
    for event in timeline.events:
        start_s = event.start_s
        name: str | int = event.name.partition(" ")[2] or event.name
        if model is not None and event.stream == "compute":
            name = next(forward, name) if event.kind == "forward" else name
            name = next(backward, name) if event.kind == "backward" else name
        length = event.end_s - event.start_s
        if event.kind == "step" and model is not None:
            length, name = optimizer_s, "optimizer"
            start_s = timeline.step_s + beside_s - optimizer_s
        if length > 0:
            where = [event.rank, STREAMS.index(event.stream), kinds.setdefault(event.kind, len(kinds))]
            rows.append([*where, name, round(start_s * 1e6, 2), round(length * 1e6, 2), event.bytes, event.stage])
    ranks = list(timeline.memory)
    if model is not None and ranks and ranks[0].bytes:
        ranks[0] = ranks[0].ending_with(update_parts(model.plain))  # the update comes after the script's last action
    return {
        "streams": STREAMS,
        "kinds": list(kinds),
        "events": rows,
        "ranks": len(timeline),
        "step_s": timeline.step_s + beside_s,
        "bubble": timeline.bubble,
        "memory": [
            {"times_us": [round(t * 1e6, 1) for t in m.times_s], "bytes": list(m.bytes), "peak_bytes": m.peak_bytes}
            for m in ranks
        ],
    }
