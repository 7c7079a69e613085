"""Where CUDA graphs leave the gradients of parameters.

A gradient outlives whatever backward works with beside it. In the graphs' own memory it would stand between pieces that
come and go, and the holes around it would fit nothing; so every gradient is copied to its place in one piece of memory
as soon as it is there, which takes the time of reading and writing it once.

The places are handed out as they are: they become the parameters' gradients without another copy. They are written
again by the next backward, so a gradient that a parameter still has by then (because gradients are accumulated) is
moved to memory of its own. If anybody else still holds one, the graphs are not launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

__all__ = ["Places"]

_ALIGN = 512


class Places:
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
    def filled(self) -> Iterator[None]:
        """While this is entered, the gradients that backward finds go to their places."""
        handles = [
            parameter.register_hook(place.copy_) for parameter, place in zip(self.parameters, self.places, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def lent(self) -> list[nn.Parameter]:
        """The parameters whose gradients are here."""
        address = self.memory.untyped_storage()._cdata
        return [p for p in self.parameters if p.grad is not None and p.grad.untyped_storage()._cdata == address]

    def free(self) -> bool:
        """Whether nobody but the parameters holds a gradient."""
        return self.holders() <= self.own + len(self.lent())

    def clear(self) -> None:
        """Before the places are written again, move what parameters have there."""
        for parameter in self.lent():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.clone()
        if self.holders() > self.own:
            raise RuntimeError(
                "a gradient of the last step is still held, and outcore's CUDA graphs are about to write its memory "
                "again; clone gradients that are kept, or call within with graphs=False"
            )


def _dense(parameter: torch.Tensor) -> tuple[int, ...]:
    """The strides that the gradient of a parameter has."""
    return torch.empty_like(parameter, device="meta").stride()
