"""Under a limit of the process's memory at the budget, no step has to look twice for room, the first one neither."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.memory.saved_tensors import plan_cache
from outcore.planner.memory.plan import MemoryPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def network() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(16):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def step(model: nn.Module, images: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    optimizer.zero_grad()
    model(images).square().mean().backward()
    found = [p.grad.detach().cpu() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return found


@pytest.mark.parametrize("share", [0.3, 0.15])
def test_a_wall_that_is_too_near_is_refused_and_the_one_that_is_named_holds(share: float) -> None:
    """Out of memory in the middle of training is what a budget is there to prevent."""
    torch.manual_seed(0)
    model, images = network().cuda(), torch.randn(32, 3, 128, 128, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step(model, images, optimizer)
    budget = int(share * torch.cuda.max_memory_reserved())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    model.zero_grad()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        for _ in range(4):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(budget / total)
            try:
                outcore.within(model, (images,), memory=budget, optimizer=optimizer, measure_s=1.0, quiet=True)
                break
            except PlanError as refused:
                assert refused.least_bytes is not None and refused.least_bytes > budget
                print(refused)
                budget = refused.least_bytes
        for _ in range(4):
            step(model, images, optimizer)
        assert isinstance(outcore.memory_plan(model), MemoryPlan)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_the_budget_is_a_wall(share: float) -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    model, images = network().cuda(), torch.randn(32, 3, 128, 128, device="cuda")
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    want = [step(model, images, optimizer) for _ in range(3)]
    budget = int(share * torch.cuda.max_memory_reserved())
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(budget / total)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outcore.within(model, (images,), memory=budget, optimizer=optimizer, measure_s=1.0, quiet=True)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()
        got = [step(model, images, optimizer) for _ in range(3)]
        after = torch.cuda.memory_stats()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.backends.cudnn.deterministic = False
    for name in ("num_alloc_retries", "num_ooms"):
        assert after[name] == before[name]
    for a, b in zip(want, got, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_second_start_takes_no_steps(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path))
    from outcore.memory.saved_tensors import trial_steps

    taken: list[int] = []
    real = trial_steps._Trial.reserved

    def counting(*given: object, **named: object) -> int:
        taken.append(1)
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(trial_steps._Trial, "reserved", counting)
    images = torch.randn(32, 3, 128, 128, device="cuda")
    for _ in range(2):
        first = len(taken)
        outcore.within(network().cuda(), (images,), memory="75%", measure_s=1.0, quiet=True)
        monkeypatch.setattr(plan_cache, "_KNOWN", {})
    assert first and len(taken) == first
