"""Policies for what a training step keeps between steps: parameters, gradients, the optimizer's state.

Values have a policy each (`outcore.planner.keeping`); state has one per kind, because all of it is used in every step,
in an order that is known:

| kind | `keep` | `offload` |
|---|---|---|
| parameters | on the device | at home below it; come for forward and backward and leave when they were updated |
| optimizer | on the device | at home; visits the device for the update, parcel by parcel |
| gradients | on the device | go home as they arrive, come back for the update |

The update happens in ``optimizer.step()``, or in *backward*, parcel by parcel as soon as a parcel's gradients are
there: nothing then holds all gradients at once, and what was updated leaves while backward still runs. Updating in
backward is exact only if nothing is done between ``backward()`` and ``step()``, so it is never chosen unless asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from outcore.cost.memory import MemoryCurve
from outcore.cost.optimizer import OptimizerCost
from outcore.errors import PlanError
from outcore.planner.transfers import Tier

__all__ = ["Relief", "StatePolicy", "is_full", "ladder", "lot_bytes"]

_PARCEL_BYTES = 32 * 2**20

Where = Literal["keep", "offload"]
When = Literal["step", "backward"]


@dataclass(frozen=True, slots=True)
class StatePolicy:
    """Where state lives and when it is updated.

    >>> StatePolicy.of({"optimizer": "offload"}).parameters
    'keep'
    """

    parameters: Where = "keep"
    gradients: Where = "keep"
    optimizer: Where = "keep"
    update: When = "step"
    stage_bytes: int | None = None
    """Device memory for parameters that are here; None for room for all of them at once."""
    parcel_bytes: int = _PARCEL_BYTES
    """Tensors travel together up to this size."""

    def __post_init__(self) -> None:
        for name, choices in (("parameters", Where), ("gradients", Where), ("optimizer", Where), ("update", When)):
            if (given := getattr(self, name)) not in get_args(choices):
                raise PlanError(f"state: {name} cannot be {given!r}; choose one of {', '.join(get_args(choices))}")
        if self.update == "backward" and self.gradients == "offload":
            raise PlanError("state: gradients that are used up in backward cannot be offloaded; keep them")
        if self.gradients == "offload" and (self.parameters != "offload" or self.stage_bytes is None):
            raise PlanError("state: gradients go where parameters are; offload these too, with stage_bytes")

    @classmethod
    def of(cls, given: StatePolicy | Mapping[str, Any] | None) -> StatePolicy:
        """A policy from what a user wrote."""
        if given is None:
            return cls()
        if isinstance(given, StatePolicy):
            return given
        known = list(cls.__dataclass_fields__)
        if unknown := [name for name in given if name not in known]:
            raise PlanError(f"state: {unknown[0]!r} is not known; give some of {', '.join(known)}")
        return cls(**given)

    @property
    def idle(self) -> bool:
        """Whether everything stays where it is."""
        return (self.parameters, self.gradients, self.optimizer, self.update) == ("keep", "keep", "keep", "step")

    def __str__(self) -> str:
        kinds = [name for name in ("parameters", "gradients", "optimizer") if getattr(self, name) == "offload"]
        names = {"optimizer": "the optimizer's state"}
        moved = ", ".join(names.get(kind, kind) for kind in kinds)
        how = ", updated in backward" if self.update == "backward" else ""
        return f"{moved or 'no state'} below the device{how}"

    def to_json(self) -> dict[str, Any]:
        """What is not the default."""
        plain = asdict(StatePolicy())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}


@dataclass(frozen=True)
class Relief:
    """What a policy for state changes in a step: memory at every moment, and time."""

    policy: StatePolicy
    bytes: npt.NDArray[np.int64]
    """Less (negative) or more at every moment of the plain step."""
    time_s: float

    @classmethod
    def of(
        cls,
        policy: StatePolicy,
        plain: MemoryCurve,
        parameters: Mapping[str, int],
        optimizer: OptimizerCost,
        tier: Tier,
        forward_s: float,
        backward_s: float,
    ) -> Relief:
        """The effect of a policy.

        Of what passes through, up to three lots are here at once: one in use, one coming, one leaving. Gradients are
        gathered before they leave.
        """
        total, lot = sum(parameters.values()), lot_bytes(policy, parameters)
        slow = min(tier.in_bytes_per_s, tier.out_bytes_per_s)
        changes, time_s = [], 0.0
        state_bytes = optimizer.state_bytes(parameters)
        visiting = min(state_bytes, round(3 * optimizer.state_per_parameter * lot))
        window = total if policy.stage_bytes is None else min(total, policy.stage_bytes + lot)
        for moment in plain.moments:
            held, change = moment.bytes, 0
            if policy.optimizer == "offload":
                change += (visiting if moment.phase == "optimizer" else 0) - held.state
            if policy.parameters == "offload":
                change += window - total
            if policy.gradients == "offload" or policy.update == "backward":
                change += min(held.gradients, (1 if moment.phase == "optimizer" else 3) * lot) - held.gradients
            if moment.phase == "optimizer":  # it works on one lot at a time
                change += min(0, round(optimizer.workspace_per_parameter * (lot - total)))
            changes.append(change)
        if policy.optimizer == "offload":
            time_s += state_bytes / slow
        if policy.parameters == "offload":
            once = total / tier.in_bytes_per_s
            time_s += max(0.0, once - forward_s) + total / slow
            if policy.stage_bytes is not None:
                out_s = total / tier.out_bytes_per_s if policy.gradients == "offload" else 0.0
                time_s += max(0.0, max(once, out_s) - backward_s)
        if policy.gradients == "offload":
            time_s += total / tier.in_bytes_per_s
        return cls(policy, np.array(changes, dtype=np.int64), time_s)


def is_full(size: int, needed: int, most_bytes: int) -> bool:
    """Whether a lot of a size cannot take so many bytes more; small tensors (biases) go along with a lot that is full,
    rather than travel alone."""
    if not size or size + needed <= most_bytes or needed <= most_bytes // 64:
        return False
    return needed > most_bytes // 8 or size + needed > 9 * most_bytes // 8


def lot_bytes(policy: StatePolicy, parameters: Mapping[str, int]) -> int:
    """The largest lot."""
    size = largest = 0
    for each in parameters.values():
        needed = -(-each // 512) * 512
        size = needed if is_full(size, needed, policy.parcel_bytes) else size + needed
        largest = max(largest, size)
    return largest


def ladder(parameters: Mapping[str, int]) -> tuple[StatePolicy, ...]:
    """Policies for state that keep less and less on the device, the cheapest first."""
    total, largest = sum(parameters.values()), max(parameters.values(), default=0)
    if not total:
        return (StatePolicy(),)
    parcel = max(largest, min(_PARCEL_BYTES, total // 16))
    window = StatePolicy("offload", "offload", "offload", stage_bytes=9 * parcel // 4, parcel_bytes=parcel)
    return StatePolicy(), StatePolicy(optimizer="offload", parcel_bytes=parcel), window
