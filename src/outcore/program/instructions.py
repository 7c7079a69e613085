"""The instructions of a rank.

Instructions are issued in order. `Forward`, `Backward` and `OptimizerStep` compute, one after the other. All others
return at once: a `Receive` provides a buffer, a `Send` offers a value, and the bytes move when both have been issued;
a forward waits for the values it uses, a backward for the gradients of all consumers, which it adds, and an optimizer
step for the reduction of its stage. So values are sent while other things are computed, and nothing blocks but real
dependencies.

`replica` counts copies of the network over the whole program. `stage` of a transfer is the stage that *uses* the
value, also when the gradient comes back from it: with value, micro-batch and replica it names the transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from outcore.documents.schema import ListOf, MapOf, check
from outcore.documents.typed_schema import record_of
from outcore.errors import ProgramError
from outcore.program.script import Script, action_from_json, action_to_json

Key: TypeAlias = tuple[str, int, int, int, bool]
"""Value, using stage, micro-batch, replica, whether the gradient: the name of a transfer."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage's forward on one micro-batch."""

    stage: int
    micro_batch: int
    replica: int = 0
    script: Script = ()

    def __str__(self) -> str:
        return f"F{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage's backward on one micro-batch, and add the gradients of its parameters up."""

    stage: int
    micro_batch: int
    replica: int = 0
    script: Script = ()

    def __str__(self) -> str:
        return f"B{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Offer a value, or its gradient, to another rank."""

    value: str
    stage: int
    source: int
    target: int
    micro_batch: int
    replica: int = 0
    gradient: bool = False

    @property
    def key(self) -> Key:
        """What names the transfer."""
        return (self.value, self.stage, self.micro_batch, self.replica, self.gradient)

    def __str__(self) -> str:
        return f"{self.value}{'†' if self.gradient else ''}.{self.micro_batch}→{self.target}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Provide a buffer for a value, or its gradient, from another rank."""

    value: str
    stage: int
    source: int
    target: int
    micro_batch: int
    replica: int = 0
    gradient: bool = False

    @property
    def key(self) -> Key:
        """What names the transfer."""
        return (self.value, self.stage, self.micro_batch, self.replica, self.gradient)

    def __str__(self) -> str:
        return f"{self.value}{'†' if self.gradient else ''}.{self.micro_batch}←{self.source}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Add a stage's gradients over the ranks that hold a copy of it; each of them issues it."""

    stage: int
    group: tuple[int, ...]

    def __str__(self) -> str:
        return f"R{self.stage}"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Update the parameters of a stage on this rank."""

    stage: int

    def __str__(self) -> str:
        return f"U{self.stage}"


Compute: TypeAlias = Forward | Backward
Instruction: TypeAlias = Forward | Backward | Send | Receive | Reduce | OptimizerStep

_NAMES: dict[str, type[Instruction]] = {
    "forward": Forward,
    "backward": Backward,
    "send": Send,
    "receive": Receive,
    "reduce": Reduce,
    "step": OptimizerStep,
}
_KINDS = {kind: name for name, kind in _NAMES.items()}
_OMITTED = {"replica": 0, "gradient": False, "script": ()}


def instruction_to_json(instruction: Instruction) -> dict[str, Any]:
    """One instruction as a dictionary, without what has its usual value."""
    row: dict[str, Any] = {"do": _KINDS[type(instruction)]}
    for field in fields(instruction):
        value = getattr(instruction, field.name)
        if field.name == "script":
            value = [action_to_json(action) for action in value]
        if isinstance(value, tuple):
            value = list(value)
        if value != _OMITTED.get(field.name, ...) and value != []:
            row[field.name] = value
    return row


def instruction_from_json(row: Mapping[str, Any]) -> Instruction:
    """The instruction that `instruction_to_json` wrote, or that was written by hand."""
    values = {name: value for name, value in row.items() if name != "do"}
    kind = _NAMES.get(str(row.get("do", "")))
    if kind is None:
        raise ProgramError(f"no instruction {row.get('do')!r}; there are {', '.join(_NAMES)}")
    plain = {name: value for name, value in values.items() if name != "script" or "script" not in kind.__slots__}
    check(plain, record_of(kind, "script"), str(row["do"]), ProgramError)
    check(values.get("script", []), ListOf(MapOf()), f"{row['do']}: script", ProgramError)
    if "group" in values:
        values["group"] = tuple(values["group"])
    if "script" in values:
        values["script"] = tuple(action_from_json(action) for action in values["script"])
    return kind(**values)
