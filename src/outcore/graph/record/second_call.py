"""Whether what a forward keeps is only kept: a second call computes the same without making it again.

Position indices that a forward makes once and keeps in a dictionary of its module change that dictionary, which no
recording does again. It need not, if every call gives what the first one gave. That is seen by recording a second call
right behind the first, with what the first has kept: `is_only_kept` compares the two.

    first    arange ─▶ div ─▶ (kept)    linear ─▶ add(kept) ─▶ tanh
    second                    (kept)    linear ─▶ add(kept) ─▶ tanh

The second may leave out steps of the first, and do nothing else; what it leaves out has to follow from nothing that
another call may bring: no input, parameter or buffer, no random number. It changes nothing more outside of the model,
and nothing inside of what was kept. Then the first recording stands for every call: it makes again what plain calls
keep, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from outcore.graph.random_calls import may_be_random
from outcore.graph.record.recording import Recording, Ref, Step
from outcore.graph.structure import leaves

__all__ = ["KEPT", "is_only_kept"]

KEPT = "kept: "
"""Before the name of a value of the first call, in the second."""


def is_only_kept(first: Recording, second: Recording) -> bool:
    """Whether the first of two calls in a row may be repeated in the place of both.

    Args:
        first: a recording, which has changed something outside of the model.
        second: of the next call; values of the first that it was given have names that begin with `KEPT`.
    """
    found = _Pairs(first.constants, second.constants, {name: name for name in first.inputs})
    waiting, left_out = iter(first.steps), list[Step]()
    for step in second.steps:
        for candidate in waiting:
            if found.same_call(candidate, step):
                break
            left_out.append(candidate)
        else:
            return False
    left_out += waiting
    if not found.alike(first.result, second.result):
        return False
    if not _written(first) <= _written(second):  # what only a first call writes is no part of every call
        return False
    made, steps = _from_nothing(first.steps)
    return found.kept <= made and all(id(step) in steps for step in left_out)


def _written(recording: Recording) -> set[tuple[str, str]]:
    """The attributes of modules to which a run writes its own tensors."""
    writes = recording.effects.writes if recording.effects is not None else ()
    return {(write.path, write.name) for write in writes if next(leaves(write.template, Ref), None) is not None}


class _Pairs:
    """Values of two recordings that are the same, by name."""

    def __init__(
        self, constants: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor], names: dict[str, str]
    ) -> None:
        self.constants, self.others = constants, others
        self.names = names
        """Of the first, by those of the second."""
        self.kept: set[str] = set()
        """Values of the first call that the second was given."""

    def same_call(self, first: Step, second: Step) -> bool:
        """Whether two steps are one call; what they make is then the same."""
        if (first.kind, first.context, first.answer, first.shapes) != (
            second.kind,
            second.context,
            second.answer,
            second.shapes,
        ):
            return False
        if not (first.target is second.target or first.target == second.target):
            return False
        if len(first.outputs) != len(second.outputs) or len(first.rebinds) != len(second.rebinds):
            return False
        if not self.alike((first.args, first.kwargs), (second.args, second.kwargs)):
            return False
        self.names.update(zip(second.outputs, first.outputs, strict=True))
        self.names.update({b[0]: a[0] for a, b in zip(first.rebinds, second.rebinds, strict=True)})
        return True

    def alike(self, first: Any, second: Any) -> bool:
        """Whether two templates stand for the same."""
        if isinstance(first, Ref):
            return isinstance(second, Ref) and self._same_ref(first, second)
        if type(first) is not type(second):
            return False
        if isinstance(first, (list, tuple)):
            return len(first) == len(second) and all(map(self.alike, first, second))
        if isinstance(first, dict):
            return list(first) == list(second) and all(map(self.alike, first.values(), second.values()))
        if first is second:
            return True
        return not isinstance(first, torch.Tensor) and bool(first == second)

    def _same_ref(self, first: Ref, second: Ref) -> bool:
        if second.kind == "value":
            known = self.names.get(second.name)
            if second.name.startswith(KEPT):
                known = second.name.removeprefix(KEPT)
                self.kept.add(known)
            return first.kind == "value" and first.name == known
        if second.kind == "constant":
            if first.kind != "constant":
                return False
            a, b = self.constants[first.name], self.others[second.name]
            return a is b or (
                a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and bool(torch.equal(a, b))
            )
        return first == second


def _from_nothing(steps: list[Step]) -> tuple[set[str], set[int]]:
    """The values that are the same in every call of the model whatever it is given, and the steps that make them."""
    made: set[str] = set()
    found: set[int] = set()
    for step in steps:
        if step.kind != "function" or may_be_random(getattr(step.target, "__name__", "opaque")):
            continue
        if any(ref.kind != "constant" and ref.name not in made for _, ref in leaves((step.args, step.kwargs), Ref)):
            continue
        if {old for _, old in step.rebinds} <= made:
            found.add(id(step))
            made.update(chain(step.outputs, (new for new, _ in step.rebinds)))
    return made, found
