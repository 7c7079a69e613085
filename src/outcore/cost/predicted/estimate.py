"""Costs without running the model: shapes, rules, and what is known of the device.

Bytes and FLOPs come from `outcore.cost.measured.saved_bytes` (autograd on fake tensors), times from the device's
calibration: the roofline of each operation divided by an efficiency that was fitted to measurements. A device without a
calibration of its own uses the efficiencies of the nearest one under its own rates, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from outcore.cost.costs import CallCost, Costs
from outcore.cost.measured.in_network_ratio import STREAMED, inside_a_network
from outcore.cost.measured.launch_count import BETWEEN, CALL, NODE, START, SUM
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.calibration import Calibration, Prediction
from outcore.cost.predicted.describe import describe, is_idle
from outcore.cost.predicted.memory_traffic import MemoryTraffic
from outcore.cost.predicted.operation import Operation
from outcore.cost.predicted.roofline import UNFITTED_EFFICIENCY, Ceiling
from outcore.errors import MachineError
from outcore.graph import Graph
from outcore.machine import Device, Machine
from outcore.machine.clock import TimedRuns

_LENDERS = {"cuda": "NVIDIA H200"}
_SAME_SIZE = {"fp32": "tf32", "fp16": "bf16"}
"""A precision whose elements are as large: its efficiencies are the next best guess."""
_VIEW = 1.75
"""Host time of a call that makes a view or a cast in Python, over that of starting an operation in C++."""
_FRESH_FROM, _FRESH_BYTES_PER_S = 24 << 20, 2.4e9
"""From which size on a C library asks the system for memory each time, and the rate at which new pages are made, as
measured on a virtual machine of two cores (torch 2.13, glibc): 2.2 to 2.7 GB/s for 24 to 151 MiB, nothing for 8 MiB."""
_PER_TENSOR = 0.07
"""Host time per tensor of an operation on a list of tensors, over that of an operation by itself."""
_LEAD = 0.7
"""Share of an optimizer's host time before its first kernel, where it steps all parameters together."""
_PRECISIONS = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def estimate(
    graph: Graph,
    machine: Machine | Device,
    *,
    tf32: bool = True,
    calibrations: Mapping[str, Calibration] | None = None,
) -> Costs:
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
        calibrations: by precision, instead of those that are kept for the device.
    """
    device = machine.devices[0] if isinstance(machine, Machine) else machine
    costs = account(graph, "cuda" if device.kind == "cuda" else "cpu")
    steps = graph.recording.calls()
    has_tf32 = tf32 and device.kind == "cuda" and "tf32" in device.rates

    def precision(dtype: str) -> str:
        return "tf32" if has_tf32 and dtype in ("float32", "int64", "bool") else _PRECISIONS.get(dtype, "fp32")

    moves = MemoryTraffic(graph, costs, steps) if device.kind == "cuda" else None
    wanted: list[tuple[str, Operation]] = []
    idle: set[str] = set()
    for name, step in steps.items():
        up = moves is not None and moves.in_float32(name)
        operation = describe(graph, step, (lambda _: precision("float32")) if up else precision)
        if operation is not None:
            wanted += [(name, operation), *([(name, operation.backward())] if costs.calls[name].has_backward else [])]
        elif is_idle(graph, step):
            idle.add(name)
    predicted = _predicted(wanted, device, calibrations or {})
    calls = {name: _timed(cost, device, predicted, name in idle) for name, cost in costs.calls.items()}
    rate = STREAMED * device.bandwidth_bytes_per_s
    if moves is not None:
        calls = {name: _moving(cost, moves.bytes_of(name), rate, device) for name, cost in calls.items()}
    if device.kind == "cpu":
        calls = {name: _moving(cost, _fresh_bytes(cost), _FRESH_BYTES_PER_S, device) for name, cost in calls.items()}
    costs = replace(costs, device=device.name, sum_bytes_per_s=rate, calls=calls)
    costs = _issued(costs, device)
    return costs if device.kind == "cuda" else _on_one_clock(costs)


def _on_one_clock(costs: Costs) -> Costs:
    """Costs of a CPU, where launching is part of running: no call takes less than its launch, and none runs ahead."""

    def joined(timing: TimedRuns | None) -> TimedRuns | None:
        if timing is None:
            return None
        return replace(timing.longer(max(0.0, timing.dispatch_s - timing.median_s)), dispatch_s=0.0)

    calls = {
        name: replace(cost, forward=joined(cost.forward), backward=joined(cost.backward))
        for name, cost in costs.calls.items()
    }
    return replace(costs, calls=calls, start_s=0.0, sum_dispatch_s=0.0)


def _predicted(
    wanted: Sequence[tuple[str, Operation]], device: Device, calibrations: Mapping[str, Calibration]
) -> dict[tuple[str, str], Prediction]:
    """By call and direction: the predicted time of its operation, by the calibration of its precision."""
    found: dict[tuple[str, str], Prediction] = {}
    for dtype in dict.fromkeys(operation.dtype for _, operation in wanted):
        pairs = [(name, operation) for name, operation in wanted if operation.dtype == dtype]
        calibration = calibrations.get(dtype) or _calibration(device, dtype)
        answers = inside_a_network(calibration, [operation for _, operation in pairs], device)
        found |= {(name, o.direction): answer for (name, o), answer in zip(pairs, answers, strict=True)}
    return found


def _issued(costs: Costs, device: Device) -> Costs:
    """Costs with the host's time to launch each call, from the operations that were counted in it."""

    def issued(timing: TimedRuns | None, work: float) -> TimedRuns | None:
        return replace(timing, dispatch_s=work * device.dispatch_s) if timing is not None else None

    calls = {
        name: replace(
            cost,
            forward=issued(cost.forward, CALL + cost.issue_forward),
            backward=issued(cost.backward, NODE + cost.issue_backward),
        )
        for name, cost in costs.calls.items()
    }
    return replace(
        costs,
        calls=calls,
        between_s=BETWEEN * device.dispatch_s,
        start_s=START * device.dispatch_s,
        sum_dispatch_s=SUM * device.dispatch_s,
    )


def estimate_optimizer(
    costs: Costs, device: Device, optimizer: OptimizerCost | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
) -> TimedRuns:
    """The time of an optimizer's step on a device: its memory traffic at the rate of adding tensors of that size."""
    cost = optimizer if isinstance(optimizer, OptimizerCost) else OptimizerCost.of(optimizer, costs.device_kind)
    sizes = [sum(costs.parameters.values())] if cost.together else list(costs.parameters.values())
    sizes = [size for size in sizes if size >= 4]
    if not sizes:
        return TimedRuns.of([0.0])
    adds = [_sheet(size // 4) for size in sizes]
    dtype = "tf32" if device.kind == "cuda" and "tf32" in device.rates else "fp32"
    answers = inside_a_network(_calibration(device, dtype), [replace(add, dtype=dtype) for add in adds], device)
    moved_s = sum(answer.time_s for answer in answers) * cost.traffic_per_parameter / 3
    issued = cost.operations * len(sizes)
    on_host = device.dispatch_s * (issued + cost.operations * len(costs.parameters) * _PER_TENSOR * cost.together)
    if device.kind == "cpu":
        fresh = sum(size for size in sizes if size >= _FRESH_FROM) * cost.workspace_per_largest
        return TimedRuns.of([max(moved_s, on_host) + fresh / _FRESH_BYTES_PER_S])
    lead_s = _LEAD * on_host if cost.together else 0.0
    return replace(TimedRuns.of([max(moved_s, issued * device.launch_s)], dispatch_s=on_host), lead_s=lead_s)


def _sheet(elements: int) -> Operation:
    """An addition of two tensors of that many elements, in a shape like those that were sampled."""
    channels = min(64, elements)
    side = max(1, round(math.sqrt(elements / channels)))
    return Operation("elementwise", in_channels=channels, size=(side, side), variant="add")


def _fresh_bytes(cost: CallCost) -> tuple[int, int]:
    """Bytes of outputs and of gradients that are so large that the system allocates new pages for them every time."""
    outputs = sum(size for size in cost.outputs.values() if size >= _FRESH_FROM)
    return outputs, sum(g.bytes for g in cost.gradients if g.bytes >= _FRESH_FROM)


def _moving(cost: CallCost, moved: tuple[int, int], rate: float, device: Device) -> CallCost:
    """A cost with what must be moved beside the operation itself: casts, gradients of views."""

    def more(timing: TimedRuns | None, nbytes: int) -> TimedRuns | None:
        if timing is None or not nbytes:
            return timing
        longer = timing.longer(nbytes / rate + device.launch_s)
        return replace(longer, dispatch_s=longer.dispatch_s + _VIEW * device.dispatch_s)

    return replace(cost, forward=more(cost.forward, moved[0]), backward=more(cost.backward, moved[1]))


def _calibration(device: Device, dtype: str) -> Calibration:
    """The device's own calibration, or another's scaled to its rates, or plain roofline."""
    for name in (device.name, f"NVIDIA {device.name.split()[0]}"):  # as the driver says it, and as the catalogue does
        try:
            own = Calibration.find(name, dtype)
        except MachineError:  # made by another version; what ships is better than nothing
            own = Calibration.shipped(name, dtype)
        if own is not None:
            return own
    lender = _LENDERS.get(device.kind, "")
    lent = Calibration.shipped(lender, dtype) or Calibration.shipped(lender, _SAME_SIZE.get(dtype, dtype))
    if lent is not None:
        return replace(lent, dtype=dtype).scaled(device)
    return Calibration(device.name, dtype, Ceiling.of(device, dtype), {}, {})


def _timed(cost: CallCost, device: Device, predicted: dict[tuple[str, str], Prediction], idle: bool) -> CallCost:
    """A call's cost with its predicted times, and how far they can be trusted."""
    if idle:
        nothing = TimedRuns(0.0, 0.0, 0.0, 0.0, 0, _VIEW * device.dispatch_s)
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


def _timing(p: Prediction, device: Device) -> TimedRuns:
    return TimedRuns(p.low_s, p.time_s, p.high_s, p.time_s, 0, p.dispatch_s or device.dispatch_s)


def _by_bytes(cost: CallCost, device: Device) -> CallCost:
    """The time of an operation that is not described: its FLOPs and bytes at half the device's rates."""
    rate, bandwidth = device.rate("fp32"), device.bandwidth_bytes_per_s

    def timing(flops: int, nbytes: int) -> TimedRuns:
        roofline = max(flops / rate, nbytes / bandwidth, device.launch_s)
        return TimedRuns(
            roofline,
            roofline / UNFITTED_EFFICIENCY,
            10 * roofline,
            roofline / UNFITTED_EFFICIENCY,
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
