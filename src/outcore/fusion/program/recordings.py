"""The recordings of an array, by the inputs of its members.

A recording is made when a batch of other shapes, another mode or another precision first appears, and kept. It tells
modules by their identity; where a slot goes to another model of the very same settings, or copies of the members are
tried, recordings are bound to those instead of being made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outcore.fusion.program.call import settings
from outcore.fusion.program.program import StackedProgram
from outcore.fusion.training import MemberTraining
from outcore.graph.record.keys import key_of

Key = tuple[str, torch.dtype | None, tuple[Any, ...]]
"""The key of a recording: the objective, the precision, and the inputs of the model."""
Members = Mapping[str, Sequence[MemberTraining]]
"""The members of an array, by objective."""


class ProgramCache:
    """Programs by key."""

    def __init__(self) -> None:
        self.programs: dict[Key, StackedProgram] = {}

    @staticmethod
    def key(objective: str, low: torch.dtype | None, member: MemberTraining, shown: tuple[Any, ...]) -> Key:
        """The key of the recording of a batch."""
        return objective, low, key_of(member, shown, {})  # type: ignore[return-value]

    @property
    def last(self) -> StackedProgram | None:
        """The one that was made last."""
        return next(reversed(self.programs.values()), None)

    def rebind(self, members: Members) -> dict[Key, Key]:
        """Keep all of them for members whose settings are the same; returns how their keys changed."""
        names = {key: _rekeyed(key, members[key[0]][0]) for key in self.programs}
        self.programs = {names[key]: p.rebound(members[key[0]]) for key, p in self.programs.items()}
        return names

    def copied(self, members: Members) -> ProgramCache:
        """The same for copies of the first members."""
        made = ProgramCache()
        made.programs = {key: replace(p, ways=dict(p.ways), kept={}) for key, p in self.programs.items()}
        made.rebind(members)
        return made


def _rekeyed(key: Key, member: MemberTraining) -> Key:
    """The key of a recording for another first member: it tells modules by their identity."""
    objective, low, (seen, flags, *rest) = key
    own = tuple((id(module), mode) for module, (_, mode) in zip(member.modules(), flags, strict=True))
    return objective, low, (seen, own, *rest)


def same_settings(a: nn.Module, b: nn.Module) -> bool:
    """Whether one recording serves both: no tensor in it that is neither parameter nor buffer."""
    pairs = zip(a.modules(), b.modules(), strict=False)
    own = any(isinstance(v, Tensor) for m in b.modules() for v in m.__dict__.values())
    return not own and all(type(x) is type(y) and settings(x) == settings(y) for x, y in pairs)
