"""A step on another GPU, from what each call takes on one that is known.

Habitat (Yu et al., ATC 2021) carries every kernel over by the ratio of two GPUs' bandwidths or clocks; its networks,
which regress raw time for the rest, err by thousands of per cent on GPUs that they have not seen (NeuSight, ASPLOS
2025). Here nothing is regressed. A call's time has two parts:

    time = max(operations / rate, bytes / bandwidth) + rest

What its operations and bytes must take on any GPU is computed for both. Without operations (norms, activations, sums)
all of it is waiting for memory, and goes by the bandwidth. Of a matrix product the rest (tiles that do not fill the
device, loads that the kernel waits for) is work of the multiprocessors: it grows with the waves of thread blocks that
the other GPU needs, and with the time of a cycle. So is the rest of a pooling, whose kernels compare and look for
indices: the backward of a max pooling takes six times as long as its bytes. A batch norm over images with channels
outermost has one thread block for each channel, which seldom fill a GPU: beyond its bytes it goes by the clock alone,
and half of an H200's multiprocessors take it no longer than all of them. So a convolution that leaves tensor cores
waiting is not taken to leave plain multipliers waiting, whose rate is a thirtieth. Times of the host stay, as the host
does.
"""

from __future__ import annotations

import math
from dataclasses import replace

from outcore.cost.costs import CallCost, Costs
from outcore.graph import Graph
from outcore.machine import Device
from outcore.machine.clock import TimedRuns

__all__ = ["carry_costs", "carry_optimizer", "wave_ratio"]

_REACHED = 0.85
"""Share of the matrix rate and of the bandwidth that the best kernels reach."""
_TILE = 128 * 128
"""Elements of a result that one thread block makes."""
_NORM_PASSES = (3, 5)
"""Passes of a batch norm over its images, forward and backward."""


def carry_costs(costs: Costs, graph: Graph, origin: Device, target: Device) -> Costs:
    """Costs of a graph on one device, from those on another."""
    calls = {name: _call(graph, name, cost, origin, target) for name, cost in costs.calls.items()}
    ratio = target.bandwidth_bytes_per_s / origin.bandwidth_bytes_per_s
    return replace(costs, device=target.name, calls=calls, sum_bytes_per_s=costs.sum_bytes_per_s * ratio)


def carry_optimizer(timing: TimedRuns, origin: Device, target: Device) -> TimedRuns:
    """An optimizer's step moves memory, and nothing else."""
    return timing.scaled(origin.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s)


def _call(graph: Graph, name: str, cost: CallCost, origin: Device, target: Device) -> CallCost:
    call = graph.calls[name]
    taken = sum(graph.values[v].bytes for v in call.inputs)
    given = sum(graph.values[v].bytes for v in call.outputs)
    dtype = graph.values[call.outputs[0]].dtype if call.outputs else "float32"
    elements = math.prod(graph.values[call.outputs[0]].shape) if call.outputs else 1
    moved = taken + given + cost.parameter_bytes
    waves = wave_ratio(elements / _TILE, origin, target)
    clock = origin.clock_hz / target.clock_hz if origin.clock_hz and target.clock_hz else None
    by_channel = clock is not None and _is_by_channel(graph, name, cost.type)

    def carried(timing: TimedRuns | None, flops: int, nbytes: int) -> TimedRuns | None:
        if timing is None or timing.median_s <= 0:
            return timing
        before = _least_s(origin, dtype, flops, nbytes)
        after = _least_s(target, dtype, flops, nbytes)
        if not flops and not _counts(cost.type):  # what such a kernel loses, it loses waiting for memory
            streamed = origin.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s
            if not by_channel:
                return timing.scaled(streamed)
            passes = _NORM_PASSES[timing is cost.backward]
            share = min(1.0, passes * given / (_REACHED * origin.bandwidth_bytes_per_s) / timing.median_s)
            return timing.scaled(share * streamed + (1 - share) * (clock or 1.0))
        rest_s = max(0.0, timing.median_s - before)
        # Faster than its own bytes and operations: it found them in the cache, or has an algorithm of fewer operations.
        fits = min(1.0, timing.median_s / before) if before else 1.0
        return timing.scaled((after * fits + rest_s * waves) / timing.median_s)

    backward_bytes = 2 * taken + given + 2 * cost.parameter_bytes
    return replace(
        cost,
        forward=carried(cost.forward, cost.flops_forward, moved),
        backward=carried(cost.backward, cost.flops_backward, backward_bytes),
        time_source="scaled",
    )


def _is_by_channel(graph: Graph, name: str, kind: str) -> bool:
    """Whether a call is a batch norm of images with channels outermost."""
    values = [graph.values[v] for v in graph.calls[name].outputs[:1]]
    return "BatchNorm" in kind and any(len(v.shape) > 3 and v.stride[1:2] != (1,) for v in values)


def _counts(kind: str) -> bool:
    """Whether a kernel without matrix work is limited by its instructions."""
    return "pool" in kind.lower()


def _least_s(device: Device, dtype: str, flops: int, nbytes: int) -> float:
    """What operations and bytes take at the best."""
    memory_s = nbytes / (_REACHED * device.bandwidth_bytes_per_s)
    return max(flops / (_REACHED * device.rate(precision_on(device, dtype))), memory_s) if flops else memory_s


def precision_on(device: Device, dtype: str) -> str:
    """What a tensor's type is multiplied in."""
    if dtype == "float32":
        return "tf32" if "tf32" in device.rates else "fp32"
    return {"float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}.get(dtype, "fp32")


def wave_ratio(blocks: float, origin: Device, target: Device) -> float:
    """How many times as long so many thread blocks take, by their waves over the multiprocessors and by the clock."""
    if not (origin.sms and target.sms and origin.clock_hz and target.clock_hz):
        return origin.bandwidth_bytes_per_s / target.bandwidth_bytes_per_s
    needed = max(1, math.ceil(blocks))
    ratio = math.ceil(needed / target.sms) / math.ceil(needed / origin.sms)
    if needed > 4 * max(origin.sms, target.sms):  # of many waves the last one does not matter
        ratio = origin.sms / target.sms
    return ratio * origin.clock_hz / target.clock_hz
