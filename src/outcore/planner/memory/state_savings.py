"""What a policy for parameters, gradients and optimizer state changes in a step: memory at every moment, and time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outcore.cost.costs import Costs
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.step_memory import MemoryCurve
from outcore.planner.memory.buckets import OffloadableParams
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.state_policy import StatePolicy
from outcore.planner.memory.state_residency import change_by_moment

__all__ = ["StateSavings"]


@dataclass(frozen=True)
class StateSavings:
    """What a policy for state changes in a step."""

    policy: StatePolicy
    bytes: npt.NDArray[np.int64]
    """Less (negative) or more at every moment of the plain step."""
    time_s: float

    @classmethod
    def of(
        cls,
        policy: StatePolicy,
        offloadable: OffloadableParams,
        plain: MemoryCurve,
        costs: Costs,
        optimizer: OptimizerCost,
        tier: OffloadTarget,
        seconds: tuple[float, float],
    ) -> StateSavings:
        """The effect of a policy on what can leave.

        Args:
            policy: where state lives.
            offloadable parameters: the parameters that can leave.
            plain: the step without it.
            costs: of the calls.
            optimizer: what it keeps per parameter.
            tier: where state goes.
            seconds: of forward and of backward.
        """
        changed = change_by_moment(policy, offloadable, plain, costs, optimizer)
        return cls(policy, changed, _time_s(policy, offloadable, optimizer, tier, *seconds))


def _time_s(
    policy: StatePolicy,
    offloadable: OffloadableParams,
    optimizer: OptimizerCost,
    tier: OffloadTarget,
    forward_s: float,
    backward_s: float,
) -> float:
    """What the step takes longer: of what passes while something is computed, only what is left."""
    total = sum(item.bytes for item in offloadable.items)
    slow = min(tier.in_bytes_per_s, tier.out_bytes_per_s)
    time_s = 0.0
    if policy.optimizer == "offload":
        time_s += optimizer.state_bytes({item.name: item.bytes for item in offloadable.items if item.trained}) / slow
    if policy.parameters == "offload":
        once = total / tier.in_bytes_per_s
        time_s += max(0.0, once - forward_s) + total / slow
        if policy.stage_bytes is not None:
            out_s = total / tier.out_bytes_per_s if policy.gradients == "offload" else 0.0
            time_s += max(0.0, max(once, out_s) - backward_s)
    if policy.gradients == "offload":
        time_s += total / tier.in_bytes_per_s
    return time_s
