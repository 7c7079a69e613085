"""Parameters that are tied, frozen, borrowed, idle or written to in forward, below the device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from tests.memory.param_offload.test_offloader import ADAM, SGD, WAYS, network, same, train
from tests.memory.param_offload.test_offloader_loops import keeper, pair


class Tangled(nn.Module):
    """Tied and frozen weights, a weight that another module's forward reads, one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 32, bias=False)
        self.attend = nn.MultiheadAttention(32, 4, batch_first=True)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(32))
        self.norm = nn.LayerNorm(32)
        self.idle = nn.Linear(7, 7)
        self.out = nn.Linear(32, 24)
        self.back = nn.Linear(24, 32, bias=False)
        self.back.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = h + self.attend(h, h, h, need_weights=False)[0]
        h = self.norm(torch.relu(self.frozen(h)) * self.scale)
        return self.back(self.out(h)) + F.linear(h, self.frozen.weight)


def tangled() -> nn.Module:
    torch.manual_seed(0)
    return Tangled()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policies", ["plain values", "mixed values"])
def test_tied_frozen_borrowed_and_idle_parameters(way: str, policies: str) -> None:
    model, plain = tangled(), tangled()
    x = torch.randn(3, 5, 24)
    optimizer, twin = ADAM(model.parameters()), ADAM(plain.parameters())
    graph = outcore.capture(model, (x,))
    costs = by_bytes(account(graph), 1e9)
    state = {"parameters": "offload", "optimizer": "offload", "flat_buffer_bytes": 2048, **WAYS[way]}
    if "stage_bytes" in state:
        state["stage_bytes"] = 26000
    plan = None
    if policies == "mixed values":
        outcore.within(model, (x,), memory=None, costs=costs, quiet=True)
        kept = outcore.memory_plan(model).keeping
        plan = {b.name: c[0] for b in kept.buffers.values() if (c := kept.choices(b))}
    outcore.within(model, (x,), memory=None, costs=costs, optimizer=optimizer, state=state, plan=plan, quiet=True)
    for net, opt in ((model, optimizer), (plain, twin)):
        for _ in range(5):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
    if "stage_bytes" in state:
        assert keeper(model).stats.peak_bytes <= 26000
    outcore.release(model)
    assert same(model, plain)
    assert model.back.weight is model.embed.weight


class Centred(nn.Module):
    """Writes to a weight of its own in forward, as quantisers with running averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3, 12), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.5).add_(x.detach().mean((0, 2)))
        return x - self.mean[:, None]


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_writes_to_a_parameter(way: str) -> None:
    narrow = {"stage_bytes": 66_100} if "stage_bytes" in WAYS[way] else {}  # the largest layer and little more
    state = {**WAYS[way], "flat_buffer_bytes": 1024, **narrow}
    model, optimizer, plain, twin = pair(SGD, lambda: nn.Sequential(Centred(), network()), **state)
    train(model, optimizer, 5), train(plain, twin, 5)
    assert same(model, plain)


def test_another_batch_size_of_what_is_made_again_while_parameters_are_away() -> None:
    """The hooks that let parameters come are not the user's, which must not run twice."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 3))

    model, plain = build(), build()
    x = torch.randn(8, 8)
    optimizer, twin = ADAM(model.parameters()), ADAM(plain.parameters())
    plan = {"0#0:out": "recompute", "1#0:out": "recompute", "2#0:out": "recompute", "3#0:out": "recompute"}
    state = {"parameters": "offload"}
    outcore.within(model, (x,), memory=None, plan=plan, optimizer=optimizer, state=state, quiet=True, measure_s=0.1)
    for net, opt in ((model, optimizer), (plain, twin)):
        for size in (8, 8, 5, 8):
            opt.zero_grad()
            net(x[:size]).square().mean().backward()
            opt.step()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
