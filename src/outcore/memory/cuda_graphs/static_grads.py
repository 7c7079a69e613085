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
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

__all__ = ["StaticGrads", "capture_parameters"]

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
        return [p for p in self.parameters if p.grad is not None and p.grad.untyped_storage()._cdata == address]

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
