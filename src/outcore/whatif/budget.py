"""A step under a memory budget: what `outcore.within` would make of it.

The planner of one device decides what is recomputed, offloaded or encoded; what that costs is inserted as one task of
the device, behind the forward pass. A budget that cannot be met is refused with the smallest that can.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.rough import without_gaps
from outcore.machine.units import format_bytes
from outcore.planner.memory.plan import plan_memory
from outcore.whatif.recorded_step import RecordedStep, Task
from outcore.whatif.recording import SetupRecording

__all__ = ["budgeted_tasks"]


def budgeted_tasks(step: RecordedStep, recording: SetupRecording, budget_bytes: int) -> RecordedStep:
    """The step with what a budget costs.

    Raises:
        PlanError: the budget cannot be met; says the smallest that can.
    """
    device = recording.device
    made = plan_memory(
        recording.profile.graph,
        without_gaps(recording.profile.costs),
        budget_bytes=budget_bytes,
        optimizer=OptimizerCost.of(recording.setup.job.update, device.kind),
        memory_bytes_per_s=device.bandwidth_bytes_per_s,
    )
    plain_s = sum(t.time_s for t in step.tasks.values() if t.resource == "device" and t.phase != "optimizer")
    extra_s = max(0.0, made.slowdown - 1.0) * plain_s
    first = next((n for n, t in step.tasks.items() if t.phase == "backward" and t.resource == "device"), None)
    said = f"within {format_bytes(budget_bytes)}: predicted peak {format_bytes(made.peak_bytes)}"
    held = replace(step, peak_bytes=made.peak_bytes)
    if extra_s <= 0 or first is None:
        return held.noted(f"{said}, nothing is recomputed")
    task = Task("recompute and fetch", "device", extra_s, kind="recompute", phase="backward", high_s=1.5 * extra_s)
    return held.insert(task, place=first).noted(said)
