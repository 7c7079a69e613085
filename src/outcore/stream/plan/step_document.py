"""What a streamed step takes: as a document, and in words.

It has the interface of `outcore.planner.memory.plan.MemoryPlan` where both can: peak, plain peak, slowdown, policies,
the plan as a document, an explanation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from outcore.cost.costs import Costs
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import OutcoreError
from outcore.graph import Graph
from outcore.machine.units import format_bytes
from outcore.program import Event, Program, Timeline
from outcore.program.plan.document import Plan, PredictedStep
from outcore.program.plan.stage_names import name_stages
from outcore.program.timeline import COMPUTE
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
    image_bytes: int = 0
    """Bytes of images that lie on the device; those that are read tile by tile take nothing there."""
    lazy_bytes: int = 0
    """Bytes that the other images would take there, were they given as tensors."""
    beside_s: float = 0.0
    """What a step takes beside its network: the loss, the update, waits for the host."""

    @classmethod
    def of(
        cls,
        plan: StreamPlan,
        graph: Graph,
        costs: Costs | None,
        budget: int | None,
        reserved: int,
        images: int = 0,
    ) -> StreamedStep:
        """The step that a plan makes of a graph.

        Args:
            plan: the tiles.
            graph: of a call, at the size of a step.
            costs: of its calls.
            budget: the most a step may hold.
            reserved: what is held beside tiles and images.
            images: bytes of the images that lie on the device.
        """
        try:
            plain = memory_curve(graph, costs if costs is not None else account(graph), optimizer=0.0).peak_bytes
        except OutcoreError:  # costs of another size
            plain = memory_curve(graph, account(graph), optimizer=0.0).peak_bytes
        total_s = sum(c.time_s for c in costs.calls.values()) if costs is not None else None
        stages = name_stages(graph, [list(graph.calls)])
        lazy = max(0, sum(graph.values[name].bytes for name in graph.inputs) - images)
        return cls(plan, graph.fingerprint, stages, budget, reserved, plain + reserved, total_s, images, lazy)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak."""
        return self.plan.peak_bytes + self.reserved_bytes + self.image_bytes

    def beside_plain(self, plain_s: float | None, plain_bytes: int | None) -> StreamedStep:
        """The same beside what a plain step is known to take and to hold, with its loss and the update."""
        beside_s = max(0.0, plain_s - self.plain_s) if plain_s is not None and self.plain_s is not None else 0.0
        known_s = self.plain_s if plain_s is None else plain_s
        known_bytes = self.plain_bytes if plain_bytes is None else plain_bytes
        return replace(self, plain_s=known_s, plain_bytes=known_bytes, beside_s=self.beside_s + beside_s)

    @property
    def time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.plan.time_s + self.beside_s

    @property
    def slowdown(self) -> float:
        """Predicted time over that of plain training, could it be done."""
        return self.time_s / self.plain_s if self.plain_s else 1.0

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
        timeline = self.plan.simulate(self.reserved_bytes + self.image_bytes)
        end_s = timeline.step_s
        beside = Event(0, COMPUTE, "step", "loss and update", end_s, end_s + self.beside_s, stage=0)
        return replace(timeline, events=(*timeline.events, beside)) if self.beside_s else timeline

    def document(self) -> Plan:
        """The plan as a document."""
        return Plan(
            graph=self.fingerprint,
            stages=self.stages,
            exactness="reassociated",
            stream=self.plan.document(),
            memory_bytes=self.budget_bytes,
            predicted=PredictedStep(self.time_s, (self.peak_bytes,), 0.0, "tiles"),
            why=tuple(self.explain().splitlines()),
        )

    def explain(self, depth: int = 1, *, timed: bool = True) -> str:
        """What was chosen and what it costs; without times where those of calls are not known."""
        plan, taken = self.plan, self.plan.bytes
        times = f", step {self.slowdown:.2f}x of plain" if self.plain_s and timed else ""
        lines = [
            f"peak {format_bytes(self.peak_bytes)} ({self.peak_bytes / max(1, self.plain_bytes):.2g} of plain "
            f"{format_bytes(self.plain_bytes)}){times} (predicted)",
            f"  {plan.words}",
            "  sums over tiles come in another order: gradients are those of plain training up to rounding "
            "(reassociated), not bit for bit",
        ]
        if self.image_bytes:
            lines.append(f"  {format_bytes(self.image_bytes)} of it are images on the device; read tile by tile, none")
        if self.lazy_bytes:
            lines.append(
                "  images are read tile by tile; as tensors on the device they would take "
                f"{format_bytes(self.lazy_bytes)} more"
            )
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
