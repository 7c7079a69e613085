"""Are the fused gradients those of the model?

The last member of a lane is run by itself, by its own forward, on the same batch, and every gradient is compared. It
costs one step of one member, once per recording, and catches what no table of rules can promise: a layer of a new
torch version, a module that does more than its type says. The last member is taken because a rule that only looks at
the first is the usual mistake.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from outcore.fusion.call import rnn_weights_anywhere
from outcore.fusion.values import member_of
from outcore.graph.preserve import ModelState, state_tensors

if TYPE_CHECKING:
    from outcore.fusion.lane import Lane
    from outcore.fusion.program import Program

__all__ = ["disagreement"]

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-3}


def disagreement(lane: Lane, objective: str, program: Program, args: tuple[Any, ...]) -> str | None:
    """The name of a parameter whose fused gradient is not the model's own; none if all are."""
    slot = len(lane) - 1
    training = lane.trainings[objective][slot]
    buffers = {name: t.clone() for name, t in lane.stack.buffers.items()}
    before = ModelState(training, state_tensors(training))
    names = [n for n in lane.steppers[objective].names if lane.stack.parameters[n].requires_grad]
    own = [lane.stack.member(n, slot) for n in names]
    try:
        outcome = lane.forward(objective, program, args, alone=False)
        grads = lane.gradients(objective, outcome.losses, alone=False)
        before.restore()
        with rnn_weights_anywhere(), lane.autocast():
            loss = training(*member_of(args, slot))[0]
        expected = torch.autograd.grad(loss, own, allow_unused=True)
    finally:
        before.restore()
        with torch.no_grad():
            for name, content in buffers.items():
                lane.stack.buffers[name].copy_(content)
    weight = 1.0 if lane.weights is None else float(lane.weights[slot])
    scale = max((float(g.abs().max()) for g in expected if g is not None and g.numel()), default=0.0)
    low = any(enabled for _, enabled, _ in program.recording.ambient.autocast)
    for name, wanted in zip(names, expected, strict=True):
        found = grads.get(name)
        if (wanted is None) != (found is None):
            return name
        if wanted is None or found is None or not wanted.numel():
            continue
        tolerance = 0.1 if low else _TOLERANCE.get(wanted.dtype, 0.1)
        error = float((found[slot] - weight * wanted).abs().max())
        if not error <= tolerance * max(scale * abs(weight), 1e-12) and math.isfinite(scale):
            return f"{name} (by {error:.1e} where gradients reach {scale:.1e})"
    return None
