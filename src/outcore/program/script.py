"""The second level of a program: what happens to single values inside one forward or backward.

A script is ordered, and its order is its timing: `Run` computes some of the stage's calls, and whatever stands between
two of them happens between them. Copies start where they stand and run beside the computing; `Wait` is where a fetched
value must have come back.

    forward   Run(conv1) Run(bn1) Evict(conv1:out) Drop(bn1:out) Run(relu1) Release(conv1:out) Encode(relu1:out) …
    backward  Fetch(conv1:out) Run(…) Decode(relu1:out) Wait(conv1:out) Recompute(bn1:out) Run(bn1) Drop(bn1:out) …

Where an image is computed tile by tile, a `Pass` says what its tiles compute and what they read of passes before it;
its `Tile` actions follow. A value that a pass makes is whole when the last of its tiles is done, so whoever reads it
comes later; backward goes through the passes in the other direction, and runs every tile once more:

    forward   Pass(a) Tile(a, 0) Tile(a, 1) … Run(tail)
    backward  Run(tail) Pass(a, gradient) Tile(a, 0) Tile(a, 1) …

A script without `Run` or `Tile` leaves the stage's computing whole: before the first action of a forward, after the
last of a backward. Whatever is still held for the micro-batch is freed when its backward ends.

Executors look actions up by call (`layout_of`). An action stands after the forward of the call whose `Run` precedes it,
or before the backward of the call whose `Run` follows it; an executor that runs the user's own code knows these calls
and nothing of the script's order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from outcore.documents.schema import check
from outcore.documents.typed_schema import record_of
from outcore.errors import ProgramError
from outcore.program.policies import OFFLOAD, RECOMPUTE, Policy
from outcore.program.policies import Encode as EncodePolicy


@dataclass(frozen=True, slots=True)
class Run:
    """Compute some calls of the stage."""

    calls: tuple[str, ...]
    time_s: float = 0.0
    saves: int = 0
    """Bytes of the values it makes that later actions drop, evict or encode."""
    bytes: int = 0
    """What is held while it runs beside such values: weights, gradients, kept values, workspace."""
    reads: tuple[str, ...] = ()
    """Values of passes, or of runs between them, that it starts from."""
    makes: tuple[str, ...] = ()
    """Values that later passes read."""


@dataclass(frozen=True, slots=True)
class Evict:
    """Copy a value to the slower tier; its memory is free when the copy ends, or at its `Release` if it has one."""

    value: str
    bytes: int = 0
    released: bool = False
    """Whether a `Release` follows."""


@dataclass(frozen=True, slots=True)
class Release:
    """Go on when an evicted value is gone; its memory is free from here on."""

    value: str
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """Free a value: it will be recomputed, or was needed for the last time."""

    value: str
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start to copy an evicted value back."""

    value: str
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Continue when the fetched value is on the device."""

    value: str


@dataclass(frozen=True, slots=True)
class Recompute:
    """Recompute a dropped value from values that are on the device."""

    value: str
    calls: tuple[str, ...] = ()
    bytes: int = 0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Encode:
    """Replace a value by a smaller encoding, which frees `bytes`."""

    value: str
    codec: str
    bytes: int = 0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decode:
    """Replace an encoding by its value, which takes `bytes`."""

    value: str
    codec: str
    bytes: int = 0
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pass:
    """Begin a pass over the tiles of an image: `count` of them follow, each once."""

    name: str
    count: int
    calls: tuple[str, ...] = ()
    """What every tile computes."""
    reads: tuple[str, ...] = ()
    """Values of earlier passes and runs that its tiles read: whole before it begins."""
    makes: tuple[str, ...] = ()
    """Values that are whole when its last tile is done: maps, statistics, sums."""
    on_host: tuple[str, ...] = ()
    """Those that are put together in host memory."""
    ahead: int = 0
    """Tiles whose pixels are read while another is computed."""
    gradient: bool = False
    """Whether its tiles run with gradients on and are sent back at once."""
    saves: int = 0
    """Bytes of the maps that it puts together, held until they are dropped or the backward ends."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Compute one tile of the pass that is under way."""

    name: str
    """The pass."""
    index: int
    kind: int = 0
    """Tiles of one kind take the same time and memory."""
    time_s: float = 0.0
    again_s: float = 0.0
    """Of that, running it forward once more."""
    bytes: int = 0
    """What is held while it runs beside the maps: the tile, gradients of maps, workspace."""


Action: TypeAlias = Run | Evict | Release | Fetch | Wait | Drop | Recompute | Encode | Decode | Pass | Tile
Script: TypeAlias = tuple[Action, ...]

_KINDS: dict[str, type[Action]] = {
    kind.__name__.lower(): kind
    for kind in (Run, Evict, Release, Fetch, Wait, Drop, Recompute, Encode, Decode, Pass, Tile)
}


_OMITTED = {"saves", "released", "reads", "makes", "on_host", "ahead", "gradient", "again_s", "kind"}
"""Fields that are left out where they say nothing."""


def action_to_json(action: Action) -> dict[str, Any]:
    """One action as a dictionary."""
    row: dict[str, Any] = {"do": type(action).__name__.lower()}
    for each in fields(action):
        value = getattr(action, each.name)
        if each.name not in _OMITTED or value:
            row[each.name] = list(value) if isinstance(value, tuple) else value
    return row


def action_from_json(row: dict[str, Any]) -> Action:
    """The action that `action_to_json` wrote."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items() if name != "do"}
    kind = _KINDS.get(str(row.get("do", "")))
    if kind is None:
        raise ProgramError(f"no script action {row.get('do')!r}; there are {', '.join(_KINDS)}")
    check(
        {name: v for name, v in row.items() if name != "do"},
        record_of(kind),
        f"script action {row['do']}",
        ProgramError,
    )
    return kind(**values)


@dataclass(frozen=True)
class ScriptLayout:
    """The actions of a forward and a backward, by value and by call."""

    policies: dict[str, Policy] = field(default_factory=dict)
    """Value -> what the actions on it amount to."""
    leaves_after: dict[str, str] = field(default_factory=dict)
    """Value -> the call after whose forward it is dropped, evicted or encoded."""
    released_after: dict[str, list[str]] = field(default_factory=dict)
    """Call -> values whose copy out must be over after its forward."""
    released_before: dict[str, list[str]] = field(default_factory=dict)
    """Call -> values whose copy out must be over before its backward."""
    fetched_before: dict[str, list[str]] = field(default_factory=dict)
    """Call -> values that start to come back before its backward."""


def layout_of(forward: Script, backward: Script) -> ScriptLayout:
    """Lay a pair of scripts out by call.

    >>> layout_of((Run(("a",)), Drop("x"), Run(("b",))), (Run(("b",)), Run(("a",)))).leaves_after
    {'x': 'a'}
    """
    found = ScriptLayout()
    call = ""
    for action in forward:
        match action:
            case Run(calls):
                call = calls[-1]
            case Drop(value):
                found.policies[value] = RECOMPUTE
                found.leaves_after[value] = call
            case Encode(value, codec):
                found.policies[value] = EncodePolicy(codec)
                found.leaves_after[value] = call
            case Evict(value):
                before = found.policies.get(value)
                found.policies[value] = EncodePolicy(before.codec, True) if before is not None else OFFLOAD
                found.leaves_after.setdefault(value, call)
            case Release(value):
                found.released_after.setdefault(call, []).append(value)
    call = ""
    for action in reversed(backward):
        match action:
            case Run(calls):
                call = calls[0]
            case Release(value):
                found.released_before.setdefault(call, []).insert(0, value)
            case Fetch(value):
                found.fetched_before.setdefault(call, []).insert(0, value)
    return found
