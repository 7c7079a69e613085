"""A call that overwrites a value comes after all that read it, and before all that read what it wrote; and what leaves
torch in a recorded run is a fact of that run alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import outcore


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0
        other = x.view(-1)
        before = x.exp()
        x.add_(1.0)
        return before + other.sin()


def test_a_write_comes_after_the_reads_before_it_and_before_those_after_it() -> None:
    """Of what data flow does not tell: who reads the memory by another name, or for the last time."""
    graph = outcore.capture(Overwriting(), torch.randn(4))
    calls = {name.removesuffix("()#0"): call for name, call in graph.calls.items()}
    assert "exp()#0" in calls["add_"].after
    assert "add_()#0" in calls["sin"].after
    assert not {"add_()#0", "sin()#0"} & set(calls["exp"].after)


class Leaving(nn.Module):
    """Computes with what one of torch's ways out gives."""

    def __init__(self, way: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.way(x)


@pytest.mark.parametrize(
    ("way", "volatile"),
    [
        (lambda x: float(x.detach().numpy().max()), True),
        (lambda x: float(memoryview(x.detach().__array__())[0, 0]), True),
        (lambda x: float(x.data_ptr() % 2 + 1), True),
        (lambda x: 2.0, False),
    ],
    ids=["numpy", "array", "pointer", "nothing leaves"],
)
def test_a_recording_of_which_data_left_torch_is_not_for_another_run(
    way: Callable[[Tensor], float], volatile: bool
) -> None:
    graph = outcore.capture(Leaving(way), torch.randn(2, 4))
    assert graph.executable is not None
    assert graph.executable[1].volatile is volatile
