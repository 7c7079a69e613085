"""Forward and backward of a step as two CUDA graphs.

A small step is bound by the interpreter: the device waits for the next call. A CUDA graph launches all calls at once.
The pass is captured as it is, policies and all; what autograd would have saved lies in the graphs' own memory, where
the backward graph finds it. One forward can be under way at a time: a second one before the first backward, or one
whose inputs need gradients, runs call by call.

A graph has memory of its own, which stays reserved, so what the allocator cannot reuse counts for good. In segments of
fixed size a step leaves holes that fit nothing else later; in one that grows it leaves fewer, so that is what the
allocator is told to take while the graphs are recorded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from outcore.graph.preserve import ModelState, state_tensors
from outcore.graph.recording import Ref
from outcore.graph.structure import leaves, substitute
from outcore.memory.holding import Holding
from outcore.memory.passage import Pass

__all__ = ["Graphed"]

_WARM_UPS = 2


class Graphed:
    """A holding, captured when it is first called."""

    def __init__(self, holding: Holding, model: nn.Module) -> None:
        self.holding, self.model = holding, model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.under_way = False
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None

    @staticmethod
    def can(holding: Holding) -> bool:
        """Whether a step can be captured: nothing is copied to the host, drawn again, or read by Python."""
        return not (holding.offloaded_bytes or holding.random or holding.recording.uses_data)

    @staticmethod
    def copied_bytes(model: nn.Module, tensors: Iterable[torch.Tensor]) -> int:
        """What graphs hold twice: gradients, in their own memory and where the optimizer finds them, and inputs."""
        return sum(p.nbytes for p in model.parameters() if p.requires_grad) + sum(t.nbytes for t in tensors)

    def __call__(self, tensors: list[torch.Tensor]) -> tuple[Any] | None:
        """What the model returns, in a tuple; none where this call must run call by call."""
        if self.under_way or any(t.requires_grad for t in tensors):
            return None
        if self.graphs is None:
            self.capture(tensors)
        outputs = _Replay.apply(self, tensors, *self.parameters)  # type: ignore[no-untyped-call]
        results = iter(outputs if isinstance(outputs, tuple) else (outputs,))
        return (substitute(self.template, Ref, lambda _: next(results)),)

    def capture(self, tensors: list[torch.Tensor]) -> None:
        """Run a few times beside, then record both graphs; the model is left as it was."""
        before = ModelState(self.model, state_tensors(self.model))
        self.inputs = [t.detach().clone() for t in tensors]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                outputs = self.run()
                torch.autograd.grad(outputs, self.parameters, [torch.zeros_like(o) for o in outputs], allow_unused=True)
                del outputs
        torch.cuda.current_stream().wait_stream(side)
        before.restore()
        torch.cuda.empty_cache()  # the graphs have memory of their own
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _growing_segments():
            with torch.cuda.graph(forward):
                outputs = self.run()
            self.gradients = [torch.zeros_like(o) for o in outputs]
            with torch.cuda.graph(backward, pool=forward.pool()):
                self.found = torch.autograd.grad(outputs, self.parameters, self.gradients, allow_unused=True)
            self.outputs = [o.detach() for o in outputs]
            del outputs
        self.graphs = (forward, backward)
        before.restore()
        del before
        torch.cuda.empty_cache()

    def run(self) -> list[torch.Tensor]:
        """One pass; the outputs that lead back to the parameters."""
        result = Pass(self.holding, self.model, self.inputs, None).forward()
        self.template = self.holding.recording.result
        return [t for _, t in leaves(result, torch.Tensor)]


class _Replay(torch.autograd.Function):
    """Launches the graphs."""

    @staticmethod
    def forward(ctx: Any, graphed: Graphed, tensors: list[torch.Tensor], *parameters: torch.Tensor) -> Any:
        """Copy the inputs in and launch forward."""
        assert graphed.graphs is not None
        for place, tensor in zip(graphed.inputs, tensors, strict=True):
            place.copy_(tensor)
        graphed.graphs[0].replay()
        graphed.under_way = True
        ctx.graphed = graphed
        return tuple(o.clone() for o in graphed.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Copy the gradients in and launch backward."""
        graphed: Graphed = ctx.graphed
        assert graphed.graphs is not None
        if not graphed.under_way:
            raise RuntimeError(
                "this backward ran already, and its memory is used again: outcore's CUDA graphs cannot keep the graph; "
                "call within with graphs=False"
            )
        for place, gradient in zip(graphed.gradients, gradients, strict=True):
            place.copy_(gradient)
        graphed.graphs[1].replay()
        graphed.under_way = False
        return (None, None, *_copies(graphed.found))


@contextlib.contextmanager
def _growing_segments() -> Iterator[None]:
    """Let the allocator take memory in segments that grow; afterwards as the user has told it."""
    told = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments" in told or "backend" in told:
        yield
        return
    tell: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if tell is None:  # as it was called before
        tell = torch.cuda.memory._set_allocator_settings
    tell(",".join(filter(None, (told, "expandable_segments:True"))))
    try:
        yield
    finally:
        tell(",".join(filter(None, (told, "expandable_segments:False"))))


def _copies(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Copies in a few launches."""
    there = [t for t in tensors if t is not None]
    copies = [torch.empty_like(t) for t in there]
    torch._foreach_copy_(copies, there)
    found = iter(copies)
    return [next(found) if t is not None else None for t in tensors]
