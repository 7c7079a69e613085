"""Where CUDA graphs leave the gradients of parameters.

A gradient outlives whatever backward works with beside it. In the graphs' own pool it would stand between blocks that
come and go, and the holes around it would fit nothing; so every gradient is copied to its place in one piece of memory
as soon as it is computed, which takes the time of reading and writing it once.

The places are handed out as they are: they become the parameters' gradients without another copy. They are overwritten
by the next backward, so a gradient that a parameter still has by then (because gradients are accumulated) is moved to
memory of its own. If anybody else still holds one, the graphs are not launched.

The node of autograd that accumulates a gradient belongs to the stream on which its parameter was first used, and lives
as long as any result of it: one of an ordinary step must not be part of a capture. So a capture has parameters of its
own, in the same memory. What the user has hooked to the gradients is called when they are handed out.

Under torch.compile with CUDA graphs it is torch that captures them (`GraphGradients`): a graph writes its results to
the same memory in every replay. Autograd does not copy the first gradient of a parameter, so `p.grad` is that memory,
and the next step would write over it before it adds: gradients of several batches that are added up, or are kept, would
silently be those of the last one. Loops that drop their gradients in every step need no copy. So when a backward is
over, it is noted which tensors it left, without holding them; those that are still there when the next forward begins
get memory of their own then, under the same tensor, wherever the loop may hold it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

_ALIGN = 512


class StaticGrads:
    """One piece of memory with a place for the gradient of every parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [-(-p.nbytes // _ALIGN) * _ALIGN for p in parameters]
        self.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=parameters[0].device)
        storage, offset = self.memory.untyped_storage(), 0
        self.places: list[torch.Tensor] = []
        for parameter, size in zip(parameters, sizes, strict=True):
            place = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            place.set_(storage, offset // parameter.element_size(), parameter.shape, _dense(parameter))
            self.places.append(place)
            offset += size
        del storage
        self.own = self.holders()

    def holders(self) -> int:
        """How many tensors lie in this memory."""
        count: int = torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata)
        return count

    @contextlib.contextmanager
    def filled(self, parameters: Sequence[nn.Parameter], then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Copy the gradients that backward computes for these parameters to their places, while this is entered.

        Args:
            parameters: one for every place.
            then: is called after each.
        """

        def to(place: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
            def moved(gradient: torch.Tensor) -> torch.Tensor:
                place.copy_(gradient)
                then()
                return place

            return moved

        handles = [p.register_hook(to(place)) for p, place in zip(parameters, self.places, strict=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def handed_out(self) -> list[nn.Parameter]:
        """The parameters whose gradients are in this memory."""
        address = self.memory.untyped_storage()._cdata
        held = [p for p in self.parameters if p.grad is not None and p.grad.layout is torch.strided]
        return [p for p in held if p.grad.untyped_storage()._cdata == address]  # type: ignore[union-attr]

    def free(self) -> bool:
        """Whether nothing but the parameters holds a gradient."""
        return self.holders() <= self.own + len(self.handed_out())

    def clear(self) -> None:
        """Move the gradients that parameters have there to memory of their own, before the places are overwritten."""
        for parameter in self.handed_out():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()
        if self.holders() > self.own:
            raise RuntimeError(
                "a gradient of the last step is still held, and outcore's CUDA graphs are about to write its memory "
                "again; clone gradients that are kept, or call within with graphs=False"
            )


@contextlib.contextmanager
def capture_parameters(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Give a model parameters of the capture's own while this is entered, in the memory of these."""
    new = {id(p): nn.Parameter(p.detach()) for p in parameters}
    tables = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if id(p) in new]
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase)]  # they have a list of their own
    flat = [m._flat_weights for m in layers]
    try:
        for table, name, parameter in tables:
            table[name] = new[id(parameter)]
        for layer, weights in zip(layers, flat, strict=True):
            layer.__dict__["_flat_weights"] = [new.get(id(w), w) for w in weights]
        yield [new[id(p)] for p in parameters]
    finally:
        for table, name, parameter in tables:
            table[name] = parameter
        for layer, weights in zip(layers, flat, strict=True):
            layer.__dict__["_flat_weights"] = weights


def _dense(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides of the gradient of a parameter."""
    return torch.empty_like(parameter, device="meta").stride()


class CudaGraphMemory:
    """Tells whether a tensor is in memory of CUDA graphs."""

    def __init__(self) -> None:
        self.reserved = -1
        self.ranges: list[tuple[int, int]] = []

    def __call__(self, tensor: torch.Tensor) -> bool:
        """Whether it is."""
        if tensor.device.type != "cuda":
            return False
        reserved = torch.cuda.memory_reserved(tensor.device)
        if reserved != self.reserved:
            segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
            self.ranges = [(s["address"], s["address"] + s["total_size"]) for s in segments]
            self.reserved = reserved
        place = tensor.untyped_storage().data_ptr()
        return any(first <= place < last for first, last in self.ranges)


class GraphGradients:
    """Watches the gradients of one model.

    Args:
        is_overwritten: whether the next replay writes over a tensor's memory.
    """

    def __init__(self, is_overwritten: Callable[[torch.Tensor], bool] | None = None) -> None:
        self.is_overwritten = is_overwritten if is_overwritten is not None else CudaGraphMemory()
        self.left: list[TensorWeakRef] = []
        """What the last backward has left."""

    def keep(self) -> None:
        """Give what is still there memory of its own; before a replay."""
        found = [tensor for reference in self.left if (tensor := reference()) is not None]
        self.left = []
        for tensor in found:
            if self.is_overwritten(tensor):
                tensor.data = tensor.detach().clone()

    def watch(self, results: Iterable[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        """Note what the backward of a forward's results leaves.

        Args:
            results: of the forward.
            leaves: whose gradients it makes.
        """

        def note() -> None:
            self.left += [TensorWeakRef(leaf.grad) for leaf in leaves if leaf.grad is not None]

        def when_over(_: torch.Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(note)

        for result in results:
            if result.requires_grad:
                result.register_hook(when_over)
