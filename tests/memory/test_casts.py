"""Copies in another type that autocast makes and backward keeps: made again by the same cast."""

import copy

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.buffers import buffers_of
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.program.policies import OFFLOAD, RECOMPUTE


class Block(nn.Module):
    """As in ConvNeXt: what comes out is scaled in float32, so that the next block casts it again."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.scale = nn.Parameter(torch.full((size,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.second(torch.nn.functional.gelu(self.first(x)))


class Turned(nn.Module):
    """A convolution whose input is a view that lies in memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(6), nn.Conv2d(6, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv((self.norm(x) * self.norm.weight.float().exp()).permute(0, 3, 1, 2))
        return y


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    out.float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def copies(model: nn.Module, x: torch.Tensor) -> dict[str, str]:
    """Every copy of a value, to be made again."""
    with torch.autocast("cpu", torch.bfloat16):
        graph = outcore.capture(model, (x,))
        found = buffers_of(graph, account(graph))
    return {b.name: RECOMPUTE for b in found.values() if b.copy_of and not b.obstacle}


@pytest.mark.parametrize(
    ("model", "shape", "least"),
    [(nn.Sequential(*(Block(8) for _ in range(3))), (5, 7, 8), 3), (Turned(), (2, 5, 5, 6), 1)],
    ids=["blocks", "turned"],
)
def test_copies_are_made_again_bit_for_bit(model: nn.Module, shape: tuple[int, ...], least: int) -> None:
    torch.manual_seed(0)
    x, twin = torch.randn(shape), copy.deepcopy(model)
    policy = copies(model, x)
    assert len(policy) >= least
    with torch.autocast("cpu", torch.bfloat16):
        outcore.within(model, (x,), memory=None, optimizer=0.0, plan=policy, quiet=True)
    for _ in range(2):
        want, got = gradients(twin, x), gradients(model, x)
        assert len(want) == len(got) and all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    (entry,) = model.__dict__["forward"].admitted.values()
    seen = {key.partition(" ")[0]: alike for key, alike in entry.table.verified.items()}
    assert set(seen) == set(policy) and all(seen.values())


class Gated(Block):
    """Needs its input in float32 too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.second(self.first(x)).float()


def test_a_copy_of_what_is_there_anyway_leaves_the_peak() -> None:
    model, x = nn.Sequential(*(Gated(8) for _ in range(6))), torch.randn(512, 8)
    policy = copies(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        outcore.within(model, (x,), memory=None, optimizer=0.0, plan=policy, quiet=True)
    plan = outcore.memory_plan(model)
    saved = sum(plan.keeping.buffers[n].bytes for n in policy)
    assert plan.plain_bytes - plan.peak_bytes > 0.5 * saved > 0


def test_what_is_overwritten_after_the_copy_is_not_made_again() -> None:
    class Overwritten(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.scale
            z = self.second(torch.nn.functional.gelu(self.first(y)))
            return y.add_(z)

    model, x = Overwritten(8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        graph = outcore.capture(model, (x,))
        found = [b for b in buffers_of(graph, account(graph)).values() if b.copy_of]
    assert found and all("overwrites" in b.obstacle for b in found)


def test_without_autocast_nothing_is_a_copy() -> None:
    model, x = Block(8), torch.randn(4, 8)
    graph = outcore.capture(model, (x,))
    assert not any(b.copy_of for b in buffers_of(graph, account(graph)).values())


def test_copies_of_weights_live_until_forward_is_over() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    x = torch.randn(16, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
        outcore.within(model, (x,), memory=None, optimizer=0.0, costs=costs, quiet=True)
        keeping = outcore.memory_plan(model).keeping
        copies = dict.fromkeys(keeping.cached, OFFLOAD)
        assert len(copies) == 7  # the first layer needs no gradient of its input
        outcore.within(model, (x,), memory=None, optimizer=0.0, costs=costs, plan=copies, quiet=True)
    plan = outcore.memory_plan(model)
    moments = zip(plan.outcome.curve, keeping.plain.moments, strict=True)
    forward = max(size for size, moment in moments if moment.phase == "forward")
    here = [*model.parameters(), x]
    with LiveBytes(here) as live, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).sum()
    measured = live.peak + sum(t.nbytes for t in here)
    loss.backward()
    first = 256 * 256 * 2  # cached too, though backward does not need it
    assert 0.97 * forward <= measured <= forward + 1.1 * first < 1.05 * forward
