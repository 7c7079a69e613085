"""Predictions from the model itself: costs of its calls, and the memory of a plain training step.

`outcore.capture` takes a model and its inputs, and everything else is made from the graph. A user who only wants a
number should not have to know that, so these two take what `capture` takes; nothing is run and no memory is used for
the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from outcore.cost.costs import Costs
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.calibration import Calibration
from outcore.cost.predicted.estimate import estimate as estimate_graph
from outcore.cost.predicted.step_memory import memory_curve
from outcore.graph import Graph, capture
from outcore.machine import Device, Machine, known, parse

Optimizer = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | float


def estimate(
    source: Graph | nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    machine: Machine | Device | str | None = None,
    tf32: bool = True,
    calibrations: Mapping[str, Calibration] | None = None,
) -> Costs:
    """The costs of every call on a machine, by shapes alone.

    >>> import outcore, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7), torch.nn.ReLU())
    >>> costs = outcore.estimate(net, [(1, 3, 30_000, 30_000)], machine="h200")
    >>> costs["0#0"].time_source
    'analytic'
    >>> graph = outcore.capture(net, [(1, 3, 30_000, 30_000)])
    >>> outcore.estimate(graph, machine="h200")["0#0"].forward.median_s == costs["0#0"].forward.median_s
    True

    Args:
        source: a model, or a graph of one.
        args: of a model, what `outcore.capture` takes; of a graph, the machine may stand here.
        kwargs: keyword arguments of the model.
        machine: what it would run on, also by name; this machine if not given.
        tf32: whether float32 matrix products may use TF32 where the device has it.
        calibrations: by precision, instead of those that are kept for the device.
    """
    if isinstance(source, Graph):
        graph, machine = source, machine if machine is not None else args
    else:
        graph = capture(source, args, kwargs)
    where = parse(machine) if isinstance(machine, str) else machine if machine is not None else known()
    return estimate_graph(graph, where, tf32=tf32, calibrations=calibrations)


def memory_of(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: Optimizer = 2.0,
    device: str | None = None,
) -> int:
    """The most bytes that a plain training step holds: weights, gradients, optimizer state, feature maps, workspace.

    >>> import outcore, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten())
    >>> small, large = (outcore.memory_of(net, [(1, 3, n, n)]) for n in (64, 128))
    >>> 3.5 < large / small < 4.1
    True

    Args:
        model: any module; nothing in it is changed.
        args: the positional arguments of ``forward``: tensors, or shapes as tuples.
        kwargs: the keyword arguments.
        optimizer: an optimizer or what makes one, or its state over the bytes of the parameters: 2 for Adam.
        device: ``"cpu"`` or ``"cuda"``; kernels hold other things for backward there. That of the weights if not given.
    """
    graph = capture(model, args, kwargs)
    first = next(model.parameters(), None)
    kind = device or (first.device.type if first is not None and first.device.type == "cuda" else "cpu")
    return memory_curve(graph, account(graph, kind), optimizer=OptimizerCost.of(optimizer, kind)).peak_bytes
