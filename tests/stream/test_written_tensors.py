"""A model that keeps a tensor of its run is not streamed: said when the budget is asked for, not in every step."""

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.errors import PlanError, VaryingError


class Keeping(nn.Module):
    """A network of local layers that keeps a feature map for its user."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())))

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.layers(x)
        return self.features.mean((2, 3))


def test_a_budget_that_only_tiles_would_meet_is_refused_at_once() -> None:
    model, x = Keeping(), torch.randn(1, 3, 64, 64)
    with pytest.raises(
        PlanError, match=r"the smallest budget .* tiles do not help: forward writes self.features"
    ) as why:
        outcore.within(model, (x,), memory="20%", optimizer=0.0, measure_s=0.1, quiet=True)
    assert why.value.least_bytes is not None
    with pytest.raises(VaryingError, match=r"forward writes self.features"):
        outcore.within(model, (x,), memory="1GiB", optimizer=0.0, measure_s=0.1, quiet=True, stream=True)
    model(x).sum().backward()
