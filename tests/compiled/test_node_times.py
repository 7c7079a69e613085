"""What nodes of a joint graph compute, and how long that takes on a device that was calibrated."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from outcore.compiled.times.node_times import calibrated_seconds, operation_of
from outcore.machine.catalogue import find

aten = torch.ops.aten


def traced(function: Callable[..., Any], *tensors: torch.Tensor) -> list[fx.Node]:
    """The calls of a function."""
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    return [n for n in graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]


def flops_of(node: fx.Node) -> int:
    """As torch counts them."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(flop_registry[node.target.overloadpacket](*args, **kwargs, out_val=node.meta["val"]))  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(12))
def test_a_convolution_has_the_arithmetic_that_torch_counts(seed: int) -> None:
    draw = random.Random(seed)
    spatial, transposed = draw.choice((1, 2, 3)), seed % 3 == 0
    groups = draw.choice((1, 2))
    kernel, stride, padding = draw.randint(1, 3), draw.randint(1, 2), draw.randint(0, 1)
    channels, outputs = 2 * groups, 4 * groups
    images = torch.randn(draw.randint(1, 3), channels, *(8 + draw.randint(0, 2) for _ in range(spatial)))
    shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    weight = torch.randn(*shape, *([kernel] * spatial))
    how = ([stride] * spatial, [padding] * spatial, [1] * spatial, transposed, [0] * spatial, groups)
    wanted = [draw.random() < 0.7, True, False]

    def both(images: torch.Tensor, weight: torch.Tensor) -> Any:
        result = aten.convolution(images, weight, None, *how)
        return result, aten.convolution_backward(result, images, weight, None, *how, wanted)

    forward, backward = (n for n in traced(both, images, weight) if "convolution" in n.name)
    for node in (forward, backward):
        operation = operation_of(node)
        assert operation is not None and operation.kind == ("conv_transpose" if transposed else "conv")
        if node is forward or groups == 1:  # torch counts the gradient of a grouped weight as if it had one group
            assert operation.flops == flops_of(node)
    assert operation_of(forward).out_size == forward.meta["val"].shape[2:]  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(8))
def test_a_product_has_the_arithmetic_that_torch_counts(seed: int) -> None:
    draw = random.Random(seed)
    rows, inner, columns, count = (draw.randint(1, 300) for _ in range(4))
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)

    def products(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a @ b, torch.addmm(b[:1], a, b), a.expand(count, -1, -1).bmm(b.expand(count, -1, -1))

    calls = traced(products, left, right)
    found = [n for n in calls if n.target.overloadpacket in (aten.mm, aten.addmm, aten.bmm)]  # type: ignore[union-attr]
    assert len(found) == 3
    for node in found:
        operation = operation_of(node)
        assert operation is not None and operation.flops == flops_of(node)


def test_attention_and_what_has_no_arithmetic() -> None:
    query, key = torch.randn(2, 3, 16, 8), torch.randn(2, 3, 20, 8)
    calls = traced(
        lambda q, k: aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, False)[0].exp(), query, key
    )
    attention = operation_of(calls[0])
    assert attention is not None and attention.kind == "attention"
    assert attention.flops == 2 * 2 * 2 * 3 * 16 * 20 * 8
    assert operation_of(next(n for n in calls if n.name.startswith("exp"))) is None


def test_times_grow_with_the_work_where_the_device_was_calibrated() -> None:
    device = find("h200").device
    seconds: list[float] = []
    for side in (64, 128, 256):
        images = torch.empty(8, 64, side, side, dtype=torch.bfloat16)
        weight = torch.empty(64, 64, 3, 3, dtype=torch.bfloat16)
        calls = traced(lambda x, w: torch.conv2d(x, w, padding=1), images, weight)
        found = calibrated_seconds(calls, device)
        assert len(found) == 1
        seconds += found.values()
    assert seconds[0] < seconds[1] < seconds[2]
    flops = 2 * 8 * 256 * 256 * 64 * 64 * 9
    assert flops / device.rate("bf16") < seconds[2] < 20 * flops / device.rate("bf16")
    assert not calibrated_seconds(traced(lambda a: a @ a, torch.empty(64, 64, dtype=torch.float64)), device)
