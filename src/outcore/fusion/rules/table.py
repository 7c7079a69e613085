"""How each operation fuses: which rule runs a layer of torch.nn or a function for all members.

What is not here runs by vmap where every operation in it has a batching rule, else member by member; both are right
for whatever computes the same thing on slices as on whole tensors. Random functions are here by name so that members
never share what they draw.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outcore.fusion.program.call import FusedCall, has_hooks
from outcore.fusion.program.values import Stacked
from outcore.fusion.rules import attention as attend
from outcore.fusion.rules.functions import function_rule
from outcore.fusion.rules.modules import module_rule
from outcore.graph.naming import function_name
from outcore.ops.registry import find, of_layer
from outcore.ops.traits import RANDOM


def run(call: FusedCall) -> Any:
    """Run a step for all members by the best rule that applies."""
    if call.modules:
        return _module(call)
    name = function_name(call.target)
    if name in RANDOM:
        return _random(call, name)
    if not call.varies:
        return call.once()
    if call.per_member_args is None:
        rule = function_rule(name)
        made = rule(call) if rule is not None else NotImplemented
        if made is not NotImplemented:
            return made
    return call.batched()


def _module(call: FusedCall) -> Any:
    module = call.module
    op = of_layer(module)
    if op is not None and op.kind == "dropout" and not has_hooks(module):
        whole = 2 if op.dims else None
        rates = [float(m.p) for m in call.modules]  # type: ignore[arg-type]
        return _dropout(call, call.args[0], rates, module.training, whole)
    if isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) and module.training:
        return call.one_by_one()
    if op is not None and op.kind == "random pool":
        return call.one_by_one()
    if not call.varies:
        return call.once()
    rule = module_rule(module) if not has_hooks(module) else None
    made = rule(call) if rule is not None else NotImplemented
    if made is NotImplemented:
        return call.batched()
    call.ways.setdefault(call.name, "fused")
    return made


def _random(call: FusedCall, name: str) -> Any:
    op = find(name)
    if op is not None and op.kind == "dropout" and name not in op.in_place:
        asked = [_dropout_arguments(call.target, *each) for each in call.per_member_args or ((call.args, call.kwargs),)]
        x, _, training = asked[0]
        rates = [p for _, p, _ in asked] * (call.members if len(asked) == 1 else 1)
        if isinstance(x, Stacked | torch.Tensor) and len({t for _, _, t in asked}) == 1:
            return _dropout(call, x, rates, training, 2 if op.dims else None)
    return call.one_by_one()


def _dropout_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float, bool]:
    named = dict(zip(("input", "p", "train" if target is torch.dropout else "training"), args, strict=False)) | kwargs
    return named["input"], float(named.get("p", 0.5)), bool(named.get("training", named.get("train", True)))


def _dropout(call: FusedCall, x: Any, rates: list[float], training: bool, whole: int | None) -> Any:
    if whole is not None and (not isinstance(x, Stacked) or x.rank < 3):
        return call.one_by_one() if training else x
    return attend.dropout(call, x, rates, training, whole)


def is_random(step: Any, model: nn.Module) -> bool:
    """Whether a recorded step draws random numbers."""
    if step.kind == "module":
        module = model.get_submodule(step.target)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            return module.training and module.p > 0
        inner = isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
        return ((isinstance(module, nn.RReLU) or inner) and module.training) or "Fractional" in type(module).__name__
    name = function_name(step.target)
    if name == "scaled_dot_product_attention":
        return bool(step.kwargs.get("dropout_p", step.args[4] if len(step.args) > 4 else 0.0))
    if name.startswith("dropout"):
        _, rate, training = _dropout_arguments(step.target, step.args, step.kwargs)
        return training and rate > 0
    return name in RANDOM
