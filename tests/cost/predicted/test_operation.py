"""FLOPs and bytes of an operation, against closed forms and against torch's own counter."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from outcore.cost.measured.runnable import prepare
from outcore.cost.predicted.operation import KINDS, VARIANTS, Operation
from outcore.errors import MachineError

MATRIX = [
    Operation(
        "conv", batch=2, in_channels=8, out_channels=16, size=(20, 21), kernel=(3, 5), stride=(2, 1), padding=(1, 2)
    ),
    Operation("conv", batch=2, in_channels=8, out_channels=16, size=(20, 21), kernel=(3, 3), dilation=(2, 2)),
    Operation("conv", batch=2, in_channels=3, out_channels=16, size=(20, 20), kernel=(3, 3), input_grad=False),
    Operation("conv", batch=3, in_channels=4, out_channels=6, size=(50,), kernel=(5,), padding=(2,)),
    Operation("conv", batch=2, in_channels=4, out_channels=6, size=(7, 8, 9), kernel=(3, 3, 3), channels_last=True),
    Operation("conv_transpose", batch=2, in_channels=8, out_channels=6, size=(10, 11), kernel=(2, 2), stride=(2, 2)),
    Operation(
        "conv_transpose",
        batch=2,
        in_channels=4,
        out_channels=6,
        size=(5, 5),
        kernel=(3, 3),
        stride=(2, 2),
        padding=(1, 1),
        output_padding=(1, 1),
    ),
    Operation("linear", batch=3, size=(5,), in_channels=7, out_channels=11),
    Operation("linear", batch=3, in_channels=7, out_channels=11, input_grad=False),
    Operation("matmul", batch=3, size=(5,), in_channels=7, out_channels=11),
]

LIGHT = [
    Operation(kind, batch=2, in_channels=8, size=(6, 6), variant=variant, groups=2 if variant == "group" else 1)
    for kind in ("norm", "elementwise", "copy")
    for variant in VARIANTS[kind]
]


@pytest.mark.parametrize("operation", [o for forward in MATRIX for o in (forward, forward.backward())], ids=str)
def test_flops_are_those_that_torch_counts(operation: Operation) -> None:
    forward, wanted = prepare(operation, "cpu")
    output = forward()
    with FlopCounterMode(display=False) as counter:
        if operation.direction == "forward":
            forward()
        else:
            torch.autograd.grad(output, wanted, torch.ones_like(output))
    assert operation.flops == counter.get_total_flops()
    assert tuple(output.shape) == _shape(operation)
    assert output.numel() == operation.out_elements


def _shape(operation: Operation) -> tuple[int, ...]:
    if operation.kind == "linear":
        return (operation.batch, *operation.size, operation.out_channels)
    if operation.kind == "matmul":
        return (operation.batch, operation.size[0], operation.out_channels)
    return (operation.batch, operation.out_channels, *operation.out_size)


def test_attention_flops_are_those_of_its_products() -> None:
    operation = Operation("attention", batch=2, groups=3, size=(12, 14), in_channels=8)
    forward, _ = prepare(operation, "cpu")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        forward()
    assert operation.flops == counter.get_total_flops()
    causal = Operation("attention", size=(4, 4), in_channels=8, variant="causal")
    assert causal.flops == 4 * 8 * (1 + 2 + 3 + 4)
    assert operation.backward().flops == operation.flops * 5 // 2


def test_groups_divide_flops_and_weights() -> None:
    whole = Operation("conv", batch=2, in_channels=8, out_channels=16, size=(10, 10), kernel=(3, 3))
    split = Operation("conv", batch=2, in_channels=8, out_channels=16, size=(10, 10), kernel=(3, 3), groups=4)
    assert split.flops * 4 == whole.flops
    assert split.backward().flops == 2 * split.flops
    _, wanted = prepare(split, "cpu")
    assert wanted[0].numel() == split.weight_elements == whole.weight_elements // 4


def test_bytes_follow_closed_forms() -> None:
    conv = Operation("conv", batch=2, in_channels=3, out_channels=5, size=(8, 8), kernel=(3, 3), dtype="bf16")
    x, w, y = 2 * 3 * 64, 3 * 5 * 9, 2 * 5 * 36
    assert conv.nbytes == 2 * (x + w + y)
    assert conv.backward().nbytes == 2 * conv.nbytes
    first = Operation("conv", batch=2, in_channels=3, out_channels=5, size=(8, 8), kernel=(3, 3), input_grad=False)
    assert first.backward().nbytes == first.nbytes
    n = 2 * 8 * 36
    passes = {(o.variant, d.direction): d.nbytes for o in LIGHT for d in (o, o.backward())}
    assert passes["relu", "forward"] == 4 * 2 * n
    assert passes["relu", "backward"] == 4 * 3 * n
    assert passes["batch", "forward"] == 4 * 3 * n
    assert passes["batch", "backward"] == 4 * 5 * n
    assert passes["add", "backward"] == passes["layout", "backward"] == 0
    assert passes["dropout", "forward"] == 4 * 2 * n + n
    pool = Operation("pool", batch=1, in_channels=4, size=(8, 8), kernel=(2, 2), stride=(2, 2), variant="max")
    assert pool.nbytes == 4 * (256 + 64) + 8 * 64
    table = Operation("embedding", batch=10, in_channels=100, out_channels=16)
    assert table.nbytes == 10 * 8 + 4 * 2 * 160
    assert table.backward().nbytes == 10 * 8 + 4 * (3 * 160 + 1600)


@pytest.mark.parametrize("operation", [*MATRIX, *LIGHT], ids=str)
def test_an_operation_survives_json_and_runs_both_ways(operation: Operation) -> None:
    for direction in (operation, operation.backward()):
        assert Operation.from_json(direction.to_json()) == direction
    forward, wanted = prepare(operation, "cpu")
    output = forward()
    gradients = torch.autograd.grad(output, wanted, torch.ones_like(output))
    assert all(gradient.shape == tensor.shape for gradient, tensor in zip(gradients, wanted, strict=True))


def test_every_kind_can_be_run() -> None:
    kinds = {operation.kind for operation in (*MATRIX, *LIGHT)} | {"attention"}
    for kind in ("pool", "softmax", "embedding"):
        size = (6, 6) if kind == "pool" else ()
        variant = "max" if kind == "pool" else ""
        operation = Operation(kind, batch=4, in_channels=8, size=size, kernel=(2, 2) if size else (), variant=variant)
        forward, _ = prepare(operation, "cpu")
        assert forward().numel() == operation.out_elements
        assert math.prod(operation.out_size) == (25 if size else 1)
        kinds.add(kind)
    assert kinds == set(KINDS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "convolve"}, "unknown kind"),
        ({"kind": "norm", "variant": "spectral"}, "unknown variant 'spectral' of norm; known are batch"),
        ({"kind": "conv", "in_channels": 3, "groups": 2, "size": (8, 8)}, "3 and 3 channels cannot be split"),
        ({"kind": "conv", "size": (8, 8), "kernel": (3,)}, "does not fit an image"),
        ({"kind": "conv", "size": (2, 2), "kernel": (3, 3)}, "at least 1"),
        ({"kind": "linear", "batch": 0}, "at least 1"),
        ({"kind": "linear", "dtype": "int3"}, "unknown precision"),
        ({"kind": "linear", "rows": 3}, "not an operation"),
    ],
)
def test_nonsense_is_refused_when_it_is_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(MachineError, match=message):
        Operation.from_json(fields)


def test_backward_is_the_sum_of_its_two_products() -> None:
    image = {"size": (14, 14), "kernel": (3, 3), "padding": (1, 1)}
    conv = Operation("conv", batch=2, in_channels=4, out_channels=8, **image).backward()
    weight, of_input = conv.parts()
    assert weight.flops + of_input.flops == conv.flops
    assert (conv.part, weight.part, of_input.part) == ("backward", "weight", "input")
    assert weight.parts() == (weight,)
    depthwise = Operation("conv", batch=2, in_channels=4, groups=4, **image)
    grouped = Operation("conv", batch=2, in_channels=4, groups=2, **image)
    line = Operation("conv", batch=2, in_channels=4, size=(14,), kernel=(3,))
    wide = Operation("conv", batch=2, in_channels=8, **image)
    found = [operation.family for operation in (conv, wide, depthwise, grouped, line)]
    assert found == ["first", "dense", "depthwise", "conv", "conv"]
