"""Whatever is saved, gradients are those of plain PyTorch: the choice decides memory and time alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.compiled.oracle import BOUND, compare
from tests.foreign.sample import quarter
from tests.foreign.zoo import ZOO, Foreign

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of tracing what others wrote


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    torch._dynamo.reset()


class Odd(nn.Module):
    """Shared weights, in-place operations, a buffer that is read before it changes, views, several results, a
    checkpoint, a constant, and parts that only backward needs."""

    level: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.unused = nn.BatchNorm2d(6), nn.Linear(2, 2)
        self.register_buffer("level", torch.full((1, 6, 1, 1), 0.3))
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two results of images."""
        x = F.relu(self.norm(self.first(x)), inplace=True)
        y = torch.sigmoid(self.shared(x) + self.level)
        whole = y.flatten(2)  # a view of all of it: either of the two may be what is saved
        y = y * whole.square().unflatten(2, y.shape[2:]).cos()
        self.level.mul_(0.5).add_(y.detach().mean())
        y = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(self.shared(t)) * t, y, use_reentrant=False)
        a, b = y.chunk(2, dim=1)
        z = torch.cat([a * b, a.clone().mul_(2).add_(b)], dim=1)
        pooled, places = F.max_pool2d(z, 2, return_indices=True)
        pooled = pooled + places.to(pooled.dtype).mul(1e-3).cos()
        flat = torch.cat([pooled.amax((2, 3)), torch.var_mean(z, (2, 3))[0]], dim=1)
        return self.head(F.layer_norm(flat, (12,))).log_softmax(1), x[:, ::2].exp()


@pytest.mark.parametrize(("place", "seed"), [(1.0, None), (0.25, 1), (0.6, 2), (0.0, 3)])
def test_an_odd_network_at_every_choice(place: float, seed: int | None) -> None:
    torch.manual_seed(0)
    assert compare(Odd(), (torch.randn(3, 3, 8, 8),), {}, place, seed=seed) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_an_odd_network_with_saved_values_drawn(seed: int) -> None:
    torch.manual_seed(seed)
    assert compare(Odd(), (torch.randn(3, 3, 8, 8),), {}, seed / 40, seed=seed) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("foreign", "mode"), quarter((f, mode) for f in ZOO if f.quick for mode in ("train", "eval")), ids=str
)
def test_foreign_models(foreign: Foreign, mode: str) -> None:
    torch.manual_seed(0)
    model = foreign.build().train(mode == "train")
    place, seed, batch = (1.0, None, 2) if mode == "train" else (0.3, 7, 3 if foreign.other_batch else 2)
    assert compare(model, *foreign.inputs(batch), place, seed=seed) < BOUND
