"""Parameters that are still on their way to the device while user code runs.

After a step that was done in backward, parameters are on their way back, and the next forward pass waits for each where
it is needed. Between the two, user code may do anything: clamp weights, load others, write through ``p.data``. Whoever
reads finds the right bytes already, because what comes back is what was sent. Whoever writes would have it undone by a
copy that is still running, so that everything had to wait for all copies, just in case.

Instead, a parameter that is late changes its class for that while. The first thing that torch is asked to do with it
makes the computing stream wait for all that are late and gives them their class back; what was asked for is done then.
A loop that leaves its parameters alone never waits. What `zero_grad` looks at is let through: between a step and the
next forward a parameter that is late has no gradient, because it was used up, and says so without asking torch, which
would take the host of a small network longer than all the rest of this.

Others leave when forward does not need them any more, and are late until backward comes to them; they may be asked for
gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outcore.graph.structure import leaves
from outcore.memory.param_offload.flat_buffer import FlatBuffer

__all__ = ["InFlightParams"]

_HARMLESS = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype")
)
"""Says nothing about what is in a tensor."""
_GRADIENT: Any = torch.Tensor.grad


class InFlightParams:
    """The flat buffers of a model that are still coming."""

    def __init__(self) -> None:
        self.flat_buffers: list[FlatBuffer] = []
        self._late, self._without = _late(self)

    def expect(self, flat_buffers: Iterable[FlatBuffer], *, gradients: bool = False) -> None:
        """User code runs, and these are still coming; whoever touches one waits for all. Backward may bring their
        gradients before they are received."""
        late = self._late if gradients else self._without
        for flat_buffer in flat_buffers:
            if any(type(m.tensor) is not nn.Parameter or m.tensor.grad is not None for m in flat_buffer.members):
                flat_buffer.arrive()
                continue
            self.flat_buffers.append(flat_buffer)
            for member in flat_buffer.members:
                member.tensor.__class__ = late

    def dismiss(self) -> None:
        """User code is over: parameters are what they were, and may still be coming."""
        for flat_buffer in self.flat_buffers:
            for member in flat_buffer.members:
                member.tensor.__class__ = nn.Parameter
        self.flat_buffers = []

    def receive(self) -> None:
        """What is computed from here on comes after them."""
        flat_buffers = self.flat_buffers
        self.dismiss()
        for flat_buffer in flat_buffers:
            flat_buffer.arrive()

    def admit(self, flat_buffer: FlatBuffer | None) -> None:
        """One is needed now, if it is late."""
        if flat_buffer is not None and flat_buffer in self.flat_buffers:
            self.flat_buffers.remove(flat_buffer)
            for member in flat_buffer.members:
                member.tensor.__class__ = nn.Parameter
            flat_buffer.arrive()


def _late(group: InFlightParams) -> tuple[type[nn.Parameter], type[nn.Parameter]]:
    """The class of a parameter that is late, and of one that has no gradient either."""
    reference = weakref.ref(group)  # a class is held by its objects, where no garbage collector looks

    class Late(nn.Parameter):
        """Torch asks here before it does anything with it."""

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
            if func in _HARMLESS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            if (found := reference()) is not None:
                found.receive()
            else:  # the model is gone, and some of its parameters are not
                _adopt_orphans(cls, (args, kwargs))
            return func(*args, **(kwargs or {}))

    class WithoutGradient(Late):
        """It was used up."""

        grad: Any = property(lambda _: None, lambda p, gradient: _GRADIENT.__set__(p, gradient))

    return Late, WithoutGradient


def _adopt_orphans(late: type[nn.Parameter], given: Any) -> None:
    for _, tensor in leaves(given, late):
        tensor.__class__ = nn.Parameter
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
