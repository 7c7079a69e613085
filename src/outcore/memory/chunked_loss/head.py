"""A linear layer whose result is made in chunks of rows, when and where it is wanted.

The result ``x @ weight.T + bias`` has a row for every row of ``x``. Here are the three operands, with the versions that
they had when the layer was called, and what is done with a chunk: its rows of the result, and from their gradient those
of the operands. The optimizer changes the weight, and somebody may still ask for the result then (a model that returns
its logits beside its loss): so when backward ends and lazy tensors are still held, a copy of the weight is taken.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F

from outcore.errors import OutcoreError
from outcore.memory.chunked_loss.row_ops import AutocastState

_HALF = (torch.float16, torch.bfloat16)


class Head:
    """The operands of a linear layer, flattened to rows."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows_per_chunk: int) -> None:
        self.x, self.weight = x.detach(), weight.detach()
        self.bias = bias.detach() if bias is not None else None
        self.rows_per_chunk = max(1, rows_per_chunk)
        self.wanted = tuple(t is not None and t.requires_grad for t in (x, weight, bias))
        """Of which operands gradients are wanted."""
        self.autocast = AutocastState.of(x.device)
        with torch.no_grad(), self.autocast.restored():
            probe = torch.zeros(1, weight.shape[1], dtype=x.dtype, device=x.device)
            self.dtype = F.linear(probe, self.weight[:1]).dtype
        self.members: list[weakref.ref[torch.Tensor]] = []
        """The lazy tensors that are made from it."""
        self._versions = self._now()
        self._copied = False

    @property
    def columns(self) -> int:
        """Numbers in a row of the result."""
        return self.weight.shape[0]

    @property
    def rows(self) -> torch.Tensor:
        """The rows of ``x``."""
        return self.x.reshape(-1, self.x.shape[-1])

    def _now(self) -> tuple[int, ...]:
        return tuple(t._version for t in (self.x, self.weight, self.bias) if t is not None and not t.is_inference())

    def check(self) -> None:
        """Refuse to compute from operands that were overwritten.

        Raises:
            OutcoreError: they were.
        """
        if self._now() != self._versions:
            raise OutcoreError(
                "the output of the last layer is read after its input or weight was written in place, and was not held "
                'until then; read it before, or call outcore.within with exact="bitwise"'
            )

    def keep_weight(self) -> None:
        """Copy what the optimizer is about to change, if a lazy tensor is still held."""
        if self._copied or not any(m() is not None for m in self.members) or self._now() != self._versions:
            return
        self.weight = self.weight.clone()
        self.bias = self.bias.clone() if self.bias is not None else None
        self._versions, self._copied = self._now(), True

    def whole(self) -> torch.Tensor:
        """The result as the layer itself makes it."""
        self.check()
        with torch.no_grad(), self.autocast.restored():
            return F.linear(self.x, self.weight, self.bias)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Rows, weight and bias in the type in which the layer computes."""
        self.check()
        bias = self.bias.to(self.dtype) if self.bias is not None else None
        return self.rows.to(self.dtype), self.weight.to(self.dtype), bias


def _product(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """A product of half-precision matrices that is not rounded before it is added to others."""
    if not one.is_cuda:
        return one.float() @ two.float()
    try:
        return torch.mm(one, two, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):  # an older library, or an odd shape
        return one @ two


class OperandGradients:
    """Gradients of a head's operands, added up chunk by chunk."""

    def __init__(self, head: Head, weight: torch.Tensor) -> None:
        self.head, self._weight = head, weight
        rows, exact = head.rows, torch.float32 if weight.dtype in _HALF else weight.dtype
        wants_x, wants_weight, wants_bias = head.wanted
        self.x = torch.zeros_like(rows, memory_format=torch.contiguous_format) if wants_x else None
        self.weight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if wants_weight else None
        self.bias = torch.zeros(len(weight), dtype=exact, device=weight.device) if wants_bias else None

    def add(self, at: slice | torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> None:
        """Add what a chunk of rows gives."""
        if self.x is not None:
            part = (grad @ self._weight).to(self.x.dtype)
            if isinstance(at, slice):
                self.x[at] += part
            else:
                self.x.index_add_(0, at, part)
        if self.weight is not None:
            if self.weight.dtype == grad.dtype:
                self.weight.addmm_(grad.t(), x)
            else:
                self.weight += _product(grad.t(), x)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)

    def scaled(self, factor: torch.Tensor) -> OperandGradients:
        """These gradients times a number, in their own memory."""
        for gradient in (self.x, self.weight, self.bias):
            if gradient is not None:
                gradient.mul_(factor.to(gradient.dtype))
        return self

    def plus(self, other: OperandGradients) -> OperandGradients:
        """The sum with others, in the memory of these."""
        for mine, theirs in ((self.x, other.x), (self.weight, other.weight), (self.bias, other.bias)):
            if mine is not None and theirs is not None:
                mine += theirs
        return self

    def result(self) -> tuple[Any, Any, Any]:
        """The gradients in the shapes and types of the operands."""
        head = self.head
        x = self.x.view(head.x.shape).to(head.x.dtype) if self.x is not None else None
        weight = self.weight.to(head.weight.dtype) if self.weight is not None else None
        bias = self.bias.to(head.bias.dtype) if self.bias is not None and head.bias is not None else None
        return x, weight, bias
