"""What an optimizer's state takes, from a class, a function or an instance."""

from __future__ import annotations

import pytest
import torch

from outcore.cost.optimizer_cost import OptimizerCost, _Traffic


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (torch.optim.SGD, 0),
        (torch.optim.Adam, 2),
        (torch.optim.AdamW, 2),
        (torch.optim.RMSprop, 1),
        (torch.optim.Adadelta, 2),
        (torch.optim.Adagrad, 1),
    ],
)
def test_an_instance_costs_what_its_class_does(kind: type[torch.optim.Optimizer], state: int) -> None:
    made = kind([torch.nn.Parameter(torch.ones(3))], lr=0.1)  # type: ignore[call-arg]
    assert OptimizerCost.of(made).state_per_parameter == state
    assert OptimizerCost.of(lambda params: kind(params, lr=0.1)).state_per_parameter == state  # type: ignore[call-arg]


def test_operations_and_bytes_are_counted_one_by_one() -> None:
    a, b = torch.ones(10), torch.ones(10)
    with _Traffic() as counted:
        assert (counted.operations, counted.bytes) == (0, 0)
        a.add_(b)  # reads both, writes one
        assert (counted.operations, counted.bytes) == (1, 120)
        torch.add(a, b)
        assert (counted.operations, counted.bytes) == (2, 240)
        torch.ones(()) + 1  # single numbers do not count
    assert (counted.operations, counted.bytes) == (2, 240)
