"""`outcore.fuse`: many models of one architecture, trained as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outcore.cost.optimizer_cost import needs_closure
from outcore.errors import FuseError
from outcore.fusion.array import FusedArray
from outcore.fusion.group import TrainingTerms
from outcore.fusion.member_factory import DEFAULT, MemberFactory, Objective
from outcore.fusion.optimizer.loss_scale import MemberLossScale
from outcore.fusion.runner import RunMode


def fuse(
    models: Iterable[nn.Module],
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    objectives: Mapping[str, Objective] | None = None,
    scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None,
    metrics: Mapping[str, Callable[..., Tensor]] | None = None,
    clip: float | Sequence[float] | None = None,
    loss_weight: Sequence[float] | None = None,
    loss_scale: MemberLossScale | None = None,
    seeds: Sequence[int] | None = None,
    autocast: torch.dtype | None = None,
    way: RunMode | None = None,
    check: bool = True,
    unfused: Sequence[str] = (),
    outputs: bool = False,
) -> FusedArray:
    """Train many models of one architecture as one; each as if it were trained by itself.

    >>> import outcore, torch
    >>> rates = [0.1, 0.01]
    >>> array = outcore.fuse(
    ...     [torch.nn.Linear(4, 2) for _ in rates],
    ...     loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda params, i: torch.optim.SGD(params, lr=rates[i]),
    ... )
    >>> array.step(torch.randn(8, 4), torch.randint(2, (8,))).shape
    torch.Size([2])
    >>> sorted(array[1].state_dict())
    ['bias', 'weight']

    Args:
        models: unmodified modules of the same architecture; from here on their tensors are views of stacked ones.
        loss: ``loss(output, targets)``, one number.
        optimizer: ``optimizer(params, i)`` or ``optimizer(params)``: an ordinary torch optimizer for member `i`.
        objectives: instead of both, several losses with an optimizer each, by name.
        scheduler: ``scheduler(optimizer, i)``: an ordinary scheduler, or a list; advanced by ``array.schedule()``.
        metrics: functions of output and targets, computed in every step.
        clip: largest norm of a member's gradients.
        loss_weight: factor of each member's loss.
        loss_scale: dynamic loss scaling for half precision.
        seeds: a stream of random numbers per member, that of a serial run after ``torch.manual_seed(seed)`` on a CPU.
        autocast: dtype of the forward pass under `torch.autocast`.
        way: how to run; by default all members fused on a CPU, and on a GPU what is measured to be fastest.
        check: compare the fused gradients of one member with the model's own before the first step.

        outputs: keep what the models returned in ``array.output``.
        unfused: blocks (``"layer4"``) that run member by member all the same.

    Raises:
        FuseError: the models are not of one architecture, or something is missing.
    """
    members = list(models)
    if not members:
        raise FuseError("no models were given; pass a list of at least one")
    if objectives is None and (loss is None or optimizer is None):
        raise FuseError("fuse needs loss= and optimizer=, or objectives= for several losses")
    if seeds is not None and len(seeds) != len(members):
        raise FuseError(f"{len(seeds)} seeds for {len(members)} models; give one for each")

    def optimizers(model: nn.Module, i: int) -> dict[str, torch.optim.Optimizer]:
        if objectives is not None:
            found = {name: o.optimizer(model, i) for name, o in objectives.items()}
        else:
            assert optimizer is not None
            found = {DEFAULT: _made(optimizer, model.parameters(), i)}
        if asking := [type(o).__name__ for o in found.values() if needs_closure(o)]:
            raise FuseError(
                f"a step of {asking[0]} has to be given a closure that computes the loss again, and a fused step has "
                "none; use another optimizer, or train these models one after the other"
            )
        return found

    terms = TrainingTerms(
        _per_member("clip", clip, len(members)),
        _per_member("loss_weight", loss_weight, len(members)),
        loss_scale.fill(len(members)) if loss_scale is not None else None,
        autocast,
    )
    kind = MemberFactory(loss, dict(metrics or {}), dict(objectives or {}), optimizers, scheduler, outputs)
    return FusedArray(members, kind, terms, seeds=seeds, way=way, check=check, unfused=unfused)


def _per_member(name: str, value: float | Sequence[float] | None, members: int) -> Tensor | None:
    if value is None:
        return None
    values = [float(value)] * members if isinstance(value, int | float) else [float(v) for v in value]
    if len(values) != members:
        raise FuseError(f"{name} has {len(values)} values for {members} models; give one for each")
    return torch.tensor(values, dtype=torch.float64, device="cpu")


_INDEX = ("i", "index", "member", "slot")
"""Names of a second parameter that is the member's index even if it has a default."""


def _made(optimizer: Callable[..., torch.optim.Optimizer], params: Any, i: int) -> torch.optim.Optimizer:
    """The optimizer that the user's function makes of the parameters, and of the index if it takes one."""
    if isinstance(optimizer, type):
        made: torch.optim.Optimizer = optimizer(params)
        return made
    try:
        positional = [p for p in inspect.signature(optimizer).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
        wanted = [p for p in positional if p.default is p.empty or p.name in _INDEX]
    except (TypeError, ValueError):
        return optimizer(params, i)
    return optimizer(params) if len(wanted) == 1 else optimizer(params, i)
