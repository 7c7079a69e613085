"""How long the operations of a library take in a compiled step, before anything is compiled.

What Inductor fuses takes its traffic; products, convolutions and attention are the same library's kernels as ever, and
their times are known for some devices: the roofline of each over an efficiency that was fitted to measurements
(`outcore.cost.predicted.calibration`). A node of the joint graph says which operation it is by its shapes. Its
direction is known as well: a convolution's backward says which of its two products it makes, and a matrix product whose
inner size is its longest is the gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from outcore.cost.measured.in_network_ratio import inside_a_network
from outcore.cost.predicted.calibration import Calibration
from outcore.cost.predicted.operation import Operation
from outcore.errors import MachineError
from outcore.machine.device import Device, precision_of

__all__ = ["calibrated_seconds", "operation_of"]

_ATTENTION = "_scaled_dot_product_"


def calibrated_seconds(nodes: Sequence[fx.Node], device: Device) -> dict[fx.Node, float]:
    """The times of those nodes that are operations of a library, where the device was calibrated for their precision.

    Args:
        nodes: of a joint graph.
        device: as its rates are known.
    """
    described: dict[str, list[tuple[fx.Node, Operation]]] = {}
    for node in nodes:
        operation = operation_of(node)
        if operation is not None:
            described.setdefault(operation.dtype, []).append((node, operation))
    found: dict[fx.Node, float] = {}
    for dtype, pairs in described.items():
        calibration = _calibration(device, dtype)
        if calibration is None:
            continue
        predicted = inside_a_network(calibration, [operation for _, operation in pairs], device)
        found |= {node: one.time_s for (node, _), one in zip(pairs, predicted, strict=True)}
    return found


def _calibration(device: Device, dtype: str) -> Calibration | None:
    for name in (device.name, f"NVIDIA {device.name.split()[0]}"):  # as the driver says it, and as the catalogue does
        try:
            found = Calibration.find(name, dtype)
        except MachineError:  # made by another version; what ships is better than nothing
            found = Calibration.shipped(name, dtype)
        if found is not None:
            return found
    return None


def operation_of(node: fx.Node) -> Operation | None:
    """What a node computes, if it is a product, a convolution or attention.

    Args:
        node: of a joint graph, with its values' shapes.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name.rpartition("::")[2]
    args: Any = fx.node.map_arg(node.args, lambda n: n.meta.get("val"))
    try:
        if name in ("mm", "addmm"):
            return _product(*args[-2:] if name == "mm" else args[1:3])
        if name in ("bmm", "baddbmm"):
            left, right = args[-2:] if name == "bmm" else args[1:3]
            (count, rows, inner), columns = left.shape, right.shape[2]
            return Operation(
                "matmul", batch=count, in_channels=inner, out_channels=columns, size=(rows,), dtype=_dtype(left)
            )
        if name == "convolution":
            return _convolution(args[0], args[1], False, args[3:9])  # Inductor adds the bias in a fused kernel
        if name == "convolution_backward":
            return _convolution(args[1], args[2], bool(args[10][2]), args[4:10], args[10])
        if name.startswith(_ATTENTION):
            return _attention(node, name, args)
    except (MachineError, ValueError, IndexError, AttributeError, TypeError):
        return None
    return None


def _dtype(value: torch.Tensor) -> str:
    tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return "tf32" if value.dtype is torch.float32 and tf32 else precision_of(value.dtype)


def _product(left: torch.Tensor, right: torch.Tensor) -> Operation:
    (rows, inner), columns = left.shape, right.shape[1]
    if inner > max(rows, columns):
        return Operation(
            "linear",
            batch=inner,
            in_channels=columns,
            out_channels=rows,
            dtype=_dtype(left),
            direction="backward",
            input_grad=False,
        )
    return Operation("linear", batch=rows, in_channels=inner, out_channels=columns, dtype=_dtype(left))


def _convolution(
    images: torch.Tensor, weight: torch.Tensor, bias: bool, how: Sequence[Any], wanted: Sequence[bool] | None = None
) -> Operation:
    stride, padding, dilation, transposed, output_padding, groups = how
    spatial = images.dim() - 2

    def each(value: Sequence[int]) -> tuple[int, ...]:
        return tuple(value) * (spatial if len(value) == 1 else 1)

    channels_last = images.stride(1) == 1 and images.shape[1] > 1
    out_channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return Operation(
        "conv_transpose" if transposed else "conv",
        batch=images.shape[0],
        in_channels=images.shape[1],
        out_channels=out_channels,
        size=tuple(images.shape[2:]),
        kernel=tuple(weight.shape[2:]),
        stride=each(stride),
        padding=each(padding),
        dilation=each(dilation),
        output_padding=each(output_padding) if transposed else (),
        groups=groups,
        dtype=_dtype(images),
        channels_last=channels_last,
        direction="forward" if wanted is None else "backward",
        input_grad=wanted is None or bool(wanted[0]),
        weight_grad=wanted is None or bool(wanted[1]),
        bias=bias,
    )


def _attention(node: fx.Node, name: str, args: Sequence[Any]) -> Operation:
    backward = name.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, queries, width = query.shape
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index("is_causal") if "is_causal" in names else len(args)
    causal = bool(node.kwargs.get("is_causal", args[place] if place < len(args) else False))
    return Operation(
        "attention",
        batch=batch,
        in_channels=width,
        out_channels=value.shape[-1],
        size=(queries, key.shape[2]),
        groups=heads,
        variant="causal" if causal else "",
        dtype=_dtype(query),
        direction="backward" if backward else "forward",
    )
