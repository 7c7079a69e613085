"""The door of this package: light to import, since torch's compiler takes seconds to."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from outcore.compiled.plan import CompiledPlan
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.record.capture import arguments_as_called
from outcore.memory.chunked_loss.dry_run import loss_by_rows, stays_lazy
from outcore.planner.memory.chunked_region import find_region

if TYPE_CHECKING:
    from outcore.compiled.compiled_forward import CompiledForward
    from outcore.compiled.head_apart import HeadApart

__all__ = ["compile_within", "is_compiled"]

_CHUNKS = 16
"""Of a last layer that runs apart."""


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
    graphs: bool = False,
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
        graphs: record CUDA graphs, if they are within the budget.
        quiet: do not say why.

    Raises:
        PlanError: the budget is too small.
    """
    from outcore.compiled.in_place import forward_of, install, install_compiled_forward
    from outcore.compiled.settings import CompileSettings
    from outcore.compiled.torch_partitioner import CompilationError

    plain_bytes = memory_curve(graph, account(graph), optimizer=optimizer).peak_bytes
    if isinstance(budget, float):
        budget = int(budget * plain_bytes)
    on_gpu = any(p.device.type == "cuda" for p in model.parameters())
    settings = CompileSettings(budget, optimizer, loss, loss_bytes, plain_bytes, graphs=graphs and on_gpu)
    call = arguments_as_called(model, args, kwargs)
    if not quiet:
        print("outcore: compiling; this takes from seconds to minutes", file=sys.stderr)
    try:
        if settings.graphs:
            try:
                plan = install_compiled_forward(model, *call, settings)
            except PlanError as refused:
                told = f"as CUDA graphs {refused}"
            else:
                if plan.graphs:
                    return plan
                without = model.__dict__.pop("forward")
                without.discard()
                model.__dict__.update(without.before)
                told = "torch.compile could not record this step as CUDA graphs"
            if not quiet:
                print(f"outcore: {told}; compiled without", file=sys.stderr)
            settings = replace(settings, graphs=False)
        elif graphs and not quiet:
            print("outcore: there are no CUDA graphs on this device; compiled without", file=sys.stderr)
        forward = forward_of(model, settings)
        try:
            return install(forward, *call)
        except PlanError as refused:
            found = _smaller_step(forward, call, graph, loss, loss_bytes, None if quiet else str(refused))
            if found is None:
                raise
            return found
    except CompilationError as error:
        if not quiet:
            print(f"outcore: not compiled, managed as without compile=True: {error}", file=sys.stderr)
        return None


def _smaller_step(
    attempt: CompiledForward,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    graph: Graph,
    loss: Callable[[Any], torch.Tensor] | None,
    loss_bytes: int,
    told: str | None,
) -> CompiledPlan | None:
    """A plan for a step that does not fit as a whole: its last layer in chunks, or its batch in micro-batches.

    Args:
        attempt: what was compiled, and did not fit.
        call: arguments.
        graph: what was recorded of the model.
        loss: of the output.
        loss_bytes: what it holds.
        told: why it did not fit, to be said; none to be quiet.
    """
    from outcore.compiled.in_place import install_compiled_forward
    from outcore.compiled.micro_batch.in_parts import install_in_parts

    model = attempt.model
    if (head := _head(graph, model, loss_bytes, loss)) is not None:
        if told is not None:
            print(f"outcore: {told}; now with its last layer in chunks", file=sys.stderr)
        with contextlib.suppress(PlanError):
            return install_compiled_forward(model, *call, replace(attempt.settings, head=head))
    if attempt.samples is not None and told is not None:
        print(f"outcore: {told}; now in micro-batches", file=sys.stderr)
    return install_in_parts(model, *call, attempt, graph)


def _head(
    graph: Graph, model: nn.Module, loss_bytes: int, loss: Callable[[Any], torch.Tensor] | None
) -> HeadApart | None:
    """The last layer of a model, if it and its loss can run in chunks."""
    from outcore.compiled.head_apart import HeadApart

    by_rows = loss is not None and loss_by_rows(graph, loss)
    region = find_region(graph, account(graph), loss_bytes=loss_bytes, loss_after=by_rows)
    if region is None or not stays_lazy(region, graph, model):
        return None
    region = replace(region, chunks=min(region.rows, _CHUNKS))
    shape = graph.values[graph.calls[region.head].outputs[0]].shape
    return HeadApart(tuple(shape), region.rows_per_chunk, region.chunk_bytes + region.operand_bytes + region.wide_bytes)


def is_compiled(forward: Any) -> TypeGuard[CompiledForward]:
    """Whether something is the forward of a model under a compiled plan."""
    if "outcore.compiled.compiled_forward" not in sys.modules:
        return False
    from outcore.compiled.compiled_forward import CompiledForward

    return isinstance(forward, CompiledForward)
