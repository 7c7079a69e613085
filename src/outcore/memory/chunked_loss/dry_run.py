"""Whether a region that the planner found really runs in chunks: tried on tensors without memory.

Names of operations do not tell what their arguments say (a softmax over columns, or over rows). So the recorded calls
of the region are run on the meta device with a lazy result of the layer, by the very code that runs in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from outcore.cost.predicted.loss_memory import output_of
from outcore.graph import Graph
from outcore.graph.record.recording import Ref, Step
from outcore.graph.structure import leaves, substitute
from outcore.memory.chunked_loss.lazy_rows import LazyRows, lazy_linear
from outcore.planner.memory.chunked_region import ChunkedRegion


def stays_lazy(region: ChunkedRegion, graph: Graph, model: nn.Module) -> bool:
    """Whether the result of the region's layer is never made whole."""
    result = graph.values[graph.calls[region.head].outputs[0]]
    lazy = _lazy(result.shape, getattr(torch, result.dtype), region.rows)
    values: dict[str, Any] = {result.name: lazy}
    steps = {step.name: step for step in graph.recording.steps}

    def given(ref: Ref) -> Any:
        if ref.name in values:
            return values[ref.name]
        if ref.name in graph.values:
            value = graph.values[ref.name]
            made = torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
            return made.requires_grad_(value.requires_grad)
        return model.get_submodule(ref.name) if ref.kind == "module" else _state(model, ref.name)

    order = {name: i for i, name in enumerate(graph.calls)}
    try:
        with torch.enable_grad():
            for name in sorted((*region.inside, *region.ends), key=order.__getitem__):
                made = _run(steps[name], model, given)
                found = [tensor for _, tensor in leaves(made, torch.Tensor)]
                values |= dict(zip(steps[name].outputs, found, strict=True))
    except (RuntimeError, TypeError, ValueError, NotImplementedError, KeyError, AttributeError):
        return False
    inside = [values[v] for name in region.inside for v in graph.calls[name].outputs]
    return all(isinstance(value, LazyRows) and value.is_lazy for value in (lazy, *inside))


def loss_by_rows(graph: Graph, loss: Callable[[Any], Any]) -> bool:
    """Whether a loss of the model's output never needs its largest tensor whole."""
    output = output_of(graph)
    tensors = [t for _, t in leaves(output, torch.Tensor) if t.requires_grad and t.dim() > 1]
    if not tensors:
        return False
    largest = max(tensors, key=lambda t: t.numel())
    lazy = _lazy(tuple(largest.shape), largest.dtype, largest.numel())
    try:
        with torch.enable_grad():
            found = loss(substitute(output, torch.Tensor, lambda t: lazy if t is largest else t))
    except Exception:  # the loss is the user's, and may read numbers that are not there
        return False
    return isinstance(lazy, LazyRows) and lazy.is_lazy and isinstance(found, torch.Tensor) and not found.shape


def _lazy(shape: tuple[int, ...], dtype: torch.dtype, rows: int) -> torch.Tensor:
    x = torch.empty(*shape[:-1], 2, dtype=dtype, device="meta").requires_grad_()
    return lazy_linear(x, torch.empty(shape[-1], 2, dtype=dtype, device="meta"), None, rows_per_chunk=max(1, rows))


def _run(step: Step, model: nn.Module, given: Any) -> Any:
    """One recorded call on tensors without memory."""
    args, kwargs = substitute((step.args, step.kwargs), Ref, given)
    if step.kind != "module":
        return step.target(*args, **kwargs)
    module = model.get_submodule(step.target)
    state = {name: t.to("meta") for name, t in (*module.named_parameters(), *module.named_buffers())}
    return functional_call(module, state, args, kwargs)


def _state(model: nn.Module, name: str) -> torch.Tensor:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return tensors[name].detach().to("meta")
