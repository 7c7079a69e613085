"""Policies for what a training step keeps between steps: parameters, gradients, the optimizer's state.

Values have a policy each (`outcore.planner.memory.evaluate`); state has one per kind, because all of it is used in
every step, in an order that is known:

| kind | `keep` | `offload` |
|---|---|---|
| parameters | on the device | at home below it; come for forward and backward and leave when they were updated |
| optimizer | on the device | at home; visits the device for the update, flat buffer by flat buffer |
| gradients | on the device | go home as they arrive, come back for the update |

The update happens in ``optimizer.step()``, or in *backward*, flat buffer by flat buffer as soon as a flat buffer's
gradients are there: nothing then holds all gradients at once, and what was updated leaves while backward still runs.
Updating in backward is exact only if nothing is done between ``backward()`` and ``step()``, so it is never chosen
unless asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from outcore.errors import PlanError

_FLAT_BUFFER_BYTES = 32 * 2**20

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
    flat_buffer_bytes: int = _FLAT_BUFFER_BYTES
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
        """The settings that differ from the defaults, as JSON."""
        plain = asdict(StatePolicy())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}


def ladder(parameters: Mapping[str, int]) -> tuple[StatePolicy, ...]:
    """Policies for state that keep less and less on the device, the cheapest first.

    A bucket is a small part of all, so that little is here at once; a parameter larger than the window comes alone.
    """
    total = sum(parameters.values())
    if not total:
        return (StatePolicy(),)
    flat_buffer = min(_FLAT_BUFFER_BYTES, total // 16)
    window = StatePolicy(
        "offload", "offload", "offload", stage_bytes=9 * flat_buffer // 4, flat_buffer_bytes=flat_buffer
    )
    return StatePolicy(), StatePolicy(optimizer="offload", flat_buffer_bytes=flat_buffer), window
