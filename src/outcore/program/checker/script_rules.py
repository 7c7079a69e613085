"""The rules of scripts: what is evicted, encoded or tiled inside a forward is whole again for its backward."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.program.checker.pass_rules import check_calls, check_passes
from outcore.program.index import InstructionAt, refuse
from outcore.program.instructions import Backward, Forward
from outcore.program.script import Decode, Drop, Encode, Evict, Fetch, Recompute, Release, Script, Wait


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
