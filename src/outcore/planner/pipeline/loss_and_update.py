"""What a training step takes beside its network: the loss and the optimizer's step.

A plan is made of the network alone, because that is what is cut, replicated and scheduled. A step is more: the loss,
which of a segmentation is as large as the last feature maps, and the update. `outcore profile` counts both, so a plan
that leaves them out promises a faster step than the same step on the same screen. They are found here from the job,
the way `outcore.cost.profile` finds them, and become part of the planner's weights: the loss of the call that makes
the output, and so of the last stage; the update of every stage by its parameters.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from outcore.cost.costs import Costs
from outcore.cost.fixed_times import batch_costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.estimate import estimate_optimizer
from outcore.cost.predicted.step_time import measure_optimizer
from outcore.cost.training_network import capture_training
from outcore.errors import OutcoreError
from outcore.graph import Graph
from outcore.job import Job
from outcore.machine import Device, Machine
from outcore.planner.pipeline.call_weights import CallWeight, CallWeights

_ADAM = OptimizerCost("given", 2.0)


@dataclass(frozen=True, slots=True)
class LossAndUpdate:
    """The seconds of a step that are not the network's, for the batch that the network was recorded with."""

    loss: tuple[CallWeight, ...] = ()
    """Its calls."""
    update_s: float = 0.0
    """Of all parameters on one device."""
    optimizer: OptimizerCost = _ADAM
    """What the optimizer keeps and needs."""

    @classmethod
    def of(
        cls,
        job: Job,
        graph: Graph,
        costs: Costs,
        machine: Machine,
        size: int | None = None,
        *,
        measured: bool = False,
    ) -> LossAndUpdate:
        """Those of a job on a machine's first device, by estimate.

        Args:
            job: what is trained.
            graph: of its model alone.
            costs: of that.
            machine: what it would run on.
            size: of the batch; the job's own by default.
            measured: whether the update is run, here.
        """
        whole = None
        if job.loss is not None:
            with contextlib.suppress(OutcoreError):  # a loss that cannot be recorded
                whole = capture_training(job, size)
        known = batch_costs(whole, machine) if whole is not None else None
        made = cls.between(graph, costs, machine.devices[0], whole, known, job.update)
        if job.optimizer is None:
            return replace(made, update_s=0.0)  # as `outcore profile` times a job that does not say how it learns
        if not measured:
            return made
        timing = measure_optimizer(graph.module.model, job.optimizer, machine.devices[0].kind)
        return replace(made, update_s=max(timing.median_s, timing.dispatch_s))

    @classmethod
    def between(
        cls, graph: Graph, costs: Costs, device: Device, whole: Graph | None, known: Costs | None, optimizer: Any
    ) -> LossAndUpdate:
        """The same from graphs and costs that are known: of the network alone, and with its loss."""
        kept = OptimizerCost.of(optimizer, device.kind)
        timing = estimate_optimizer(costs, device, kept)
        update_s = max(timing.median_s, timing.dispatch_s)
        loss: tuple[CallWeight, ...] = ()
        if whole is not None and known is not None:
            rows = CallWeights.of(whole, known).calls
            loss = tuple(row for name, row in rows.items() if name not in graph.calls)
        return cls(loss, update_s, kept)

    def added(self, weights: CallWeights, graph: Graph) -> CallWeights:
        """Weights with the loss and the update in them."""
        kept = self.optimizer
        weights = replace(
            weights,
            state_per_parameter=kept.state_per_parameter,
            update_workspace=(kept.workspace_per_parameter, kept.workspace_per_largest),
        )
        moved = (3 + 2 * kept.state_per_parameter) * sum(weights.parameters.values())
        if self.update_s and moved:
            weights = replace(weights, update_bytes_per_s=moved / self.update_s)
        made = [graph.values[name].producer for name in graph.outputs]
        last = next((name for name in reversed(made) if name is not None), None)
        if last is None:
            return weights
        rows = (weights.calls[last], *self.loss)
        longer = replace(
            rows[0],
            forward_s=sum(row.forward_s for row in rows),
            backward_s=sum(row.backward_s for row in rows),
            host_forward_s=sum(row.host_forward_s for row in rows),
            host_backward_s=sum(row.host_backward_s for row in rows),
            # A network without fixed times has none with its loss either: what is not known is not nothing.
            fixed_forward_s=sum(row.fixed_forward_s for row in rows) if rows[0].fixed_forward_s else 0.0,
            fixed_backward_s=sum(row.fixed_backward_s for row in rows) if rows[0].fixed_backward_s else 0.0,
        )
        return replace(weights, calls={**weights.calls, last: longer})
