"""A captured model that runs.

`CapturedModule` replays the recording that fits the call: same shapes, dtypes, flags and modes
(`outcore.graph.record.keys`), and the same in every attribute, global name and closure that it read
(`outcore.graph.reads.snapshot`). Another key is recorded when it first appears, and kept. Where the model looks at
data, several recordings may belong to one key; they are tried in turn, and if none fits the data, a new one is made.
What changes in every call is refused by its name.

Under one key (shapes, flags, modes) a model may be recorded several times, because an attribute or a global name had
another value. `RecordingVersions` finds the one whose reads hold now. If none does, the model is recorded again; and if
that happens in call after call because of the same name, recording has no end: at the third value in three successive
calls an error names it, and the caller gives up recording or raises.

A few versions are kept, so that a value which comes back finds its recording again; the oldest are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from outcore.errors import VaryingError
from outcore.graph.reads.snapshot import Snapshot
from outcore.graph.record.keys import key_of
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.record.recording import Mismatch, Recording
from outcore.graph.structure import leaves

_OUTDATED = 8
"""Recordings of one key that are kept although something they read is not as it was."""

Record = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Recording]


class CapturedModule(nn.Module):
    """The captured model: same results, gradients, buffers, random numbers and state_dict as the original."""

    model: nn.Module
    """The user's model."""

    def __init__(self, model: nn.Module, record: Record) -> None:
        super().__init__()
        # The model's own dictionaries: one set of parameters, buffers and submodules, whoever looks.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["model"] = model  # not a child: it would appear in its own state_dict
        self.recordings: dict[Hashable, list[Recording]] = {}
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """What the model was first recorded with, tensors without content; None where those cannot be made."""
        self._record = record
        self._changes = ChangeCounter()

    @property
    def training(self) -> bool:
        """The model's own flag."""
        return "model" not in self.__dict__ or self.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "model" in self.__dict__:
            self.model.training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.load_state_dict(*args, **kwargs)

    def keep(self, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
        """Remember a recording for calls like this one."""
        if not recording.volatile:
            known = self.recordings.setdefault(key_of(self.model, args, kwargs), [])
            known.append(recording)
            if len(outdated := [r for r in known if not r.holds]) > _OUTDATED:
                known.remove(outdated[0])
        return recording

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; records first where this key, or this way through the data, is new.

        Raises:
            VaryingError: something that the model's code reads has changed in every call; names it.
        """
        tensors = [tensor for _, tensor in leaves((args, kwargs), torch.Tensor)]
        key = key_of(self.model, args, kwargs)
        known = self.recordings.get(key, [])
        valid = [recording for recording in known if recording.holds]
        if known and not valid and known[-1].reads is not None:
            self._changes.count(key, known[-1].reads)
        elif valid:
            self._changes.clear(key)
        if not valid:
            valid = [self.keep(self._record(self.model, args, kwargs), args, kwargs)]
        if any(r.effects is not None and r.effects.hooks and not r.effects.lost for r in valid):
            return self.model(*args, **kwargs)  # which registers its hooks; the next call is another recording
        for recording in valid:
            if not recording.uses_data:
                return recording.run(self.model, tensors)
            before = ModelState(self.model, state_tensors(self.model), outer=False)
            try:
                return recording.run(self.model, tensors)
            except Mismatch:
                before.restore()
        return self.keep(self._record(self.model, args, kwargs), args, kwargs).run(self.model, tensors)


_KEPT = 8
_SUCCESSIVE = 2
"""Calls in a row that may each find another value than all before."""


class _Changing(Protocol):
    def changed(self) -> Iterator[str]:
        """What has changed, each described in words."""


class ChangeCounter:
    """Counts, by key, in how many successive calls the same names were the reason for another recording."""

    def __init__(self) -> None:
        self._streaks: dict[Hashable, dict[str, int]] = {}

    def count(self, key: Hashable, before: _Changing) -> None:
        """Count a call in which no recording is valid; `before` is what the last one read.

        Raises:
            VaryingError: something has changed in every call; names it.
        """
        streaks = self._streaks.get(key, {})
        streaks = self._streaks[key] = {name: streaks.get(name, 0) + 1 for name in before.changed()}
        always = next((name for name, count in streaks.items() if count >= _SUCCESSIVE), None)
        if always is not None:
            error = VaryingError(
                f"{always} changes in every call, and a recording of the model holds one value of it; keep it out of "
                "forward, or give it to forward as a tensor"
            )
            error.what = always
            raise error

    def clear(self, key: Hashable) -> None:
        """Note that a recording is valid in this call."""
        self._streaks.pop(key, None)


@dataclass
class _Known:
    snapshots: dict[int, Snapshot | None] = field(default_factory=dict)
    """By number, the one used last at the end."""
    made: int = 0


class RecordingVersions:
    """The recordings of a model, by key and by what they read."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        self._changes = ChangeCounter()

    def find(self, key: Hashable) -> tuple[Hashable, int]:
        """The key of the recording that is valid now, or of one that is yet to be made.

        Raises:
            VaryingError: something that was read has changed in every call; names it.
        """
        known = self._known.get(key)
        if known is None:
            return key, 0
        latest = next(reversed(known.snapshots))
        for number in reversed(list(known.snapshots)):
            snapshot = known.snapshots[number]
            if snapshot is None or snapshot.holds():
                self._changes.clear(key)
                if number != latest:
                    known.snapshots[number] = known.snapshots.pop(number)
                return key, number
        before = known.snapshots[latest]
        assert before is not None
        self._changes.count(key, before)
        return key, known.made

    def add(self, found: tuple[Hashable, int], snapshot: Snapshot | None) -> list[tuple[Hashable, int]]:
        """Add a recording that was made under a key from `find`; returns keys that are not used any more."""
        key, number = found
        known = self._known.setdefault(key, _Known())
        known.snapshots.pop(number, None)
        known.snapshots[number] = snapshot
        known.made = max(known.made, number + 1)
        dropped = list(known.snapshots)[:-_KEPT]
        for old in dropped:
            del known.snapshots[old]
        return [(key, old) for old in dropped]


def refuse_volatile(recording: Recording, who: str) -> None:
    """Raise `VaryingError` where the numbers of one run are in a recording."""
    if recording.volatile:
        error = VaryingError(
            "what forward draws from Python's or NumPy's generator, or makes outside of torch, changes in every call, "
            f"and {who} would repeat that of one; draw it with torch, or give it to forward as a tensor"
        )
        error.what = "a number that is not torch's"
        raise error
