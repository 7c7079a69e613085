"""Parameters whose copy to the device is still running while user code runs.

After a step that was done in backward, parameters are being fetched, and the next forward pass waits for each where it
is needed. Between the two, user code may do anything: clamp weights, load others, write through ``p.data``. Whoever
reads finds the right bytes already, because what is fetched is what was written back. Whoever writes would have it
undone by a copy that is still running, so that everything had to wait for all copies, just in case.

Instead, a parameter in flight changes its class for that while. The first thing that torch is asked to do with it makes
the compute stream wait for all parameters in flight and gives them their class back; what was asked for is done then. A
loop that does not touch its parameters never waits. What `zero_grad` looks at is let through: between a step and the
next forward a parameter in flight has no gradient, because it was used up, and says so without asking torch, which
would take the host of a small network longer than all the rest of this.

Others are written back when forward does not need them any more, and are in flight until backward needs them; these may
be asked for gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outcore.graph.structure import leaves
from outcore.memory.param_offload.flat_buffer import FlatBuffer

_METADATA_GETTERS = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype")
)
"""Attributes that say nothing about the values of a tensor."""
_GRADIENT: Any = torch.Tensor.grad


class InFlightParams:
    """The flat buffers of a model whose copies are still running while user code runs."""

    def __init__(self) -> None:
        self.flat_buffers: list[FlatBuffer] = []
        self._in_flight, self._without_gradient = _in_flight_classes(self)

    def mark(self, flat_buffers: Iterable[FlatBuffer], *, gradients: bool = False) -> None:
        """Mark the parameters of flat buffers as in flight: whoever touches one waits for all. With `gradients`,
        backward may accumulate their gradients before they are back."""
        in_flight = self._in_flight if gradients else self._without_gradient
        for flat_buffer in flat_buffers:
            if any(type(m.tensor) is not nn.Parameter or m.tensor.grad is not None for m in flat_buffer.members):
                flat_buffer.make_resident()
                continue
            self.flat_buffers.append(flat_buffer)
            for member in flat_buffer.members:
                member.tensor.__class__ = in_flight

    def unmark(self) -> None:
        """Give all parameters their class back; their copies may still be running."""
        for flat_buffer in self.flat_buffers:
            for member in flat_buffer.members:
                member.tensor.__class__ = nn.Parameter
        self.flat_buffers = []

    def wait_all(self) -> None:
        """Let the compute stream wait for all parameters in flight."""
        flat_buffers = self.flat_buffers
        self.unmark()
        for flat_buffer in flat_buffers:
            flat_buffer.make_resident()

    def wait_for(self, flat_buffer: FlatBuffer | None) -> None:
        """Let the compute stream wait for one flat buffer, if it is in flight."""
        if flat_buffer is not None and flat_buffer in self.flat_buffers:
            self.flat_buffers.remove(flat_buffer)
            for member in flat_buffer.members:
                member.tensor.__class__ = nn.Parameter
            flat_buffer.make_resident()


def _in_flight_classes(group: InFlightParams) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """The class of a parameter in flight, and of one that has no gradient either."""
    reference = weakref.ref(group)  # a class is held by its objects, where no garbage collector looks

    class InFlight(nn.Parameter):
        """A parameter that waits for its copy before torch does anything with it."""

        def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
            return nn.Parameter(data, requires_grad)  # a copy of it is an ordinary one

        @classmethod
        def __torch_function__(
            cls,
            func: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            if func in _METADATA_GETTERS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            if (found := reference()) is not None:
                found.wait_all()
            else:  # the model is gone, and some of its parameters are not
                _restore_classes(cls, (args, kwargs))
            return func(*args, **(kwargs or {}))

    class WithoutGradient(InFlight):
        """A parameter in flight whose gradient was used up by the update."""

        grad: Any = property(lambda _: None, lambda p, gradient: _GRADIENT.__set__(p, gradient))

    return InFlight, WithoutGradient


def _restore_classes(in_flight: type[nn.Parameter], given: Any) -> None:
    for _, tensor in leaves(given, in_flight):
        tensor.__class__ = nn.Parameter
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
