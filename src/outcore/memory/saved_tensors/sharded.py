"""A model that FSDP2 has sharded already, while it is recorded, measured and planned.

`fully_shard` leaves a part of each parameter on a module and puts the whole ones in their place while its forward and
backward run, from hooks around its call. A plan is of what runs between these hooks: so for as long as it is made,
parameters are whole and the hooks are away, which takes the memory of all parameters at once. Afterwards the model is
as it was, and the managed forward runs inside of the hooks, as if `fully_shard` had come second.

Where blocks are sharded one by one, the parameters of one are gone while another runs: what would be recomputed with
them is kept (`outcore.memory.saved_tensors.live_forward`). Gathering takes all ranks, so it is done in the call of
`outcore.within`, which all make, and not when one rank meets a batch of another size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import is_available

from outcore.errors import OutcoreError
from outcore.graph.structure import substitute

NOT_GATHERED = "blocks of this model are sharded one by one, and a batch larger than outcore.within's is not planned"


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters of a model are parts of larger ones."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """The model with whole parameters and without the hooks that gather and free them.

    Raises:
        OutcoreError: its parameters were sharded by something else than `fully_shard`.
    """
    units = _units(model)
    apart = [unit for unit in units if _is_apart(unit)]
    states = {id(_state(unit)) for unit in units}
    around = [hooks for unit in units for hooks in (unit._forward_pre_hooks, unit._forward_hooks)]
    kept, classes = [list(hooks.items()) for hooks in around], [type(unit) for unit in units]
    for unit in apart:
        unit.unshard()  # type: ignore[operator]
    for hooks in around:
        for number in [n for n, hook in hooks.items() if id(getattr(hook, "__self__", None)) in states]:
            del hooks[number]
    for unit in units:
        unit.__class__ = type(unit).__mro__[2]  # after FSDP's two
    try:
        if is_sharded(model):
            raise OutcoreError(
                "parameters of this model are DTensors that fully_shard has not made; call outcore.within before they "
                "are distributed"
            )
        yield
    finally:
        for unit, one in zip(units, classes, strict=True):
            unit.__class__ = one
        for hooks, before in zip(around, kept, strict=True):
            added = [(n, hook) for n, hook in hooks.items() if n not in dict(before)]
            hooks.clear()
            hooks.update([*before, *added])
        for unit in apart:
            unit.reshard()  # type: ignore[operator]


def on_whole_parameters(call: Callable[..., nn.Module], asked: dict[str, Any]) -> nn.Module:
    """What a call makes of a sharded model while its parameters are whole.

    Args:
        call: `outcore.within`.
        asked: its arguments by name.
    """
    model = asked["model"]
    if asked["state"] is not None:
        raise OutcoreError("where the state of a sharded model lives is fully_shard's to decide; leave state= away")
    dtype = next((found for unit in _units(model) if (found := _cast_to(unit)) is not None), None)
    if dtype is not None:
        for name in ("args", "kwargs"):
            asked[name] = substitute(asked[name], torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
    with unsharded(model):
        return call(**asked)


def _units(model: nn.Module) -> list[nn.Module]:
    """Modules that were given to `fully_shard`."""
    if not is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _state(unit: nn.Module) -> Any:
    return unit._get_fsdp_state()  # type: ignore[operator]


def _is_apart(unit: nn.Module) -> bool:
    """Whether the parameters of a unit, which may be no other unit's, are in parts now."""
    return any(not group.is_unsharded for group in _groups(unit))


def _groups(unit: nn.Module) -> list[Any]:
    state = _state(unit)
    found = getattr(state, "_fsdp_param_groups", None)  # before torch 2.12 there was one at most
    return [g for g in (found if found is not None else [state._fsdp_param_group]) if g is not None]


def _cast_to(unit: nn.Module) -> torch.dtype | None:
    """The type to which sharding casts what a module is given."""
    policy = _state(unit)._mp_policy
    return policy.param_dtype if policy.cast_forward_inputs else None
