"""What draws random numbers is made again with the same ones, from whichever generator it draws."""

import pytest
import torch
from torch import nn

import outcore
from outcore.program.policies import RECOMPUTE

from .oracle import policies

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


class Draws(nn.Module):
    """Noise of its own generator, of the device it computes on, and of the host."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.own = torch.Generator(device)
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        weight = torch.rand(16)  # on the host, and alive until the end
        x = first(x).tanh()
        x = second(x * torch.rand(x.shape, generator=self.own, device=x.device)).tanh()
        x = third(x * torch.empty_like(x).bernoulli_(0.5, generator=self.own)).tanh()
        x = nn.functional.dropout(x, 0.3)
        x = fourth(x * torch.rand(16, device=x.device)).sigmoid()
        return x * weight.to(x.device)


def gradients(model: Draws, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    model.own.manual_seed(5)
    found = []
    for _ in range(2):  # the second step begins where the first has left the generators
        model(x).square().sum().backward()
        found += [p.grad.clone() for p in model.parameters()]
    return found


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("mode", ["recompute", "mixture"])
def test_every_generator_is_put_back_to_where_it_was(mode: str, device: str) -> None:
    torch.manual_seed(0)
    model, x = Draws(device), torch.randn(8, 16, device=device)
    want = gradients(model, x)
    outcore.within(model, (x,), memory=None, optimizer=0.0, quiet=True, measure_s=0.1)
    keeping = outcore.memory_plan(model).keeping
    plan = policies(keeping, mode)
    assert any(how == RECOMPUTE and "rand" in name for name, how in plan.items())
    outcore.within(model, (x,), memory=None, plan=plan, optimizer=0.0, costs=keeping.costs, quiet=True)
    got = gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_generator_of_the_model_is_where_it_was_after_planning() -> None:
    model, x = Draws("cpu"), torch.randn(8, 16)
    model.own.manual_seed(5)
    before = model.own.get_state()
    outcore.within(model, (x,), memory=None, quiet=True, measure_s=0.1)
    assert torch.equal(model.own.get_state(), before)
