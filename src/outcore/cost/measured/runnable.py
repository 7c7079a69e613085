"""An operation made runnable: tensors of its sizes, and the calls that compute it.

The forward call is what a training step does, with autograd recording. The backward call asks autograd for
the gradients of weight, bias and (unless it is a first layer) input from a kept graph, which runs the kernels
of a backward pass and nothing else. Inputs are random: zeros run faster than real data on some hardware.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outcore.cost.predicted.operation import Operation
from outcore.machine.clock import TimedRuns, tf32, time_calls

Call = Callable[[], Tensor]

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "dropout": F.dropout,
}


def precision_context(operation: Operation) -> AbstractContextManager[None]:
    """Sets TF32 for the time in which the operation is prepared and run."""
    return tf32(operation.dtype == "tf32")


def prepare(operation: Operation, device: torch.device | str) -> tuple[Call, list[Tensor]]:
    """The forward call of an operation on fresh random tensors, and the tensors it has gradients for."""
    maker = {
        "conv": _convolution,
        "conv_transpose": _convolution,
        "linear": _linear,
        "matmul": _matmul,
        "attention": _attention,
        "norm": _norm,
        "pool": _pool,
        "elementwise": _elementwise,
        "copy": _copy,
        "softmax": _softmax,
        "embedding": _embedding,
    }[operation.kind]
    call, wanted = maker(operation, torch.device(device))
    return call, [tensor.requires_grad_() for tensor in wanted]


def time_operation(
    operation: Operation, device: torch.device | str, *, seconds: float = 0.05, most: int = 30
) -> TimedRuns:
    """Times one operation in its direction on `device`.

    >>> time_operation(Operation("softmax", batch=4, in_channels=10), "cpu", seconds=0.001).min_s > 0
    True
    """
    # One thread: its own time, whatever else the computer does. Several: there is only the wall clock.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with precision_context(operation):
        forward, wanted = prepare(operation, device)
        if operation.direction == "forward":
            return time_calls(forward, device, seconds=seconds, most=most, clock=clock)
        output = forward()
        gradient = torch.randn_like(output)

        def backward() -> object:
            return torch.autograd.grad(output, wanted, gradient, retain_graph=True)

        return time_calls(backward, device, seconds=seconds, most=most, clock=clock)


def _random(operation: Operation, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(_DTYPES[operation.dtype])


def _image(operation: Operation, device: torch.device) -> Tensor:
    x = _random(operation, device, operation.batch, operation.in_channels, *operation.size)
    return x.to(memory_format=_memory_format(operation))


def _memory_format(operation: Operation) -> torch.memory_format:
    if operation.channels_last and len(operation.size) == 2:
        return torch.channels_last
    if operation.channels_last and len(operation.size) == 3:
        return torch.channels_last_3d
    return torch.contiguous_format


def _convolution(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    x, transposed = _image(op, device), op.kind == "conv_transpose"
    first, second = (op.in_channels, op.out_channels) if transposed else (op.out_channels, op.in_channels)
    weight = _random(op, device, first, second // op.groups, *op.kernel).to(memory_format=_memory_format(op))
    bias = _random(op, device, op.out_channels) if op.bias else None
    wanted = [weight, *([bias] if bias is not None else [])] if op.weight_grad else []
    wanted += [x] if op.input_grad else []

    def call() -> Tensor:
        return torch.convolution(
            x, weight, bias, op.stride, op.padding, op.dilation, transposed, op.output_padding, op.groups
        )

    return call, wanted


def _linear(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    x = _random(op, device, op.batch, *op.size, op.in_channels)
    weight = _random(op, device, op.out_channels, op.in_channels)
    bias = _random(op, device, op.out_channels)
    return lambda: F.linear(x, weight, bias), [weight, bias, *([x] if op.input_grad else [])]


def _matmul(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    a = _random(op, device, op.batch, op.size[0], op.in_channels)
    b = _random(op, device, op.batch, op.in_channels, op.out_channels)
    return lambda: torch.bmm(a, b), [a, b]


def _attention(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    queries, keys = op.size
    q = _random(op, device, op.batch, op.groups, queries, op.in_channels)
    k = _random(op, device, op.batch, op.groups, keys, op.in_channels)
    v = _random(op, device, op.batch, op.groups, keys, op.out_channels)
    causal = op.variant == "causal"
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), [q, k, v]


def _norm(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    weight, bias = _random(op, device, op.in_channels), _random(op, device, op.in_channels)
    if op.variant in ("layer", "rms"):
        x = _random(op, device, op.batch, *op.size, op.in_channels)
        shape = (op.in_channels,)
        if op.variant == "rms":
            return lambda: F.rms_norm(x, shape, weight), [x, weight]
        return lambda: F.layer_norm(x, shape, weight, bias), [x, weight, bias]
    x = _image(op, device)
    if op.variant == "group":
        return lambda: F.group_norm(x, op.groups, weight, bias), [x, weight, bias]
    if op.variant == "instance":
        return lambda: F.instance_norm(x, weight=weight, bias=bias), [x, weight, bias]
    # Under autocast, where small types are used, its weights stay float32, and libraries take other kernels for that.
    weight, bias = (t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in (weight, bias))
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return lambda: F.batch_norm(x, mean, variance, weight, bias, training=True), [x, weight, bias]


def _pool(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    x, dims = _image(op, device), len(op.size)
    pools: dict[str, Any] = {
        "max": (F.max_pool1d, F.max_pool2d, F.max_pool3d),
        "avg": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    }
    pool = pools[op.variant][dims - 1]
    return lambda: pool(x, op.kernel, op.stride, op.padding), [x]


def _elementwise(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    x = _image(op, device)
    if op.variant in _ELEMENTWISE:
        function = _ELEMENTWISE[op.variant]
        return lambda: function(x), [x]
    other = torch.randn_like(x)
    binary = torch.add if op.variant == "add" else torch.mul
    return lambda: binary(x, other), [x, other]


def _copy(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    x = _image(op, device)
    if op.variant == "layout":
        other = torch.contiguous_format if op.channels_last else torch.channels_last
        if len(op.size) == 3 and not op.channels_last:
            other = torch.channels_last_3d
        if len(op.size) in (2, 3):
            return lambda: x.contiguous(memory_format=other), [x]
        return lambda: x.transpose(1, -1).contiguous(), [x]
    return lambda: x.clone(), [x]


def _softmax(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    x = _random(op, device, op.batch, *op.size, op.in_channels)
    return lambda: torch.softmax(x, -1), [x]


def _embedding(op: Operation, device: torch.device) -> tuple[Call, list[Tensor]]:
    indices = torch.randint(op.in_channels, (op.batch, *op.size), device=device)
    weight = _random(op, device, op.in_channels, op.out_channels)
    return lambda: F.embedding(indices, weight), [weight]
