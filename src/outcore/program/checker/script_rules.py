"""The rules of scripts: what is evicted, encoded or tiled inside a forward is whole again for its backward.

Of passes over tiles: every tile once, nothing is read before it is whole, every pass is sent back. A value that a pass
makes is a sum over its tiles, or put together from them: it is whole when the last one is done, and not before. So a
pass, or a run between passes, may begin when all that it reads is whole and still there. Backward is the other
direction: a pass is sent back when everything that read what it makes has been, because only then the gradients of that
are whole. The order of tiles within a pass is free: their sums come in another order, no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outcore.program.checker.rules import InstructionAt, refuse
from outcore.program.instructions import Backward, Forward
from outcore.program.script import Decode, Drop, Encode, Evict, Fetch, Pass, Recompute, Release, Run, Script, Tile, Wait


def check_scripts(forward: InstructionAt, backward: InstructionAt | None, calls: Sequence[str] = ()) -> None:
    """Raise `ProgramError` if the scripts of a micro-batch use what is not there.

    Args:
        forward: of the micro-batch.
        backward: of the same; None where nothing is trained.
        calls: of the stage.
    """
    assert isinstance(forward.instruction, Forward)
    script = forward.instruction.script
    back = backward.instruction.script if backward is not None and isinstance(backward.instruction, Backward) else ()
    check_calls(forward, script, calls)
    check_passes(forward, script, backward, back)
    _check_values(forward, script, backward or forward, back)


def _check_values(forward: InstructionAt, script: Script, backward: InstructionAt, back: Script) -> None:
    gone: set[str] = set()
    fetching: set[str] = set()
    encoded: dict[str, str] = {}
    leaving: set[str] = set()
    dropped: set[str] = set()
    for spot, actions in ((forward, script), (backward, back)):
        for action in actions:
            match action:
                case Evict(value) if value in gone:
                    refuse(spot, f"its script evicts {value!r}, which is gone already")
                case Evict(value, _, released):
                    gone.add(value)
                    leaving |= {value} if released else set()
                case Release(value) if value not in leaving:
                    refuse(spot, f"its script releases {value!r}, which is not on its way out")
                case Release(value):
                    leaving.discard(value)
                case Drop(value) if value in dropped or value in gone:
                    refuse(spot, f"its script drops {value!r}, which is not there")
                case Drop(value):
                    dropped.add(value)
                case Recompute(value):
                    dropped.discard(value)
                case Fetch(value) if value not in gone:
                    refuse(spot, f"its script fetches {value!r}, which was not evicted")
                case Fetch(value) if value in leaving:
                    refuse(spot, f"its script fetches {value!r}, which was not released")
                case Fetch(value):
                    gone.discard(value)
                    fetching.add(value)
                case Wait(value) if value not in fetching:
                    refuse(spot, f"its script waits for {value!r}, which was not fetched")
                case Encode(value, codec):
                    encoded[value] = codec
                case Decode(value, codec) if encoded.get(value) != codec:
                    refuse(spot, f"its script decodes {value!r} from {codec}; it is encoded as {encoded.get(value)}")
    if gone:
        refuse(backward, f"{min(gone)!r} was evicted and is never fetched")


def check_passes(forward: InstructionAt, script: Script, backward: InstructionAt | None, back: Script) -> None:
    """Raise `ProgramError` if the passes of a forward, and of its backward if there is one, break a rule.

    Args:
        forward: the instruction.
        script: its script.
        backward: the instruction; None where nothing is trained.
        back: its script.
    """
    if not any(isinstance(action, Pass | Tile) for action in (*script, *back)):
        return
    there = _forward(forward, script)
    if backward is not None:
        _backward(backward, back, there)


def check_calls(spot: InstructionAt, script: Script, calls: Sequence[str]) -> None:
    """Raise `ProgramError` if a forward whose script says what is computed leaves out a call of its stage."""
    said = {call for action in script if isinstance(action, Run | Pass) for call in action.calls}
    if said and (missing := [call for call in calls if call not in said]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        refuse(spot, f"its script never computes {missing[0]!r}{more}")


@dataclass
class _Done:
    """What a forward has computed, in order."""

    steps: list[Pass | Run] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)
    """Values that are there."""

    def readers(self, of: Pass | Run) -> list[Pass | Run]:
        """The steps that read what one makes."""
        return [step for step in self.steps if set(step.reads) & set(of.makes)]


class _Tiles:
    """The pass that is under way, and its tiles that are done."""

    def __init__(self, spot: InstructionAt) -> None:
        self.spot = spot
        self.current: Pass | None = None
        self.done: set[int] = set()

    def begin(self, action: Pass) -> None:
        """Begin a pass; the one before must have computed all its tiles."""
        self.end(f"{action.name!r} begins")
        self.current, self.done = action, set()

    def compute(self, tile: Tile) -> bool:
        """One more tile; whether it was the last."""
        now = self.current
        if now is None or tile.name != now.name:
            under = "no pass is" if now is None else f"{now.name!r} is"
            refuse(self.spot, f"its script computes tile {tile.index} of {tile.name!r} while {under} under way")
        if not 0 <= tile.index < now.count:
            refuse(self.spot, f"its script computes tile {tile.index} of {tile.name!r}, which has {now.count} tiles")
        if tile.index in self.done:
            refuse(self.spot, f"its script computes tile {tile.index} of {tile.name!r} twice")
        self.done.add(tile.index)
        return len(self.done) == now.count

    def end(self, when: str) -> None:
        """Refuse what begins while tiles are missing."""
        if self.current is None or len(self.done) == self.current.count:
            return
        missing = sorted(set(range(self.current.count)) - self.done)
        shown = ", ".join(map(str, missing[:4])) + (", …" if len(missing) > 4 else "")
        refuse(
            self.spot, f"{when} in its script, and of {self.current.name!r} the tiles {shown} have not been computed"
        )


def _forward(spot: InstructionAt, script: Script) -> _Done:
    there, tiles = _Done(), _Tiles(spot)
    for action in script:
        match action:
            case Pass():
                if any(isinstance(step, Pass) and step.name == action.name for step in there.steps):
                    refuse(spot, f"its script begins {action.name!r} twice")
                tiles.begin(action)
                _check_reads(spot, action, there.whole)
                there.steps.append(action)
            case Tile():
                if tiles.compute(action) and tiles.current is not None:
                    there.whole |= set(tiles.current.makes)
            case Run():
                tiles.end(f"{_named(action)} begins")
                _check_reads(spot, action, there.whole)
                if action.reads or action.makes:
                    if _key(action) in map(_key, there.steps):
                        refuse(spot, f"its script computes {_named(action)} twice")
                    there.steps.append(action)
                there.whole |= set(action.makes)
            case Drop(value):
                there.whole.discard(value)
    tiles.end("the forward ends")
    return there


def _backward(spot: InstructionAt, script: Script, there: _Done) -> None:
    tiles = _Tiles(spot)
    steps = {_key(step): step for step in there.steps}
    sent = {_key(step) for step in there.steps if isinstance(step, Pass) and step.gradient}
    for action in script:
        match action:
            case Pass() | Run():
                tiles.begin(action) if isinstance(action, Pass) else tiles.end(f"{_named(action)} begins")
                if (step := steps.get(_key(action))) is None:
                    if isinstance(action, Pass):
                        refuse(spot, f"its script sends {action.name!r} back, which no forward ran")
                    continue
                if _key(action) in sent:
                    refuse(spot, f"its script sends {_named(action)} back twice")
                if isinstance(action, Pass) and isinstance(step, Pass):
                    _check_same(spot, action, step)
                for reader in there.readers(step):
                    if _key(reader) not in sent:
                        refuse(spot, f"its script sends {_named(step)} back before {_named(reader)}, which reads it")
                if isinstance(action, Pass):  # its tiles run again
                    _check_reads(spot, step, there.whole)
                sent.add(_key(action))
            case Tile():
                tiles.compute(action)
            case Drop(value):
                there.whole.discard(value)
    tiles.end("the backward ends")
    for key, step in steps.items():
        if key not in sent:
            refuse(spot, f"its script never sends {_named(step)} back")


def _check_same(spot: InstructionAt, action: Pass, forward: Pass) -> None:
    if not action.gradient:
        refuse(spot, f"its script runs {action.name!r} again without gradients, for nothing")
    if (action.count, action.calls) != (forward.count, forward.calls):
        refuse(spot, f"its script sends other tiles of {action.name!r} back than forward ran")


def _check_reads(spot: InstructionAt, action: Pass | Run, whole: set[str]) -> None:
    if missing := [value for value in action.reads if value not in whole]:
        refuse(spot, f"its script begins {_named(action)}, which reads {missing[0]!r}: that is not whole there")


def _key(action: Pass | Run) -> tuple[str, ...]:
    return ("pass", action.name) if isinstance(action, Pass) else ("run", *action.calls, "", *action.makes)


def _named(action: Pass | Run) -> str:
    return repr(action.name if isinstance(action, Pass) else action.calls[0] if action.calls else "a run")
