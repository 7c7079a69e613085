"""Forward and backward of a step as two CUDA graphs.

A small step is bound by the interpreter: the device waits for the next call. A CUDA graph launches all calls at once.
The pass is captured as it is, policies and all; what autograd would have saved lies in the graphs' own pool, where the
backward graph finds it. What is offloaded is copied on streams that fork from the captured one and join it again before
either graph ends, so a copy out is over when backward begins. One forward can be under way at a time: a second one
before the first backward, or one whose inputs need gradients, runs call by call. So all ways of calling a model (a
smaller last batch) share one pool, and one place for every gradient.

A graph holds addresses. Where a parameter, buffer or constant has become another tensor, or lies elsewhere, both graphs
are captured anew.

What the allocator leaves unused between tensors is made less by a second capture (`outcore.allocator.padding_search`).
Gradients have memory of their own (`outcore.memory.cuda_graphs.static_grads`) and are handed out as they lie there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from outcore.allocator.caching_allocator import reserved_by
from outcore.allocator.padding_search import PaddingBlock, PaddingSearch, best_padding_blocks
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.record.recording import Ref, Step, Tape
from outcore.graph.structure import leaves, substitute
from outcore.memory.cuda_graphs.pool import GraphPool, give_back, growing_segments, without_workspaces
from outcore.memory.cuda_graphs.static_grads import StaticGrads, capture_parameters
from outcore.memory.offload.backends import HostBackend
from outcore.memory.replay.compile_policies import CompiledRecording
from outcore.memory.replay.replay_forward import ReplayPass

_WARM_UPS = 2
_WORTH = 0.99
"""A second capture must take at most this share of the first's memory."""


class StepGraph:
    """A compiled recording, captured when it is first called."""

    pool: GraphPool
    places: StaticGrads

    def __init__(self, compiled: CompiledRecording, model: nn.Module, other: StepGraph | None = None) -> None:
        self.compiled, self.model, self.other = compiled, model, other
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.under_way: _ForwardUnderWay = other.under_way if other is not None else _ForwardUnderWay()
        self.graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self.memory: tuple[int, list[torch.Tensor], list[int]] = (0, [], [])
        """What the graphs read: how often tensors were exchanged before, the tensors, their addresses."""
        self.bytes = 0
        """Bytes that the graphs have reserved, once they are captured, with the gradients and copies of the inputs."""

    @staticmethod
    def can(compiled: CompiledRecording) -> bool:
        """Whether a step can be captured: nothing is drawn again or read by Python, no size depends on the data."""
        return not (compiled.random or compiled.recording.uses_data or compiled.sized_by_data)

    @staticmethod
    def copied_bytes(tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the inputs, which graphs hold a second time."""
        return sum(t.nbytes for t in tensors)

    def ready(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a call with these inputs can be replayed now: nothing is under way, all is where it was."""
        if (
            self.graphs is None
            or any(t.requires_grad for t in tensors)
            or self.under_way.active()
            or not self.places.free()
        ):
            return False
        renewed, read, places = self.memory
        reads = self.compiled.recording.reads
        return (reads is None or reads.renewed == renewed) and [t.data_ptr() for t in read] == places

    def __call__(self, tensors: list[torch.Tensor]) -> tuple[Any] | None:
        """The outputs of the model, as a tuple; None where this call must run call by call."""
        if any(t.requires_grad for t in tensors) or self.under_way.active():
            return None
        if self.graphs is None:
            self.capture(tensors)
        elif not self.places.free():
            return None
        outputs = _Replay.apply(self, tensors, *self.parameters)  # type: ignore[no-untyped-call]
        results = iter(outputs if isinstance(outputs, tuple) else (outputs,))
        return (substitute(self.template, Ref, lambda _: next(results)),)

    def capture(self, tensors: list[torch.Tensor], *, warm: bool = False) -> None:
        """Warm up, then capture both graphs; the model is left as it was.

        Args:
            tensors: the inputs.
            warm: whether the same calls have run already; then there are steps before the capture only where it has
                to be tried how a norm is made again, or it fails without them: a step outside of a graph's pool takes
                more memory than one inside.
        """
        give_back()  # else what stays could lie in large blocks that nothing else uses
        before = ModelState(self.model, state_tensors(self.model), outer=False)  # graphs may read what calls keep
        other = self.other if self.other is not None and self.other.graphs is not None else None
        self.inputs = [t.detach().clone() for t in tensors]
        self.places = other.places if other is not None else StaticGrads(self.parameters)
        self.places.clear()
        device, size = self.parameters[0].device, self.compiled.offloaded_bytes
        self.tier = HostBackend(device, size) if size else None
        pool = GraphPool(device, self.tier, other.pool.handle if other is not None else None)
        try:
            with growing_segments():
                known = all(name in self.compiled.renorm.orders for name in self.compiled.norms)
                if not (warm and known and self.recorded_at_once(pool, before, trace=other is None)):
                    with pool.beside():
                        for _ in range(_WARM_UPS):
                            self.warm_up()
                    before.restore()
                    self.record_padded(pool, trace=other is None)
        finally:
            before.restore()
        del before
        give_back()
        self.memory = self.read_memory()
        self.bytes = self.pool.bytes + self.places.memory.nbytes + sum(t.nbytes for t in self.inputs)

    def read_memory(self) -> tuple[int, list[torch.Tensor], list[int]]:
        """The tensors that the graphs read and their addresses."""
        recording = self.compiled.recording
        tensors = [*self.model.parameters(), *self.model.buffers(), *recording.constants.values()]
        renewed = recording.reads.renewed if recording.reads is not None else 0
        return renewed, tensors, [t.data_ptr() for t in tensors]

    def forget_moved(self) -> None:
        """Drop the graphs if what they read has moved; a forward under way has its backward first."""
        if self.graphs is None or self.under_way.active():
            return
        renewed, tensors, places = self.memory
        reads = self.compiled.recording.reads
        if (reads is not None and reads.renewed != renewed) or [t.data_ptr() for t in tensors] != places:
            self.free()
            self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def recorded_at_once(self, pool: GraphPool, before: ModelState, *, trace: bool) -> bool:
        """Capture without warming up; whether that could be done."""
        handle = pool.handle
        try:
            self.record_padded(pool, trace=trace)
        except RuntimeError:
            before.restore()
            self.graphs, pool.handle = None, handle
            return False
        return True

    def warm_up(self) -> None:
        """Run a step as it will be captured."""
        with capture_parameters(self.model, self.parameters) as parameters:
            outputs = self.run()
            self.expect_gradients(outputs)
            self.differentiate(outputs, parameters)

    def expect_gradients(self, outputs: list[torch.Tensor]) -> None:
        """Have memory for the gradients of the outputs."""
        self.wanted = _wanted(outputs)
        self.gradients = [torch.zeros_like(o) for o, w in zip(outputs, self.wanted, strict=True) if w]

    def record_padded(self, pool: GraphPool, *, trace: bool) -> None:
        """Capture both graphs, again with padding blocks if these are predicted to save memory, and without if they did
        not."""
        padding_blocks = self.record(pool, PaddingSearch(pool.device), trace=trace)
        active = pool.bytes
        for tried in (padding_blocks, []) if padding_blocks else ():
            self.graphs = None
            self.record(pool.fresh(), PaddingSearch(pool.device, tried))
            if self.pool.bytes <= active:
                return

    def record(self, pool: GraphPool, padding: PaddingSearch, *, trace: bool = False) -> list[PaddingBlock]:
        """Capture both graphs; with `trace`, returns padding blocks with which they would take less memory."""
        give_back()
        if self.tier is not None:
            self.tier.empty()
        self.pool = pool
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        trace = trace and padding.trace()
        with capture_parameters(self.model, self.parameters) as parameters:
            with pool.recorded(forward):
                outputs = self.run(padding)
            padding.end_forward()
            self.outputs = [(_unowned(o), o.requires_grad) for o in outputs]
            self.expect_gradients(outputs)
            give_back()
            with pool.recorded(backward):
                self.found = self.differentiate(outputs, parameters, without_workspaces)
        self.graphs = (forward, backward)
        if not trace:
            return []
        events, steps = padding.traced(pool.segments())
        padding_blocks, least = best_padding_blocks(events, steps)
        return padding_blocks if least < _WORTH * reserved_by(events) else []

    def free(self) -> None:
        """Give the graphs' memory back."""
        if self.graphs is not None:
            self.graphs = None
            del self.outputs, self.gradients, self.inputs, self.places, self.pool, self.tier
            give_back()

    def run(self, padding: PaddingSearch | None = None) -> list[torch.Tensor]:
        """Run one forward; returns its outputs."""
        torch.clear_autocast_cache()  # what autocast makes of weights must be made in the graph, in every step

        def perform(tape: Tape, step: Step) -> None:
            if padding is None:
                Tape.step(tape, step)
                return
            padding.perform(tape, step)
            without_workspaces()

        result = ReplayPass(self.compiled, self.model, self.inputs, self.tier, perform).forward()
        torch.clear_autocast_cache()
        self.template = self.compiled.recording.result
        return [t for _, t in leaves(result, torch.Tensor)]

    def differentiate(
        self, outputs: list[torch.Tensor], parameters: list[nn.Parameter], then: Callable[[], None] = lambda: None
    ) -> list[bool]:
        """Run backward of a pass; returns which parameters have a gradient, each in its place.

        Args:
            outputs: of the pass; they are released.
            parameters: of the capture.
            then: is called after every gradient.
        """
        edges = [get_gradient_edge(o) for o, wanted in zip(outputs, self.wanted, strict=True) if wanted]
        outputs.clear()
        with self.places.filled(parameters, then):
            found = torch.autograd.grad(edges, parameters, self.gradients, allow_unused=True)
        return [gradient is not None for gradient in found]


class _PendingBackward:
    """Lives as long as a forward whose backward may come."""

    __slots__ = ("__weakref__",)


class _ForwardUnderWay:
    """Which forward is under way in the pool of the graphs."""

    def __init__(self) -> None:
        self.replay_pass: weakref.ref[_PendingBackward] | None = None

    def active(self, by: _PendingBackward | None = None) -> bool:
        """Whether any forward is under way, or this one is."""
        now = self.replay_pass() if self.replay_pass is not None else None
        return now is not None and by in (None, now)


class _Replay(torch.autograd.Function):
    """Launches the graphs."""

    @staticmethod
    def forward(ctx: Any, graphed: StepGraph, tensors: list[torch.Tensor], *parameters: torch.Tensor) -> Any:
        """Copy the inputs in and launch forward."""
        assert graphed.graphs is not None
        for place, tensor in zip(graphed.inputs, tensors, strict=True):
            place.copy_(tensor)
        graphed.graphs[0].replay()
        ctx.graphed, ctx.replay_pass = graphed, _PendingBackward()
        graphed.under_way.replay_pass = weakref.ref(ctx.replay_pass)
        ctx.set_materialize_grads(False)
        copies = tuple(o.clone() for o, _ in graphed.outputs)
        ctx.mark_non_differentiable(*(c for c, (_, led) in zip(copies, graphed.outputs, strict=True) if not led))
        return copies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Copy the gradients in and launch backward."""
        graphed: StepGraph = ctx.graphed
        assert graphed.graphs is not None
        if not graphed.under_way.active(ctx.replay_pass):
            raise RuntimeError(
                "this backward ran already, and its memory is used again: outcore's CUDA graphs cannot keep the graph; "
                "call within with graphs=False"
            )
        if any(g is not None for g, wanted in zip(gradients, graphed.wanted, strict=True) if not wanted):
            raise RuntimeError(
                "the model makes a loss itself, so outcore's CUDA graphs go back from that, but another of its outputs "
                "has a gradient; call within with graphs=False"
            )
        given = (g for g, wanted in zip(gradients, graphed.wanted, strict=True) if wanted)
        for place, gradient in zip(graphed.gradients, given, strict=True):
            place.zero_() if gradient is None else place.copy_(gradient)
        graphed.places.clear()
        graphed.graphs[1].replay()
        graphed.under_way.replay_pass = None
        # New tensors in the same memory, which nothing else holds: they become the parameters' own without a copy.
        places = zip(graphed.places.places, graphed.found, strict=True)
        return (None, None, *(place.detach() if found else None for place, found in places))


def _wanted(outputs: list[torch.Tensor]) -> list[bool]:
    """The outputs from which backward starts: a loss, if the model returns one, else all that require gradients."""
    losses = [o.requires_grad and o.numel() == 1 for o in outputs]
    return losses if any(losses) else [o.requires_grad for o in outputs]


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the same memory that does not own it: what forward leaves is copied before backward begins."""
    whole, make = tensor.untyped_storage(), torch._C._construct_storage_from_data_pointer
    storage = make(whole.data_ptr(), tensor.device, whole.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
