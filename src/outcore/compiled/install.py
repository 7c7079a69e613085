"""The door of this package: light to import, since torch's compiler takes seconds to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from outcore.compiled.plan import CompiledPlan
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.step_memory import memory_curve
from outcore.graph import Graph
from outcore.graph.record.capture import arguments_as_called

if TYPE_CHECKING:
    from outcore.compiled.compiled_forward import CompiledForward

__all__ = ["compile_within", "is_compiled"]


def compile_within(
    model: nn.Module,
    graph: Graph,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    budget: float | int | None,
    optimizer: OptimizerCost,
    loss: Callable[[Any], torch.Tensor] | None,
    loss_bytes: int,
    *,
    quiet: bool,
) -> CompiledPlan | None:
    """Put a model under a compiled plan; none, after saying why, if it cannot be compiled.

    Args:
        model: the user's.
        graph: what was recorded of it.
        args: of a call.
        kwargs: of a call.
        budget: bytes, or as a float a share of what plain training takes.
        optimizer: what its state takes.
        loss: of the output.
        loss_bytes: what the loss holds.
        quiet: do not say why.

    Raises:
        PlanError: the budget is too small.
    """
    from outcore.compiled.compiled_forward import CompileSettings, install_compiled_forward
    from outcore.compiled.torch_partitioner import CompilationError

    plain_bytes = memory_curve(graph, account(graph), optimizer=optimizer).peak_bytes
    if isinstance(budget, float):
        budget = int(budget * plain_bytes)
    settings = CompileSettings(budget, optimizer, loss, loss_bytes, plain_bytes)
    if not quiet:
        print("outcore: compiling; this takes from seconds to minutes", file=sys.stderr)
    try:
        return install_compiled_forward(model, *arguments_as_called(model, args, kwargs), settings)
    except CompilationError as error:
        if not quiet:
            print(f"outcore: not compiled, managed as without compile=True: {error}", file=sys.stderr)
        return None


def is_compiled(forward: Any) -> TypeGuard[CompiledForward]:
    """Whether something is the forward of a model under a compiled plan."""
    if "outcore.compiled.compiled_forward" not in sys.modules:
        return False
    from outcore.compiled.compiled_forward import CompiledForward

    return isinstance(forward, CompiledForward)
