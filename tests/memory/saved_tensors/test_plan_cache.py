"""Plans that were found before are not searched for again; the smallest budget that a refusal names does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost import cost_cache
from outcore.errors import PlanError
from outcore.memory.saved_tensors import plan_cache
from outcore.planner.memory import plan as memory_plan_module
from outcore.planner.memory import search as budget_module


def net(width: int = 64, depth: int = 8) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The budgets that are searched for, with a cache of their own."""
    found: list[int] = []

    def counting(keeping: Any, budget_bytes: int, **options: Any) -> budget_module.Assignment:
        found.append(budget_bytes)
        return budget_module.fit(keeping, budget_bytes, **options)

    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path))
    monkeypatch.setattr(memory_plan_module, "fit", counting)
    forget(monkeypatch)
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    monkeypatch.setattr(cost_cache, "_KNOWN", {})
    monkeypatch.setattr(plan_cache, "_KNOWN", {})
    monkeypatch.setattr(memory_plan_module, "_LEAST", {})


def within(model: nn.Module, memory: Any, batch: int = 512) -> nn.Module:
    return outcore.within(model, (torch.randn(batch, 64),), memory=memory, measure_s=0.3, stream=False, quiet=True)


def test_the_second_start_takes_the_plan_of_the_first(
    searches: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = outcore.memory_plan(within(net(), "70%"))
    assert first.policy and len(searches) == 1
    forget(monkeypatch)
    torch.manual_seed(0)
    model = within(net(), "70%")
    again = outcore.memory_plan(model)
    assert len(searches) == 1
    assert (again.policy, again.peak_bytes) == (first.policy, first.peak_bytes)
    within(net(), "60%")
    assert len(searches) == 2
    x = torch.randn(512, 64)
    plain = net()
    plain.load_state_dict(model.state_dict())
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"policy": 3}', '{"policy": {"no such value": "recompute"}}'])
def test_a_damaged_or_foreign_file_is_searched_again(
    searches: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    first = outcore.memory_plan(within(net(), "70%"))
    for file in (tmp_path / "plans").iterdir():
        file.write_text(content)
    forget(monkeypatch)
    again = outcore.memory_plan(within(net(), "70%"))
    assert len(searches) == 2 and again.peak_bytes <= 0.7 * first.plain_bytes


def test_a_plan_that_the_network_cannot_have_any_more_is_searched_again(searches: list[int]) -> None:
    within(net(), "70%")
    hooked = net()
    for layer in hooked:
        assert isinstance(layer, nn.Sequential)
        layer[1].register_forward_hook(lambda *_: None)
    model = within(hooked, "80%")
    assert len(searches) == 2
    model(torch.randn(512, 64)).sum().backward()


def test_the_step_need_not_be_tried_twice(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = within(net(), "70%")
    managed_forward = model.__dict__["forward"]
    costs, settings = managed_forward.costs, managed_forward.settings
    assert plan_cache.known_overhead(costs, settings, limited=False) is None
    plan_cache.remember_overhead(costs, settings, 123, 1, limited=False)
    forget(monkeypatch)
    assert plan_cache.known_overhead(costs, settings, limited=False) == (123, 1)
    assert plan_cache.known_overhead(costs, settings, limited=True) is None  # a limit has to be larger


def branched(seed: int) -> nn.Module:
    """A network of layers that are kept or made again at different costs, with sums over branches."""

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            draw = torch.Generator().manual_seed(seed)
            self.widths = [int(w) for w in torch.randint(8, 96, (7,), generator=draw)]
            sizes = zip([64, *self.widths], self.widths, strict=False)
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)
            self.side = nn.ModuleList(nn.Linear(w, w) for w in self.widths)
            self.kinds = [int(k) for k in torch.randint(0, 4, (7,), generator=draw)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, side, kind in zip(self.layers, self.side, self.kinds, strict=True):
                x = layer(x)
                y = (torch.tanh, torch.relu, torch.sigmoid, torch.nn.functional.gelu)[kind](x)
                x = x + side(y) if kind % 2 else y * torch.sigmoid(side(y))
            return x

    return Drawn()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 18))])
@pytest.mark.parametrize("kept", ["kept", "off"])
def test_the_smallest_budget_that_a_refusal_names_does(
    seed: int, kept: str, searches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept == "off":
        monkeypatch.setenv("OUTCORE_CACHE", "off")
    with pytest.raises(PlanError) as refused:
        within(branched(seed), 1000)
    (named,) = re.findall(r'give memory="(\d+MiB)" or more', str(refused.value))
    least = refused.value.least_bytes
    assert least is not None
    if kept == "kept":
        forget(monkeypatch)
        exact = outcore.memory_plan(within(branched(seed), least))
        assert exact.peak_bytes <= least
    assert outcore.memory_plan(within(branched(seed), named)).peak_bytes <= outcore.machine.units.parse_bytes(named)
