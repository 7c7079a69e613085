"""Making one device's step fit: the one ladder that `outcore plan`, `outcore.plan` and `outcore train` go up.

    plain       the step fits as it is
    policies    what backward needs is recomputed, offloaded or encoded: the same bits (`outcore.planner.memory`)
    tiles       the early part runs tile by tile: the same sums in another order; where norms over the whole image are
                in the way and further passes are allowed, with those

The order is that of what it costs the user. The first rung that holds is taken; if none does, the refusal names the
least budget that would. Everything is predicted: nothing is run, and the model may be on the meta device, so a plan
that is made before a run is the one that the run makes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from outcore.cost.costs import Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.loss_memory import usual_loss_bytes
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.machine import Machine
from outcore.machine.units import format_bytes, format_time
from outcore.planner.memory.copy_schedule import tier_of
from outcore.planner.memory.plan import MemoryPlan, plan_memory
from outcore.program import Program, Timeline
from outcore.program.plan.document import Plan
from outcore.stream.managed_forward import StreamSettings, planned
from outcore.stream.plan.step_document import StreamedStep

_SMALL = 2**26
"""Inputs of so many bytes are always worth a plan that holds them whole."""


@dataclass(frozen=True)
class OneDeviceStep:
    """A training step on one device, and how it was made to fit."""

    rung: Literal["plain", "policies", "tiles"]
    plan: MemoryPlan | StreamedStep

    @property
    def time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.plan.time_s

    @property
    def peak_bytes(self) -> int:
        """Predicted peak, the loss in it."""
        return self.plan.peak_bytes

    @property
    def program(self) -> Program:
        """The step as a program of one stage."""
        return self.plan.program

    def simulate(self) -> Timeline:
        """The timeline of a step, with its memory."""
        return self.plan.simulate()

    def document(self) -> Plan:
        """The plan as a document."""
        return self.plan.document()

    def __str__(self) -> str:
        how = {"plain": "plain", "policies": "with policies for saved tensors", "tiles": "in tiles"}[self.rung]
        return f"{how}: {format_time(self.time_s)} a step, peak {format_bytes(self.peak_bytes)} (predicted)"


def fit_one_device(
    graph: Graph,
    costs: Costs,
    machine: Machine,
    budget_bytes: int,
    *,
    optimizer: OptimizerCost,
    loss_bytes: int | None = None,
    plain_s: float | None = None,
    plain_bytes: int | None = None,
    image_bytes: int = 0,
    statistics: bool = False,
    tiles_only: bool = False,
) -> OneDeviceStep:
    """The first rung of the ladder that holds.

    Args:
        graph: of the network in training, at the size of a step.
        costs: of its calls on the machine's first device.
        machine: what it will run on.
        budget_bytes: the most a step may hold.
        optimizer: what its state takes.
        loss_bytes: what the loss holds beside the output, with its targets; without it, what a loss usually does.
        plain_s: what a plain step takes with its loss and the optimizer's, where that is known.
        plain_bytes: and holds.
        image_bytes: of the inputs, what lies on the device while tiles run; images that are read lazily do not.
        statistics: whether further passes over an image for norms over the whole of it are accepted.
        tiles_only: leave out what needs the whole image on the device.

    Raises:
        PlanError: nothing fits; names the smallest budget that was found.
        StreamError: only tiles are wanted, and nothing can be streamed.
    """
    device, beside = machine.devices[0], usual_loss_bytes(graph) if loss_bytes is None else loss_bytes
    refused: PlanError | None = None
    inputs = sum(graph.values[name].bytes for name in graph.inputs)
    if not tiles_only and 2 * inputs >= budget_bytes and inputs >= _SMALL:
        taken = f"its inputs alone take {format_bytes(inputs)}"
        refused = PlanError(f"a training step cannot be done within {format_bytes(budget_bytes)}: {taken}")
    elif not tiles_only:
        try:
            made = plan_memory(
                graph,
                costs,
                # The network alone is taken to hold its outputs throughout; with its loss, a plain step may hold less.
                budget_bytes=None if plain_bytes is not None and plain_bytes <= budget_bytes else budget_bytes,
                optimizer=optimizer,
                tier=tier_of(machine),
                memory_bytes_per_s=device.bandwidth_bytes_per_s,
                loss_bytes=beside,
            )
            made = replace(made, budget_bytes=budget_bytes, known_plain_s=plain_s, known_plain_bytes=plain_bytes)
            return OneDeviceStep("policies" if made.policy else "plain", made)
        except PlanError as error:
            refused = error
    wanted = StreamSettings(budget_bytes, optimizer, beside, statistics, device=device.kind, image_bytes=image_bytes)
    return OneDeviceStep("tiles", planned(graph, wanted, costs, refused).beside_plain(plain_s, plain_bytes))


def simulate_tiles(
    plan: Plan,
    graph: Graph,
    costs: Costs,
    machine: Machine,
    *,
    optimizer: OptimizerCost,
    loss_bytes: int | None = None,
    plain_s: float | None = None,
) -> Timeline:
    """The timeline of a step by a plan that streams: tile by tile, with the memory that `fit_one_device` counts.

    Args:
        plan: says tiles under ``stream``.
        graph: of the network in training, at the size of a step.
        costs: of its calls on the machine's first device.
        machine: what it would run on.
        optimizer: what its state takes.
        loss_bytes: what the loss holds beside the output, with its targets.
        plain_s: what a plain step takes with its loss and the optimizer's, where that is known.

    Raises:
        PlanError: the plan has no tiles.
    """
    if plan.stream is None:
        raise PlanError("the plan has no tiles: nothing stands under stream")
    beside = usual_loss_bytes(graph) if loss_bytes is None else loss_bytes
    wanted = StreamSettings(None, optimizer, beside, by_hand=plan.stream, device=machine.devices[0].kind)
    return planned(graph, wanted, costs).beside_plain(plain_s, None).simulate()
