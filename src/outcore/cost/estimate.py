"""Costs without running the model: shapes, rules, and what is known of the device.

Bytes and FLOPs come from `outcore.cost.saved` (autograd on fake tensors), times from the device's calibration: the
roofline of each operation divided by an efficiency that was fitted to measurements. A device without a calibration of
its own borrows the shape of the nearest one's under its own rates, and says so.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.cost.calibration import Calibration, Prediction
from outcore.cost.ceiling import Ceiling
from outcore.cost.costs import CallCost, Costs
from outcore.cost.describe import describe
from outcore.cost.opmodel import Operation
from outcore.cost.saved import account, recording_of
from outcore.graph import Graph
from outcore.machine import Device, Machine
from outcore.machine.clock import Timing
from outcore.ops.rearranging import WITHOUT_WORK

__all__ = ["estimate"]

_LENDERS = {"cuda": "NVIDIA H200"}
_SAME_SIZE = {"fp32": "tf32", "fp16": "bf16"}
"""A precision whose elements are as large: its efficiencies are the next best guess."""
_UNFITTED_EFFICIENCY = 0.5
_PRECISIONS = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def estimate(graph: Graph, machine: Machine | Device, *, tf32: bool = True) -> Costs:
    """The costs of every call on a machine, by shapes alone.

    >>> import outcore, torch
    >>> from outcore.machine import parse
    >>> graph = outcore.capture(torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7)), [(1, 3, 30_000, 30_000)])
    >>> costs = outcore.estimate(graph, parse("h200"))
    >>> costs["0#0"].time_source
    'analytic'

    Args:
        graph: as captured, with its model (on any device, also ``meta``).
        machine: what it would run on; its first device counts.
        tf32: whether float32 matrix products may use TF32 where the device has it.
    """
    device = machine.devices[0] if isinstance(machine, Machine) else machine
    costs = account(graph, "cuda" if device.kind == "cuda" else "cpu")
    steps = {step.name: step for step in recording_of(graph).steps if step.kind != "guard"}
    has_tf32 = tf32 and device.kind == "cuda" and "tf32" in device.rates

    def precision(dtype: str) -> str:
        return "tf32" if has_tf32 and dtype in ("float32", "int64", "bool") else _PRECISIONS.get(dtype, "fp32")

    wanted: dict[str, list[tuple[str, Operation]]] = {}
    silent: set[str] = set()
    for name, step in steps.items():
        operation = describe(graph, step, precision)
        if operation is None:
            if graph.blocks[graph.calls[name].block].type in WITHOUT_WORK:
                silent.add(name)
            continue
        wanted.setdefault(operation.dtype, []).append((name, operation))
        if costs.calls[name].has_backward:
            wanted[operation.dtype].append((name, operation.backward()))

    predicted: dict[tuple[str, str], Prediction] = {}
    for dtype, pairs in wanted.items():
        calibration = _calibration(device, dtype)
        answers = calibration.predict([operation for _, operation in pairs])
        predicted |= {(name, op.direction): p for (name, op), p in zip(pairs, answers, strict=True)}
    return replace(
        costs,
        device=device.name,
        calls={name: _timed(cost, device, predicted, name in silent) for name, cost in costs.calls.items()},
    )


def _calibration(device: Device, dtype: str) -> Calibration:
    """The device's own calibration, or one lent by another under its rates, or plain roofline."""
    for name in (device.name, f"NVIDIA {device.name.split()[0]}"):  # as the driver says it, and as the catalogue does
        if (own := Calibration.shipped(name, dtype)) is not None:
            return own
    lender = _LENDERS.get(device.kind, "")
    lent = Calibration.shipped(lender, dtype) or Calibration.shipped(lender, _SAME_SIZE.get(dtype, dtype))
    if lent is not None:
        return replace(lent, dtype=dtype).scaled(device)
    return Calibration(device.name, dtype, Ceiling.of(device, dtype), {}, {})


def _timed(cost: CallCost, device: Device, predicted: dict[tuple[str, str], Prediction], silent: bool) -> CallCost:
    """A call's cost with its predicted times, and how far they can be trusted."""
    if silent:
        nothing = Timing(0.0, 0.0, 0.0, 0.0, 0, device.dispatch_s)
        backward = nothing if cost.has_backward else None
        return replace(cost, forward=nothing, backward=backward, time_source="analytic")
    forward = predicted.get((cost.call, "forward"))
    if forward is None:
        return _by_bytes(cost, device)
    backward_p = predicted.get((cost.call, "backward"))
    trusts = {p.trust for p in (forward, backward_p) if p is not None} - {"measured range"}
    return replace(
        cost,
        forward=_timing(forward, device),
        backward=_timing(backward_p, device) if backward_p is not None else None,
        time_source="analytic",
        reason=", ".join(sorted(trusts)),
    )


def _timing(p: Prediction, device: Device) -> Timing:
    return Timing(p.low_s, p.time_s, p.high_s, p.time_s, 0, p.dispatch_s or device.dispatch_s)


def _by_bytes(cost: CallCost, device: Device) -> CallCost:
    """An operation nobody described: its FLOPs and bytes at half the device's rates."""
    rate, bandwidth = device.rate("fp32"), device.bandwidth_bytes_per_s

    def timing(flops: int, nbytes: int) -> Timing:
        roofline = max(flops / rate, nbytes / bandwidth, device.launch_s)
        return Timing(
            roofline,
            roofline / _UNFITTED_EFFICIENCY,
            10 * roofline,
            roofline / _UNFITTED_EFFICIENCY,
            0,
            device.dispatch_s,
        )

    moved = 2 * cost.output_bytes + cost.parameter_bytes
    backward = timing(cost.flops_backward, 2 * moved) if cost.has_backward else None
    return replace(
        cost,
        forward=timing(cost.flops_forward, moved),
        backward=backward,
        time_source="analytic",
        reason=f"no model of {cost.type}: its FLOPs and bytes at half the device's rates",
    )
