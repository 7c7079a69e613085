"""Where a script puts each action, looked up by call: what an executor compiles its tables from.

An action stands after the forward of the call whose `Run` precedes it, or before the backward of the call whose `Run`
follows it; an executor that runs the user's own code knows these calls and nothing of the script's order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outcore.program.policies import OFFLOAD, RECOMPUTE, Policy
from outcore.program.policies import Encode as EncodePolicy
from outcore.program.script import Drop, Encode, Evict, Fetch, Release, Run, Script

__all__ = ["ScriptLayout", "layout_of"]


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
