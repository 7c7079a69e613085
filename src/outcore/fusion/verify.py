"""Whether the fused gradients are those of the model.

The last member of a group is run by its own forward on the same batch, and every gradient is compared. It costs one
step of one member, once per recording, and catches what no table of rules can promise: a layer of a new torch version,
a module that does more than its type says. The last member is taken because a rule that only looks at the first is the
usual mistake.

Some networks amplify rounding without bound (normalisation over two samples), so that no two ways of summing agree. A
difference counts only if it is larger than what the model itself does when its weights change by a rounding or two, or
when it computes in full instead of half precision (PointNet's gradients are off by as much as they are large).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outcore.fusion.program.call import rnn_weights_anywhere
from outcore.fusion.program.values import member_of
from outcore.graph.record.preserve import ModelState, state_tensors

if TYPE_CHECKING:
    from outcore.fusion.group import Group
    from outcore.fusion.program.program import StackedProgram

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-3}
_LOW_PRECISION = 0.1
_LIKELY_NOISE = 30.0
"""How many times the model's own change by rounding a difference may be."""
_LIKELY_LOW_NOISE = 3.0
"""Under autocast: how many times the difference that autocast itself makes to the model's gradients."""

Gradients = Sequence[Tensor | None]


def disagreement(group: Group, objective: str, program: StackedProgram, args: tuple[Any, ...]) -> str | None:
    """The name of a parameter whose fused gradient is not the model's own; None if all are."""
    slot = len(group) - 1
    training = group.trainings[objective][slot]
    buffers = {name: t.clone() for name, t in group.stack.buffers.items()}
    before = ModelState(training, state_tensors(training))
    names = [n for n in group.steppers[objective].names if group.stack.parameters[n].requires_grad]
    own = [group.stack.member(n, slot) for n in names]

    def own_gradients(*, full: bool = False) -> Gradients:
        before.restore()
        with rnn_weights_anywhere(), torch.autocast(group.device.type, enabled=False) if full else group.autocast():
            loss = training(*member_of(args, slot))[0]
        return torch.autograd.grad(loss, own, allow_unused=True)

    try:
        outcome = group.forward(objective, program, args, own_model=False)
        fused = group.gradients(objective, outcome.losses, own_model=False)
        weight = 1.0 if group.weights is None else float(group.weights[slot])
        found = [None if (g := fused.get(n)) is None else g[slot] / weight for n in names]
        low = any(enabled for _, enabled, _ in program.recording.ambient.autocast)
        again = partial(own_gradients, full=True) if low else partial(_rounded, own, own_gradients)
        return _compare(names, found, own_gradients(), low, again)
    finally:
        before.restore()
        with torch.no_grad():
            for name, content in buffers.items():
                group.stack.buffers[name].copy_(content)


def _compare(names: Sequence[str], found: Gradients, expected: Gradients, low: bool, again: Any) -> str | None:
    scale = max((float(g.abs().max()) for g in expected if g is not None and g.numel()), default=0.0)
    if not math.isfinite(scale):
        return None
    noise: Gradients | None = None
    for i, (name, ours, theirs) in enumerate(zip(names, found, expected, strict=True)):
        if (ours is None) != (theirs is None):
            return name
        if ours is None or theirs is None or not theirs.numel():
            continue
        error = float((ours - theirs).abs().max())
        if error <= (_LOW_PRECISION if low else _TOLERANCE.get(theirs.dtype, _LOW_PRECISION)) * max(scale, 1e-12):
            continue
        noise = again() if noise is None else noise
        other = noise[i]
        likely = _LIKELY_LOW_NOISE if low else _LIKELY_NOISE
        if other is None or not error <= likely * float((other - theirs).abs().max()):
            return f"{name} (by {error:.1e} where gradients reach {scale:.1e})"
    return None


def _rounded(own: Sequence[Tensor], own_gradients: Any) -> Gradients:
    """The gradients with every weight changed by a rounding or two."""
    kept = [p.detach().clone() for p in own]
    generator = torch.Generator(own[0].device).manual_seed(0)
    try:
        with torch.no_grad():
            for p in own:
                noise = torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device)
                p.mul_(1 + torch.finfo(p.dtype).eps * noise.sign() * 2)
        found: Gradients = own_gradients()
        return found
    finally:
        with torch.no_grad():
            for p, content in zip(own, kept, strict=True):
                p.copy_(content)
