"""A tensor that stands for the result of a linear layer, and is made whole only where somebody needs it whole.

The logits of a language model are its largest tensor, and most of what is done to them works row by row and ends in one
number. So the last layer returns a `LazyRows`: a tensor without memory, with the layer's operands. Row operations
(`outcore.memory.chunked_loss.row_ops`) return further ones; reductions (`outcore.memory.chunked_loss.reductions`) run
the whole chain chunk by chunk. *Everything else* that is done to it, by whoever holds it, in Python or below, makes the
whole tensor first and goes on with that, so that no use of it can see another number than plain PyTorch would show
(beside rounding in another order); what it costs then is memory.

Autograd sees every lazy tensor as a node of its own, in the place where the plain one would be
(`outcore.memory.chunked_loss.chunked_autograd`), so hooks, retained gradients and `torch.autograd.grad` with respect to
it work, and gradients of lazy and of whole uses are added up by autograd itself.

When a lazy tensor was made whole, it is that tensor from then on: everything goes there, metadata too. Views of lazy
tensors are made as views of what was made whole, so that writing in place is seen by all that share memory.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from outcore.errors import OutcoreError
from outcore.graph.naming import function_name
from outcore.memory.chunked_loss.chunked_autograd import (
    LazyGradient,
    LazyTensor,
    LinearNode,
    RowOpNode,
    WholeNode,
    autograd_below,
    reduce_rows,
)
from outcore.memory.chunked_loss.head import Head
from outcore.memory.chunked_loss.reductions import reduction
from outcore.memory.chunked_loss.row_ops import RowLayout, RowOp, row_op

_METADATA = frozenset(
    "shape dtype device requires_grad is_cuda is_cpu is_mps is_xpu is_meta is_sparse is_quantized is_nested layout "
    "ndim is_leaf grad_fn output_nr size dim ndimension numel nelement element_size itemsize nbytes is_floating_point "
    "is_complex is_signed len is_contiguous stride storage_offset get_device is_inference is_mkldnn "
    "is_sparse_csr is_vulkan is_neg is_conj".split()
)
"""What can be said of a tensor without its numbers."""


def lazy_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, rows_per_chunk: int
) -> torch.Tensor:
    """The result of a linear layer, made when and as far as it is needed."""
    head = Head(x, weight, bias, rows_per_chunk)
    result: torch.Tensor = LinearNode.apply(x, weight, bias, head, LazyRows)  # type: ignore[no-untyped-call]
    return result


class LazyRows(LazyTensor):
    """Rows of a linear layer's result, after some operations on each."""

    parent: LazyRows | None
    op: RowOp | None
    """What it is made by from its parent; none for the layer's own result."""

    @staticmethod
    def __new__(cls, head: Head, parent: LazyRows | None = None, op: RowOp | None = None) -> LazyRows:
        shape = (*head.x.shape[:-1], head.columns) if op is None else op.shape
        stride = op.stride if op is not None else tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        made: LazyRows = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=head.dtype if op is None else op.dtype, device=head.x.device
        )
        made.head, made.parent, made.op = head, parent, op
        leading = tuple(shape[:-1])
        made.row_layout = RowLayout(None, leading, len(leading)) if op is None else op.layout
        made._raw = made._whole = None
        made._whole_version = 0
        made.consumed = made.hooked = False
        head.members.append(weakref.ref(made))
        return made

    _raw: torch.Tensor | None
    """Its numbers, once they were made."""
    _whole: torch.Tensor | None
    """The tensor that it is from then on, with its place in the graph of autograd."""
    _whole_version: int
    consumed: bool
    """Whether something was made of it lazily, so that its own node has a part of its gradient."""
    hooked: bool
    """Whether all of its gradient has to pass its own node."""

    # How it is made

    @property
    def is_lazy(self) -> bool:
        """Whether it was never made whole, and nothing whose memory it would share was."""
        above = self
        while above._whole is None:
            if above.op is None or not above.op.is_view or above.parent is None:
                return True
            above = above.parent
        return False

    def chain(self) -> list[RowOp]:
        """The operations from the layer to this, in order."""
        found: list[RowOp] = []
        here: LazyRows | None = self
        while here is not None and here.op is not None:
            found.append(here.op)
            here = here.parent
        return found[::-1]

    def raw(self) -> torch.Tensor:
        """Its numbers as they are now, outside of autograd: for whoever works below it."""
        if self._whole is not None:
            return self._whole.detach()
        if self._raw is None:
            with _training(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                if self.op is not None and self.parent is not None and self.op.is_view:
                    self._raw = self.op.as_called(self.parent.raw())
                else:
                    self._raw = self._afresh()
        return self._raw

    def as_made(self) -> torch.Tensor:
        """The numbers of the tensor as it was made, without later writes that autograd did not see."""
        here: LazyRows | None = self
        while here is not None and not here.written:
            here = here.parent
        if here is None:
            return self.raw()
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return self._afresh()

    def _afresh(self) -> torch.Tensor:
        """Its numbers from those of its parent, or from the layer."""
        if self.op is None or self.parent is None:
            return self.head.whole()
        return self.op.as_called(self.parent.as_made())

    @property
    def written(self) -> bool:
        """Whether it was written into after it was made whole."""
        return self._whole is not None and self._whole._version != self._whole_version

    def whole(self) -> torch.Tensor:
        """The tensor itself, with its place in the graph."""
        if self._whole is None:
            modes = _training(), torch._C.DisableTorchFunctionSubclass()
            with modes[0], modes[1], torch.set_grad_enabled(self.requires_grad):
                seen = self._as_view()
                self._whole = seen if seen is not None else _node(self)
                if self.retains_grad:
                    self._whole.retain_grad()  # of what it is after writing in place
            self._raw = None
            self._whole_version = self._whole._version
        return self._whole

    def _as_view(self) -> torch.Tensor | None:
        """As a view of its parent made whole, if it would be one and the gradient of its own node does not matter."""
        if self.op is None or self.parent is None or not self.op.is_view:
            return None
        base = self.parent.whole()
        return self.op.as_called(base) if not self.hooked or self.parent.written else None

    @property
    def differentiated(self) -> torch.Tensor:
        """The tensor whose node has its gradient: itself, unless it went on as a view of another, or was written."""
        if self._whole is None or (not self.written and type(self._whole.grad_fn).__name__ == "WholeNodeBackward"):
            return self
        return self._whole

    # What is done to it

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A function of torch is called on it, or a method or attribute of its own."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return _gradients(*args, **kwargs)
        name = function_name(func)
        if not args and isinstance(kwargs.get("input"), LazyRows):  # torch.nn.functional, by name
            args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
        first = args[0] if args else None
        if isinstance(first, LazyRows):
            if name in ("register_hook", "retain_grad", "retains_grad", "grad"):
                return _of_gradient(name, func, first, args[1:], kwargs)
            if first.is_lazy:
                if name in _METADATA:
                    with torch._C.DisableTorchFunctionSubclass():
                        return func(*args, **kwargs)
                if (made := first._lazily(name, func, args[1:], kwargs)) is not None:
                    return made
        result = func(*_made_whole(args), **_made_whole(kwargs))
        if isinstance(first, LazyRows) and result is first._whole:  # as written in place, or a view of all of it
            return first
        return result

    def _lazily(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a row operation or a reduction; none if the whole tensor is needed."""
        with torch._C.DisableTorchFunctionSubclass():
            op = row_op(name, func, self, self.row_layout, args, kwargs)
            if op is not None:
                if op.same:
                    return self
                self.consumed = True
                if op.detaches:
                    return LazyRows(self.head, self, op)
                return RowOpNode.apply(self, op, LazyRows)  # type: ignore[no-untyped-call]
            found = reduction(name, func, self, self.row_layout, args, kwargs)
            if found is None or (self.requires_grad and torch.is_grad_enabled() and self.head.x.is_inference()):
                return None
            self.consumed = True
            return reduce_rows(self, found)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Somebody below autograd needs its numbers."""
        swapped: dict[int, Any] = {}

        def number(value: Any) -> Any:
            if isinstance(value, LazyRows):
                raw = value.raw()
                swapped[id(raw)] = value
                return raw
            return value.whole() if isinstance(value, LazyGradient) else value

        with autograd_below():
            given = tree_map(number, args), tree_map(number, kwargs or {})
        result = func(*given[0], **given[1])
        return tree_map(lambda value: swapped.get(id(value), value), result)


def _training() -> contextlib.AbstractContextManager[Any]:
    """Outside of inference mode, whose tensors could not be differentiated later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _node(tensor: LazyRows) -> torch.Tensor:
    """The whole tensor, whose gradient goes to the lazy one."""
    made: torch.Tensor = WholeNode.apply(tensor, tensor.raw())  # type: ignore[no-untyped-call]
    return made


def _made_whole(values: Any) -> Any:
    """Arguments without lazy tensors."""
    return tree_map(lambda value: value.whole() if isinstance(value, LazyRows) else value, values)


def _of_gradient(
    name: str, func: Callable[..., Any], tensor: LazyRows, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Hooks on its gradient, and the gradient that was retained: whole, since it may be looked at when operands have
    changed."""
    at = tensor.differentiated
    if name in ("register_hook", "retain_grad"):
        if at is not tensor and tensor.consumed and not tensor.written:
            raise OutcoreError("a hook on a view of lazy logits comes too late; register it before the view is used")
        tensor.hooked |= at is tensor
    with torch._C.DisableTorchFunctionSubclass():
        if at is tensor and name == "retain_grad" and not tensor.retains_grad:
            tensor.register_hook(_whole_gradient)  # type: ignore[no-untyped-call]
        if at is tensor and name == "register_hook":
            hook = args[0]

            def with_whole(grad: torch.Tensor) -> torch.Tensor:
                grad = _whole_gradient(grad)
                changed = hook(grad)
                return grad if changed is None else changed

            return func(tensor, with_whole)
        return func(at, *args, **kwargs)


def _whole_gradient(grad: torch.Tensor) -> torch.Tensor:
    return grad.whole() if isinstance(grad, LazyGradient) else grad


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` with lazy tensors among what is differentiated, or among that with respect to which."""

    def node(value: Any) -> Any:
        return value.differentiated if isinstance(value, LazyRows) else value

    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    parted = [
        i for i, t in enumerate(inputs) if isinstance(t, LazyRows) and t.consumed and t.differentiated is not t
    ]  # views that were used lazily before, and whole after that
    unused = kwargs.pop("allow_unused", None)
    with torch._C.DisableTorchFunctionSubclass():
        all_inputs = [*map(node, inputs), *(inputs[i] for i in parted)]
        grad: Any = torch.autograd.grad
        found = grad(_made_whole(outputs), all_inputs, *args, allow_unused=True if parted else unused, **kwargs)
        grads = [_whole_gradient(g) if g is not None else None for g in found]
        for i, more in zip(parted, grads[len(inputs) :], strict=True):
            if more is not None and not inputs[i].written:
                before = grads[i]
                grads[i] = more if before is None else before + more
    return tuple(grads[: len(inputs)])


def lazily(
    rows_per_chunk: int, name: str, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """The result of a planned last layer, if the call is one that can wait."""
    if module is not None:
        if type(module) is not nn.Linear or len(args) != 1 or kwargs:
            return None
        operands: tuple[Any, ...] = (args[0], module.weight, module.bias)
    else:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        if name != "linear" or len(args) > 3 or set(given) - {"input", "weight", "bias"}:
            return None
        operands = tuple(given.get(key) for key in ("input", "weight", "bias"))
    x, weight, bias = operands
    if any(type(t) not in (torch.Tensor, nn.Parameter) for t in (x, weight)) or weight.dim() != 2 or x.dim() < 2:
        return None
    if bias is not None and type(bias) not in (torch.Tensor, nn.Parameter):
        return None
    if not any(t is not None and t.requires_grad for t in operands) or not x.numel() or x.is_inference():
        return None
    return lazy_linear(x, weight, bias, rows_per_chunk=rows_per_chunk)
