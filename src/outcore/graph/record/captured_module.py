"""A captured model that runs.

`CapturedModule` replays the recording that fits the call: same shapes, dtypes, flags and modes
(`outcore.graph.record.keys`), and the same in every attribute, global name and closure that it read
(`outcore.graph.reads.snapshot`). Another key is recorded when it first appears, and kept. Where the model looks at
data, several recordings may belong to one key; they are tried in turn, and if none fits the data, a new one is made.
What changes in every call is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from outcore.graph.record.keys import key_of
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.record.recording import Mismatch, Recording
from outcore.graph.record.versions import ChangeCounter
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
            before = ModelState(self.model, state_tensors(self.model))
            try:
                return recording.run(self.model, tensors)
            except Mismatch:
                before.restore()
        return self.keep(self._record(self.model, args, kwargs), args, kwargs).run(self.model, tensors)
