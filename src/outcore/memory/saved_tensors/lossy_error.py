"""What a lossy encoding does to the gradients, measured on the user's own batch.

A plan by hand may hold buffers in fewer bits between forward and backward (Gist's delayed precision reduction: forward
computes with all of them). The loss of a step is then exact and its gradients are not, and by how much depends on the
network, its weights and its data. So a step is run twice from the same state: with the buffers in question kept
exactly, on the host where they do not fit, and with the encoding; and the gradients of every parameter are compared.

The exact step goes by the same plan otherwise, and exact policies give the gradients of plain training bit for bit, so
that nothing has to fit that would not fit in training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from outcore.graph import Graph
from outcore.graph.record.preserve import state_restored
from outcore.graph.structure import leaves, square_loss
from outcore.machine.units import format_bytes
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.ops.recompute_encode import LOSSY, held_bytes
from outcore.planner.memory.plan import MemoryPlan
from outcore.program.policies import KEEP, OFFLOAD, Policies, Policy

_NOISE = 1e-3
"""Gradients smaller than this share of the model's, number by number, are rounding."""
_FOUND: WeakKeyDictionary[nn.Module, LossyEffect] = WeakKeyDictionary()
"""What was measured when a model came under its plan."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far the gradient of one parameter is off."""

    name: str
    relative: float
    """Length of the difference over the length of the exact gradient; where that is nothing but rounding (a bias before
    a norm), over what a gradient of this size would have to be to count."""
    cosine: float
    """Of the angle between the two."""


@dataclass(frozen=True)
class LossyEffect:
    """What the lossy encodings of a plan save, and what they do to the gradients."""

    codecs: Mapping[str, int]
    """Codec -> buffers that it holds."""
    bytes: int
    """Of these buffers."""
    held_bytes: int
    """Of what is held instead."""
    whole: Deviation | None
    """Of all parameters together, as one vector."""
    rows: tuple[Deviation, ...]
    """Every parameter with a gradient, in order; empty where there was no batch to measure on."""

    @property
    def worst(self) -> Deviation | None:
        """The parameter whose gradient is furthest off."""
        return max(self.rows, key=lambda row: row.relative, default=None)

    @property
    def median(self) -> float:
        """Relative deviation of the parameter in the middle."""
        return statistics.median(row.relative for row in self.rows) if self.rows else float("nan")

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} as {codec}" for codec, count in self.codecs.items())
        size = f"{format_bytes(self.bytes)} held as {format_bytes(self.held_bytes)}"
        worst, whole = self.worst, self.whole
        if worst is None or whole is None:
            return f"lossy encodings ({kinds}): {size}; give a batch, not shapes, to see what they do to the gradients"
        return (
            f"lossy encodings ({kinds}): {size}; the gradient is off by {whole.relative:.2%} "
            f"(cosine {whole.cosine:.6f}), {self.median:.2%} in the median of {len(self.rows)} parameters, "
            f"{worst.relative:.2%} at worst ({worst.name}); losses are exact"
        )


def gradient_effect(model: nn.Module) -> LossyEffect | None:
    """What the lossy encodings of a model's plan do to its gradients; none if its plan is exact.

    >>> import torch, outcore
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    >>> net = outcore.within(net, (torch.randn(32, 4),), memory=None, plan={"1#0:out": "encode:int8"}, quiet=True)
    >>> outcore.gradient_effect(net).worst.relative < 0.05
    True
    """
    return _FOUND.get(model)


def lossy_buffers(policy: Policies) -> dict[str, str]:
    """Buffer -> codec, for what a plan holds in fewer bits than it has."""
    codecs = {name: how.codec for name, how in policy.items()}
    return {name: codec for name, codec in codecs.items() if codec in LOSSY}


def effect_on_gradients(
    managed_forward: ManagedForward,
    graph: Graph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> LossyEffect | None:
    """Run a step both ways and compare; none if the plan is exact. Model, gradients and random state stay as they are.

    What was found is remembered for `gradient_effect`.

    Args:
        managed forward: of the model, with the plan.
        graph: of the model at the size of the batch.
        args: the batch.
        kwargs: its keyword arguments.
        loss: of the output; without it the mean of its squares.
    """
    plan = managed_forward.plan
    lossy = lossy_buffers(plan.policy)
    if not lossy:
        _FOUND.pop(managed_forward.model, None)
        return None
    buffers = plan.keeping.buffers
    codecs = {codec: sum(c == codec for c in lossy.values()) for codec in LOSSY}
    whole = sum(buffers[name].bytes for name in lossy)
    held = sum(held_bytes(buffers[name], codec)[0] for name, codec in lossy.items())
    rows: tuple[Deviation, ...] = ()
    total: Deviation | None = None
    if not any(t.is_meta or isinstance(t, FakeTensor) for _, t in leaves((args, kwargs), torch.Tensor)):
        exact = _gradients(managed_forward, graph, _exactly(plan), args, kwargs, loss)
        rounded = _gradients(managed_forward, graph, plan.policy, args, kwargs, loss)
        total, *each = _deviations(exact, rounded)
        rows = tuple(each)
    effect = LossyEffect({c: n for c, n in codecs.items() if n}, whole, held, total, rows)
    _FOUND[managed_forward.model] = effect
    return effect


def _exactly(plan: MemoryPlan) -> dict[str, Policy]:
    """The plan with its lossy buffers exact: under a budget moved below the device where they can be, else kept."""
    keeping, policy = plan.keeping, plan.policy
    found = dict(policy)
    for name in lossy_buffers(policy):
        movable = plan.budget_bytes is not None and OFFLOAD in keeping.choices(keeping.buffers[name])
        found[name] = OFFLOAD if movable else KEEP
    return found


def _gradients(
    managed_forward: ManagedForward,
    graph: Graph,
    policy: Policies,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, in a step under a policy."""
    model = managed_forward.model
    settings = replace(managed_forward.settings, budget_bytes=None, policy=dict(policy), graphs=False)
    other = ManagedForward(model, settings, managed_forward.costs)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with state_restored(model):
        other.admit(other.key(args, kwargs), args, kwargs, graph=graph)
        output = other(*args, **kwargs)
        value = loss(output) if loss is not None else square_loss(output)
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


@dataclass(slots=True)
class _Sums:
    """Over the numbers of one gradient, or of several."""

    exact: float = 0.0
    rounded: float = 0.0
    product: float = 0.0
    off: float = 0.0
    count: int = 0

    def add(self, exact: torch.Tensor, rounded: torch.Tensor) -> _Sums:
        """One more gradient, both ways."""
        a, b = exact.detach().double().flatten(), rounded.detach().double().flatten()
        self.exact, self.rounded = self.exact + float(a @ a), self.rounded + float(b @ b)
        self.product, self.count = self.product + float(a @ b), self.count + a.numel()
        self.off += float((a - b).square().sum())
        return self

    def deviation(self, name: str, least: float = 0.0) -> Deviation:
        """How far the rounded gradient lies from the exact one: the relative length of the difference, and the cosine.

        `least` is the smallest mean square that the difference is compared with.
        """
        square = max(self.exact, least * self.count)
        both = math.sqrt(self.exact * self.rounded)
        return Deviation(name, math.sqrt(self.off / square) if square else 0.0, self.product / both if both else 1.0)


def _deviations(exact: Mapping[str, torch.Tensor], rounded: Mapping[str, torch.Tensor]) -> list[Deviation]:
    """How far rounded gradients lie from exact ones: of all parameters together, then of each."""
    each, total = {}, _Sums()
    for name, gradient in exact.items():
        each[name] = _Sums().add(gradient, rounded[name])
        total.add(gradient, rounded[name])
    least = _NOISE**2 * total.exact / max(1, total.count)
    return [total.deviation("all parameters"), *(one.deviation(name, least) for name, one in each.items())]
