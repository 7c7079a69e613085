"""The oracle: every member trained by itself, by plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import outcore

Batch = tuple[Any, Any]


def train_serially(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    schedulers: Sequence[Any] = (),
    clip: float | None = None,
    seed: int | None = None,
) -> list[float]:
    """One member as one would write it; returns its losses."""
    if seed is not None:
        torch.manual_seed(seed)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        found = loss(model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x), y)
        found.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(float(found.detach())) if plateau else scheduler.step()
        losses.append(float(found.detach()))
    return losses


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two state_dicts, which must have the same entries."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.shape == b[name].shape and tensor.dtype == b[name].dtype, name
    return max((float((t.double() - b[n].double()).abs().max()) for n, t in a.items() if t.numel()), default=0.0)


def assert_as_if_alone(
    build: Callable[[int], nn.Module],
    batches: Sequence[Batch],
    loss: Callable[..., Tensor],
    optimizer: Callable[[Any, int], torch.optim.Optimizer],
    *,
    members: int = 3,
    tolerance: float = 1e-10,
    scheduler: Callable[..., Any] | None = None,
    clip: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    way: outcore.fusion.Way | None = None,
) -> outcore.fusion.FusedArray:
    """Train fused and serially, and compare every member's weights, buffers and losses."""
    models = [build(i) for i in range(members)]
    twins = [copy.deepcopy(m) for m in models]
    array = outcore.fuse(models, loss=loss, optimizer=optimizer, scheduler=scheduler, clip=clip, seeds=seeds, way=way)
    fused = []
    for x, y in batches:
        fused.append(array.step(x, y).tolist())
        array.schedule()
    for i, twin in enumerate(twins):
        own = optimizer(twin.parameters(), i)
        losses = train_serially(
            twin,
            batches,
            loss,
            own,
            schedulers=[scheduler(own, i)] if scheduler else [],
            clip=clip[i] if clip else None,
            seed=seeds[i] if seeds else None,
        )
        worst = max(abs(a[i] - b) for a, b in zip(fused, losses, strict=True))
        assert worst < tolerance * max(1.0, *map(abs, losses)), f"member {i}: losses differ by {worst:.1e}"
        apart = distance(dict(twin.state_dict()), array[i].state_dict())
        assert apart < tolerance, f"member {i}: weights differ by {apart:.1e}"
    return array
