"""What a streamed step takes: as a document, and in words.

It has the interface of `outcore.planner.memory.plan.MemoryPlan` where both can: peak, plain peak, slowdown, policies,
the plan as a document, an explanation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outcore.cost.costs import Costs
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import OutcoreError
from outcore.graph import Graph
from outcore.machine.units import format_bytes
from outcore.program import Program, Timeline
from outcore.program.plan.document import Plan, PredictedStep
from outcore.program.plan.stage_names import name_stages
from outcore.stream.plan.plan import StreamPlan


@dataclass(frozen=True)
class StreamedStep:
    """A streamed step, and what plain PyTorch would take."""

    plan: StreamPlan
    fingerprint: str
    stages: tuple[tuple[str, ...], ...]
    budget_bytes: int | None
    reserved_bytes: int
    """Bytes of the optimizer's state, and of what the loss holds."""
    plain_bytes: int
    """Predicted peak of plain training."""
    plain_s: float | None

    @classmethod
    def of(cls, plan: StreamPlan, graph: Graph, costs: Costs | None, budget: int | None, reserved: int) -> StreamedStep:
        """From a plan for a graph."""
        try:
            plain = memory_curve(graph, costs if costs is not None else account(graph), optimizer=0.0).peak_bytes
        except OutcoreError:  # costs of another size
            plain = memory_curve(graph, account(graph), optimizer=0.0).peak_bytes
        total_s = sum(c.time_s for c in costs.calls.values()) if costs is not None else None
        stages = name_stages(graph, [list(graph.calls)])
        return cls(plan, graph.fingerprint, stages, budget, reserved, plain + reserved, total_s)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak."""
        return self.plan.peak_bytes + self.reserved_bytes

    @property
    def slowdown(self) -> float:
        """Predicted time over that of plain training, could it be done."""
        return self.plan.time_s / self.plain_s if self.plain_s else 1.0

    @property
    def policy(self) -> Mapping[str, str]:
        """The policies of the untiled tail."""
        return self.plan.rest

    @property
    def program(self) -> Program:
        """A step as a program of one stage, tile by tile."""
        return self.plan.program

    def simulate(self) -> Timeline:
        """The timeline of a step, with its memory."""
        return self.plan.simulate(self.reserved_bytes)

    def document(self) -> Plan:
        """The plan as a document."""
        return Plan(
            graph=self.fingerprint,
            stages=self.stages,
            exactness="reassociated",
            stream=self.plan.document(),
            memory_bytes=self.budget_bytes,
            predicted=PredictedStep(self.plan.time_s, (self.peak_bytes,), 0.0, "tiles"),
            why=tuple(self.explain().splitlines()),
        )

    def explain(self, depth: int = 1) -> str:
        """What was chosen and what it costs."""
        plan, taken = self.plan, self.plan.bytes
        times = f", step {self.slowdown:.2f}x of plain" if self.plain_s else ""
        lines = [
            f"peak {format_bytes(self.peak_bytes)} ({self.peak_bytes / max(1, self.plain_bytes):.2g} of plain "
            f"{format_bytes(self.plain_bytes)}){times} (predicted)",
            f"  {plan.words}",
            "  sums over tiles come in another order: gradients are those of plain training up to rounding "
            "(reassociated), not bit for bit",
        ]
        if taken.boundary:
            lines.append(f"  boundary maps of {format_bytes(taken.boundary)} kept for what follows")
        if plan.keep:
            where = "in host memory" if plan.on_host else f"on the device ({format_bytes(taken.kept)})"
            lines.append(f"  {len(plan.keep)} maps between passes kept {where}, the others made again")
        elif plan.passes > 1:
            lines.append("  maps between passes made again from the image")
        if plan.rest:
            kinds: dict[str, int] = {}
            for how in plan.rest.values():
                kinds[how.partition(":")[0]] = kinds.get(how.partition(":")[0], 0) + 1
            said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            lines.append(f"  what follows runs untiled under policies: {said}")
        if plan.boundary is None:
            lines += [f"  stops before {block}: {reason}" for block, reason in plan.stopped[:3]]
        return "\n".join(lines)
