"""What a streamed step executes, compiled from its scripts: passes, their tiles and the global nodes between, in order.

The scripts name passes and tiles (`outcore.stream.plan.script`); here they become places in what was prepared: which
pass, which of its tiles, how many are read ahead, which maps are in host memory. An executor goes through these steps
and has no order of its own. Scripts are checked first, so whatever comes this far computes every tile once, and sends
every pass back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outcore.errors import ProgramError
from outcore.program import Backward, Forward
from outcore.program.checker.rules import InstructionAt
from outcore.program.checker.script_rules import check_scripts
from outcore.program.script import Pass, Run, Script, Tile
from outcore.stream.plan.passes import TilePasses


@dataclass(frozen=True)
class GlobalsStep:
    """The global nodes before a pass."""

    index: int


@dataclass(frozen=True)
class PassStep:
    """Some tiles of a pass, in order."""

    index: int
    tiles: tuple[int, ...]
    ahead: int
    """Threads that read pixels ahead."""
    gradient: bool
    """Whether tiles are run with gradients on and sent back at once."""


@dataclass(frozen=True)
class TileSchedule:
    """The streamed part of a step, in the order in which it is executed."""

    forward: tuple[GlobalsStep | PassStep, ...]
    backward: tuple[GlobalsStep | PassStep, ...]
    on_host: frozenset[str] = frozenset()
    """Maps that are put together in host memory."""


def compile_tiles(forward: Script, backward: Script, streaming: TilePasses, calls: tuple[str, ...]) -> TileSchedule:
    """The steps of a pair of scripts.

    Args:
        forward: of the step.
        backward: of the same; empty where nothing is trained.
        streaming: the passes that they name.
        calls: of the network.

    Raises:
        ProgramError: a script breaks a rule of programs, or names a pass that is not there.
    """
    back = InstructionAt(0, 1, Backward(0, 0, script=backward)) if backward else None
    check_scripts(InstructionAt(0, 0, Forward(0, 0, script=forward)), back, calls)
    on_host = frozenset(v for action in forward if isinstance(action, Pass) for v in action.on_host)
    return TileSchedule(_steps(forward, streaming), _steps(backward, streaming), on_host)


def _steps(script: Script, streaming: TilePasses) -> tuple[GlobalsStep | PassStep, ...]:
    globals_ = {tuple(n.output for n in stage.globals): i for i, stage in enumerate(streaming.stages) if stage.globals}
    passes = {tuple(stage.makes): i for i, stage in enumerate(streaming.stages)}
    found: list[GlobalsStep | PassStep] = []
    tiles: list[int] = []  # of the pass that is reached next
    for action in reversed(script):
        match action:
            case Tile():
                tiles.append(action.index)
            case Pass():
                index = _place(passes, action.makes, action.name)
                found.insert(0, PassStep(index, tuple(reversed(tiles)), action.ahead, action.gradient))
                tiles = []
            case Run() if action.makes:
                found.insert(0, GlobalsStep(_place(globals_, action.makes, "a run between passes")))
    return tuple(found)


def _place(known: Mapping[tuple[str, ...], int], makes: tuple[str, ...], name: str) -> int:
    if (index := known.get(makes)) is None:
        raise ProgramError(f"{name!r} of the script makes {', '.join(makes)}; nothing in the network makes just that")
    return index
