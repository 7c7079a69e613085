"""What an optimizer keeps and needs per parameter, found by taking two steps on a handful of numbers.

Optimizers differ in state (Adam two numbers per parameter, SGD with momentum one) and in the workspace of a step: the
loop over parameters needs room for the largest, the fused-over-parameters form ("foreach", the default on GPUs) room
for all of them. These are not documented, and users bring their own optimizers, so they are counted. So is the memory
traffic of a step, which is all the time it takes on large models.

A step that has to be given a closure is given one. LBFGS keeps pairs of directions and steps until its history is full,
which a few steps do not show, so its state is what it will be then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outcore.cost.measured.live_bytes import LiveBytes
from outcore.errors import OutcoreError

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_SIZES = (4096, 4096, 8192)
_LBFGS_WORKSPACE, _LBFGS_SEARCH = 7.0, 10.0
"""Vectors as long as all parameters that a step of LBFGS has beside its state, without and with a line search."""


def same_kind(optimizer: torch.optim.Optimizer) -> Optimizer:
    """How to make an optimizer with the same settings for other parameters."""
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters  # defaults may hold more than the constructor takes
    settings = {k: v for k, v in optimizer.defaults.items() if k in taken and k != "params"}
    return lambda params: kind(params, **settings)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step has to be given a closure that computes the loss again.

    >>> needs_closure(torch.optim.LBFGS([torch.zeros(1)])), needs_closure(torch.optim.Adam([torch.zeros(1)]))
    (True, False)
    """
    asked = inspect.signature(optimizer.step).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in asked)


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """Bytes an optimizer takes, in multiples of the bytes of the parameters.

    >>> OptimizerCost.of(torch.optim.Adam).state_per_parameter
    2.0
    >>> OptimizerCost.of(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)).state_per_parameter
    1.0
    """

    name: str
    state_per_parameter: float
    """State kept between steps, over the parameters."""
    workspace_per_parameter: float = 0.0
    """Needed during a step, over all parameters."""
    workspace_per_largest: float = 0.0
    """Needed during a step, over the largest parameter."""
    traffic_per_parameter: float = 0.0
    """Bytes that a step reads and writes, over the bytes of the parameters."""
    operations: int = 0
    """Operations of a step; of all parameters together if `together`, else of each."""
    together: bool = False

    @classmethod
    def of(
        cls, optimizer: Optimizer | torch.optim.Optimizer | OptimizerCost | float, device_kind: str = "cpu"
    ) -> OptimizerCost:
        """The cost of an optimizer: a class, a function of the parameters, an instance, its cost, or just the state's
        size."""
        if isinstance(optimizer, OptimizerCost):
            return optimizer
        if isinstance(optimizer, int | float):
            return cls("given", float(optimizer))
        if isinstance(optimizer, torch.optim.Optimizer):
            return cls.of(same_kind(optimizer), device_kind)
        if not callable(optimizer):
            raise OutcoreError(
                f"{type(optimizer).__name__} is neither a torch.optim.Optimizer nor a function that makes one of "
                "parameters; give the optimizer inside of it, or the size of its state over that of the parameters: "
                "optimizer=2.0"
            )
        if isinstance(made := _made(optimizer, _SIZES[-1:])[1], torch.optim.LBFGS):
            return cls._of_lbfgs(made)
        many, one = _count(optimizer, _SIZES, device_kind), _count(optimizer, _SIZES[-1:], device_kind)
        traffic = many.traffic / sum(_SIZES) / 4
        # As many operations for all of them as for one: they are stepped together. So is what keeps a workspace of all.
        if many.peak > 1.25 * one.peak or 0 < many.operations <= one.operations:
            whole = many.peak / sum(_SIZES) / 4
            return cls(many.name, many.state, whole, 0.0, traffic, many.operations, together=True)
        each = many.operations // len(_SIZES)
        return cls(many.name, many.state, 0.0, one.peak / _SIZES[-1] / 4, traffic, each)

    @classmethod
    def _of_lbfgs(cls, optimizer: torch.optim.LBFGS) -> OptimizerCost:
        """With a full history: two vectors for each pair, the last gradient and direction."""
        (group,) = optimizer.param_groups
        pairs, search = int(group["history_size"]), group["line_search_fn"] is not None
        return cls(
            "LBFGS", 2.0 * pairs + 2, _LBFGS_SEARCH if search else _LBFGS_WORKSPACE, 0.0, 4.0 * pairs, 4 * pairs, True
        )

    def state_bytes(self, parameters: Mapping[str, int]) -> int:
        """State for parameters of these sizes."""
        return round(self.state_per_parameter * sum(parameters.values()))

    def workspace_bytes(self, parameters: Mapping[str, int]) -> int:
        """The workspace of a step."""
        if not parameters:
            return 0
        sizes = parameters.values()
        return round(self.workspace_per_parameter * sum(sizes) + self.workspace_per_largest * max(sizes))


@dataclass(frozen=True, slots=True)
class _Counted:
    name: str
    state: float
    peak: float
    traffic: float
    operations: int


class _Traffic(TorchDispatchMode):
    """Counts operations on more than single numbers, and the bytes they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = zip(func._schema.arguments, args, strict=False)
        moved = sum(_bytes(value) * (2 if a.alias_info and a.alias_info.is_write else 1) for a, value in given)
        moved += 0 if any(r.alias_info for r in func._schema.returns) else _bytes(result)
        self.bytes += moved
        self.operations += moved > 0
        return result


def _bytes(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(values) if isinstance(t, torch.Tensor) and t.dim())


def _count(make: Optimizer, sizes: tuple[int, ...], device_kind: str) -> _Counted:
    """Name, state per parameter, the peak of the second step above what is there, its traffic."""
    params, optimizer = _made(make, sizes)
    if device_kind == "cuda" and not any(g.get("fused") for g in optimizer.param_groups):
        for group in optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None:
                group["foreach"] = True  # what torch chooses by itself for parameters on a GPU
    step = _stepper(optimizer, params)
    tensors = [t for t in tree_leaves(list(optimizer.state.values())) if isinstance(t, torch.Tensor)]
    kept = sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)
    known = [*tensors, *params, *(p.grad for p in params if p.grad is not None)]
    with LiveBytes(known) as live:
        step()
        peak = live.peak
    with _Traffic() as traffic:
        step()
    state = round(kept / sum(sizes) / 4, 3)
    return _Counted(type(optimizer).__name__, state, float(peak), float(traffic.bytes), traffic.operations)


def _made(make: Optimizer, sizes: tuple[int, ...]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Parameters of these sizes and their optimizer; matrices for one that takes no others (Muon)."""
    params = [nn.Parameter(torch.ones(n, device="cpu")) for n in sizes]
    try:
        return params, make(params)
    except ValueError:
        params = [nn.Parameter(torch.ones(64, n // 64, device="cpu")) for n in sizes]
        return params, make(params)


def _stepper(optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter]) -> Callable[[], Any]:
    """The optimizer's step with gradients of ones, after a first one: with a closure if it fails without."""

    def closure() -> Any:
        for param in params:
            if param.grad is None:
                param.grad = torch.ones_like(param)
        return torch.zeros((), device="cpu")

    closure()
    try:
        optimizer.step()
    except Exception:
        try:
            optimizer.step(closure)
        except Exception as error:
            raise OutcoreError(
                f"{type(optimizer).__name__} cannot take a step on a few small parameters ({type(error).__name__}: "
                f"{error}); give the size of its state over that of the parameters instead: optimizer=2.0"
            ) from error
        return lambda: optimizer.step(closure)
    return optimizer.step
