"""The traffic of kernels that Inductor runs as one, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch import partitioners
from torch.fx.experimental.proxy_tensor import make_fx

from outcore.compiled.joint_graph import JointGraph, Rates
from outcore.compiled.lifetimes import step_of
from outcore.compiled.torch_partitioner import TracedStep

ROWS, COLUMNS = 64, 32
WHOLE, ROW, COLUMN = 4 * ROWS * COLUMNS, 4 * COLUMNS, 4 * ROWS


def traffic(function: Callable[..., Any], *tensors: torch.Tensor) -> float:
    """The bytes that the kernels of a function read and write, on a device that moves one byte in a second."""
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    calls = [n for n in graph.nodes if n.op == "call_function"]
    results = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    kinds = partitioners.get_default_op_list()
    whole = TracedStep(
        graph=graph,
        inputs=inputs,
        forward=frozenset([*inputs, *calls]),
        backward=frozenset(),
        fixed=frozenset(),
        outputs=results,
        gradients=[],
        fusible=frozenset(n for n in calls if kinds.is_fusible(n)),
        torch_choice=lambda _: [],
    )
    return step_of(JointGraph(whole, Rates(1.0, {})), []).seconds


X, Y = torch.empty(ROWS, COLUMNS), torch.empty(ROWS, COLUMNS)

CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "two sums of the same values are read once": (lambda x, y: (x.sum(0), (x * y).sum(0)), 2 * WHOLE + 2 * ROW),
    "what needs a whole sum reads again": (lambda x, y: x - x.sum(0), 3 * WHOLE + 2 * ROW),
    "what needs the sum of its row does not": (lambda x, y: x - x.sum(1, keepdim=True), 2 * WHOLE + COLUMN),
    "what was written is still there": (lambda x, y: ((a := x.exp()), a.sin()), 3 * WHOLE),
    "another size is another kernel": (lambda x, y: ((a := x.exp()), a[:8].sum()), 3 * WHOLE + 4),
    "what shares nothing is read for itself": (lambda x, y: (x.exp(), y.exp()), 4 * WHOLE),
    "a product reads its operands and writes": (lambda x, y: torch.mm(x, y.t()), 2 * WHOLE + 4 * ROWS * ROWS),
    "columns in memory are rows": (lambda x, y: x.t() - x.t().sum(1, keepdim=True), 3 * WHOLE + 2 * ROW),
}


@pytest.mark.parametrize("name", CASES)
def test_traffic(name: str) -> None:
    function, expected = CASES[name]
    assert traffic(function, X, Y) == expected
