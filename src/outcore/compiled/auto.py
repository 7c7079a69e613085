"""Compiled or not, whichever trains faster within the budget: both are tried with the user's own batch.

What compiling brings differs by more than predictions can tell (a network of large products hardly gains, one of many
small operations gains half of its time), so it is measured: a few steps under the plan of each, after which the model
is as it was. Compiling has to win by some percent; where it cannot be done, does not fit or is not faster, the model is
managed call by call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from outcore.compiled.install import is_compiled
from outcore.errors import PlanError
from outcore.graph.record.capture import arguments_as_called
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.structure import device_of, leaves
from outcore.machine.clock import wall_s

__all__ = ["faster_of"]

_FASTER = 0.97
"""What a compiled step may take at most of one that is not."""
_STEPS = 3


def faster_of(within: Callable[..., nn.Module], asked: Mapping[str, Any]) -> nn.Module:
    """Put a model under the faster of its two plans; returns the model.

    Args:
        within: `outcore.within`.
        asked: its arguments.

    Raises:
        PlanError: neither fits; the one that names the smaller budget.
    """
    model: nn.Module = asked["model"]
    quiet = asked["quiet"]
    seconds: dict[bool, float] = {}
    refusals: list[PlanError] = []
    for compiled in (False, True):
        try:
            within(**{**asked, "compile": compiled, "quiet": True})
        except PlanError as refused:
            refusals.append(refused.with_traceback(None))
            continue
        if is_compiled(model.__dict__.get("forward")) == compiled:
            seconds[compiled] = _step_s(model, asked["args"], asked["kwargs"], asked["loss"])
    if not seconds and len(refusals) == 2:
        raise min(refusals, key=lambda refused: refused.least_bytes or sys.maxsize)
    wins = True in seconds and seconds[True] <= _FASTER * seconds.get(False, float("inf"))
    if not quiet:
        found = {True: "compiled", False: "not compiled"}
        shown = [f"{found[k]} {1e3 * s:.1f} ms" for k, s in seconds.items()]
        print(f"outcore: a step takes {', '.join(shown)}; {found[wins]}", file=sys.stderr)
    if not wins:
        within(**{**asked, "compile": False})
    return model


def _step_s(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, loss: Callable[[Any], torch.Tensor] | None
) -> float:
    """What a forward and backward take, the fastest of some; the model is put back as it was."""
    from outcore.compiled.trial_step import total_of, with_content

    device = device_of(model)
    given, named = with_content(*arguments_as_called(model, args, kwargs), device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [(p, p.grad) for p in parameters]
    before = ModelState(model, state_tensors(model), outer=False)
    taken = []

    def step() -> None:
        output = model(*given, **named)
        (loss(output) if loss is not None else total_of(output)).backward()

    try:
        for _ in range(1 + _STEPS):
            for p in parameters:
                p.grad = None
            taken.append(wall_s(step, device))
    finally:
        before.restore()
        for p, gradient in gradients:
            p.grad = gradient
        for _, tensor in leaves((given, named), torch.Tensor):
            if tensor.requires_grad and tensor.is_leaf:
                tensor.grad = None
    return min(taken[1:])
