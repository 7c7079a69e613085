"""Nodes of autograd for lazy rows: what is differentiated in chunks, and what is not.

    hidden, weight ──LinearNode──▶ logits (lazy) ──RowOpNode──▶ … (lazy) ──ReductionNode──▶ loss
         ▲                              ▲                           ▲             │
         └── chunks, or a product ◀─────┴── LazyGradient ◀──────────┴─────────────┘

Backward of a reduction does not make the gradient of its rows but a `LazyGradient`, which says how it is made. It goes
the way that the gradient would go, node by node, and where it arrives at the layer, the gradients of the operands are
made in chunks, or were made in forward already. Whoever looks at it on its way (a hook, autograd where it adds two
gradients up, a backward that is differentiated itself) gets it whole. Two lazy gradients of one tensor stay lazy: their
sum is a longer list.

Gradients are made in forward where the incoming one will be a single number, but not in float16, where the scale of the
loss, which keeps small numbers from vanishing, is known in backward alone.

Who asks for the numbers of a lazy tensor below autograd has switched it off for this thread by excluding its dispatch
keys. To make a gradient there, which takes a backward of its own, they are admitted again for as long as that takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils._pytree import tree_map

from outcore.memory.chunked_loss.head import Head, OperandGradients
from outcore.memory.chunked_loss.reductions import RowReduction

if TYPE_CHECKING:
    from outcore.memory.chunked_loss.row_ops import RowLayout, RowOp

_HALF = (torch.float16, torch.bfloat16)


class LazyTensor(torch.Tensor):
    """What the nodes know of a lazy tensor (`outcore.memory.chunked_loss.lazy_rows`)."""

    head: Head
    row_layout: RowLayout

    def chain(self) -> list[RowOp]:
        """The operations from the layer to this, in order."""
        raise NotImplementedError

    def as_made(self) -> torch.Tensor:
        """The numbers of the tensor as it was made, without later writes that autograd did not see."""
        raise NotImplementedError


@dataclass
class Term:
    """A reduction of some rows, with the gradient of its result."""

    head: Head
    chain: list[RowOp]
    """From the layer to the rows that are reduced."""
    rows: tuple[torch.Tensor | None, int]
    """Which rows of the layer, and how many."""
    reduction: RowReduction
    grad: torch.Tensor | None = None
    made: OperandGradients | None = None
    """Gradients of the operands, without the incoming one, if they were made in forward."""

    def chunks(self) -> list[tuple[slice, slice | torch.Tensor]]:
        """Places among the rows, and which rows of the layer are there."""
        index, count = self.rows
        step = self.head.rows_per_chunk
        parts = [slice(a, min(a + step, count)) for a in range(0, count, step)]
        if index is None:
            return [(part, part) for part in parts]
        flat = index.reshape(-1)
        if count and bool((flat == torch.arange(int(flat[0]), int(flat[0]) + count, device="cpu")).all()):
            at = int(flat[0])
            return [(part, slice(part.start + at, part.stop + at)) for part in parts]
        moved = flat.to(self.head.x.device, non_blocking=True)
        return [(part, moved[part]) for part in parts]

    def forward(self, gradients: bool) -> torch.Tensor:
        """The result of the reduction; with gradients of the operands of the layer, if they are wanted now."""
        head, sums, found = self.head, self.reduction.sums, []
        x, weight, bias = head.operands()
        self.made = OperandGradients(head, weight) if gradients else None
        scale, total, dtype = None, None, head.dtype
        for place, rows in self.chunks():
            taken = x[rows]
            chunk = F.linear(taken, weight, bias)
            with torch.set_grad_enabled(gradients):
                part, dtype = self._reduced(chunk.requires_grad_(gradients), place)
            if self.made is not None:
                scale = self.reduction.factor(part.detach()) if scale is None else scale
                (grad,) = torch.autograd.grad(part, chunk, scale)
                self.made.add(rows, taken, grad)
                del grad
            del chunk
            part = part.detach()
            if not sums:
                found.append(part)
            else:
                total = part if total is None else total + part
        if total is None:
            assert self.reduction.arrange is not None
            return self.reduction.arrange(torch.cat(found))
        return (total if self.reduction.divisor is None else total / self.reduction.divisor).to(dtype)

    def backward(self) -> OperandGradients:
        """The gradients of the layer's operands."""
        assert self.grad is not None
        if self.made is not None:
            made, self.made = self.made, None
            return made.scaled(self.grad)
        x, weight, bias = self.head.operands()
        made, incoming = OperandGradients(self.head, weight), None
        flat = self.reduction.flatten(self.grad) if not self.reduction.sums and self.reduction.flatten else None
        for place, rows in self.chunks():
            taken = x[rows]
            chunk = F.linear(taken, weight, bias).requires_grad_()
            with torch.enable_grad():
                part, _ = self._reduced(chunk, place)
            if flat is not None:
                incoming = flat[place]
            elif incoming is None:
                incoming = self.reduction.factor(part.detach()) * self.grad.to(part.dtype)
            (grad,) = torch.autograd.grad(part, chunk, incoming)
            made.add(rows, taken, grad)
            del part, chunk, grad
        return made

    def _reduced(self, chunk: torch.Tensor, place: slice) -> tuple[torch.Tensor, torch.dtype]:
        """The sum of a chunk or the numbers of its rows, and in which type the library would give it."""
        for op in self.chain:
            chunk = op.to_chunk(chunk)
        made = self.reduction.of_chunk(chunk, place)
        if not self.reduction.sums:
            return made, made.dtype
        return made.sum(dtype=torch.float32 if made.dtype in _HALF else made.dtype), made.dtype

    def of(self, tensor: LazyTensor) -> torch.Tensor:
        """The whole gradient with respect to a lazy tensor on the way."""
        with torch.enable_grad():
            here = end = tensor.as_made().detach().requires_grad_()
            for op in self.chain[len(tensor.chain()) :]:
                end = op.as_called(end)
            result = self.reduction.as_called(end)
        assert self.grad is not None
        (grad,) = torch.autograd.grad(result, here, self.grad)
        return grad


class LazyGradient(torch.Tensor):
    """The gradient of a lazy tensor, not made yet."""

    of: LazyTensor
    terms: list[Term]

    @staticmethod
    def __new__(cls, of: LazyTensor, terms: list[Term]) -> LazyGradient:
        with torch._C.DisableTorchFunctionSubclass():
            made: LazyGradient = torch.Tensor._make_wrapper_subclass(
                cls, tuple(of.shape), strides=of.stride(), dtype=of.dtype, device=of.device
            )
        made.of, made.terms = of, terms
        return made

    def whole(self) -> torch.Tensor:
        """The gradient as one tensor: the sum of its terms."""
        first, *others = (term.of(self.of) for term in self.terms)
        for other in others:
            first = first + other
        return first

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Somebody looks at it."""
        if func is torch.ops.aten.add.Tensor and not kwargs and all(isinstance(a, cls) for a in args):
            one, two = args
            if one.of is two.of:
                return LazyGradient(one.of, [*one.terms, *two.terms])
        if func is torch.ops.aten.detach.default:
            return LazyGradient(args[0].of, args[0].terms)

        def number(value: Any) -> Any:
            return value.whole() if isinstance(value, cls) else value

        with autograd_below():
            given = tree_map(number, args), tree_map(number, kwargs or {})
        return func(*given[0], **given[1])


def reduce_rows(tensor: LazyTensor, found: RowReduction) -> torch.Tensor:
    """Reduce a lazy tensor, chunk by chunk."""
    wanted = tensor.requires_grad and torch.is_grad_enabled() and found.differentiable
    layout = tensor.row_layout
    term = Term(tensor.head, tensor.chain(), (layout.index, layout.count), found)
    if not wanted:
        with torch.no_grad():
            return term.forward(gradients=False)
    made: torch.Tensor = ReductionNode.apply(tensor, term)  # type: ignore[no-untyped-call]
    return made


class LinearNode(Function):
    """The layer itself: returns its result, lazily."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, head: Head, lazy: type[LazyTensor]) -> Any:
        """Nothing is computed."""
        ctx.head = head
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        ctx.early = bool(getattr(weight, "_post_accumulate_grad_hooks", None))
        ctx.set_materialize_grads(False)
        return lazy(head)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Gradients of the operands, in chunks where the result was used in chunks."""
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None
        head: Head = ctx.head
        if ctx.early:  # an optimizer may step as soon as there is a gradient
            head.keep_weight()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(head.keep_weight)
        x, weight = ctx.saved_tensors  # which also refuses operands that were overwritten
        if isinstance(grad, LazyGradient) and not torch.is_grad_enabled():
            first, *others = (term.backward() for term in grad.terms)
            for other in others:
                first = first.plus(other)
            return *first.result(), None, None
        grad = grad.whole() if isinstance(grad, LazyGradient) else grad
        rows = grad.reshape(-1, grad.shape[-1]).to(head.dtype)
        to_x = (rows @ weight.to(head.dtype)).view(head.x.shape).to(head.x.dtype) if weight is not None else None
        to_weight = None
        if x is not None:
            to_weight = (rows.t() @ x.reshape(-1, x.shape[-1]).to(head.dtype)).to(head.weight.dtype)
        to_bias = rows.sum(0).to(head.bias.dtype) if head.bias is not None and ctx.needs_input_grad[2] else None
        return to_x, to_weight, to_bias, None, None


class RowOpNode(Function):
    """A row operation, done lazily."""

    @staticmethod
    def forward(ctx: Any, tensor: LazyTensor, op: RowOp, lazy: type[LazyTensor]) -> Any:
        """Nothing is computed."""
        ctx.op = op
        ctx.save_for_backward(tensor)
        ctx.set_materialize_grads(False)
        return lazy(tensor.head, tensor, op)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """A lazy gradient goes on as it is; another is that of the operation on the whole tensor."""
        (grad,) = grads
        (tensor,) = ctx.saved_tensors
        if grad is None:
            return None, None, None
        if isinstance(grad, LazyGradient):
            if not torch.is_grad_enabled() and isinstance(tensor, LazyTensor):
                return LazyGradient(tensor, grad.terms), None, None
            grad = grad.whole()
        return _differentiated(ctx.op.as_called, tensor, grad), None, None


class ReductionNode(Function):
    """A reduction, done in chunks."""

    @staticmethod
    def forward(ctx: Any, tensor: LazyTensor, term: Term) -> Any:
        """The result, and where it is a sum, the gradients of the layer's operands."""
        ctx.term = term
        ctx.save_for_backward(tensor)
        ctx.set_materialize_grads(False)
        dtypes = {term.head.dtype, *(op.dtype for op in term.chain)}
        return term.forward(gradients=term.reduction.sums and torch.float16 not in dtypes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradient of the rows, not made yet."""
        (grad,) = grads
        if grad is None:
            return None, None
        (tensor,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not isinstance(tensor, LazyTensor):
            return _differentiated(ctx.term.reduction.as_called, tensor, grad), None
        term, ctx.term = ctx.term, replace(ctx.term, made=None)  # a second backward makes its chunks again
        return LazyGradient(tensor, [replace(term, grad=grad)]), None


class WholeNode(Function):
    """Replaces a lazy tensor by its numbers, for an operation that needs all rows at once."""

    @staticmethod
    def forward(ctx: Any, tensor: LazyTensor, numbers: torch.Tensor) -> Any:
        """Its numbers, in their memory."""
        ctx.set_materialize_grads(False)
        return numbers.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Its gradient is that of the lazy tensor."""
        return grads[0], None


def _differentiated(func: Callable[[Any], Any], tensor: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a function of the whole tensor, which can be differentiated again if that is wanted."""
    again = torch.is_grad_enabled()
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        here: torch.Tensor = tensor
        if isinstance(tensor, LazyTensor):
            numbers = tensor.as_made()
            here = WholeNode.apply(tensor, numbers) if again else numbers  # type: ignore[no-untyped-call]
        if not again:
            here = here.detach().requires_grad_()
        result = func(here)
    (found,) = torch.autograd.grad(result, here, grad, create_graph=again)
    return found


_torch_c: Any = torch._C
_KEYS = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")


@contextlib.contextmanager
def autograd_below() -> Iterator[None]:
    """Let autograd record again."""
    included = _torch_c._dispatch_tls_local_include_set()
    excluded = _torch_c._dispatch_tls_local_exclude_set()
    for key in _KEYS:
        excluded = excluded.remove(getattr(_torch_c.DispatchKey, key))
    with _torch_c._ForceDispatchKeyGuard(included, excluded):
        yield
