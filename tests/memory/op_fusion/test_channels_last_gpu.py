"""Images with their channels last inside a network, on a GPU: the choice is measured there."""

import copy
from typing import Any

import pytest
import torch

import outcore
from outcore.memory.op_fusion import channels_last
from outcore.planner.memory.plan import MemoryPlan
from tests.memory.op_fusion.test_channels_last import NETWORKS, agrees, made, total

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:.*cuBLAS:UserWarning"),
]


def under(model: torch.nn.Module, images: torch.Tensor, memory: int | None, **options: Any) -> MemoryPlan:
    options = {"optimizer": 0.0, "quiet": True, "measure_s": 2.0} | options
    outcore.within(model, (images,), memory=memory, exact="reassociated", **options)
    plan = outcore.memory_plan(model)
    assert isinstance(plan, MemoryPlan)
    return plan


@pytest.mark.parametrize("name", NETWORKS)
def test_trains_as_plain_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "_CLEARLY", float("inf"))
    model, images = made(name)
    model, images = model.cuda(), images.cuda()
    plain = copy.deepcopy(model)
    plan = under(model, images, None)
    assert plan.order.inside is not None
    for _ in range(2):
        agrees(model, plain, images)


@pytest.mark.parametrize(("side", "graphs"), [(768, False), (128, True)])
def test_within_a_budget_in_tf32(side: int, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "_CLEARLY", float("inf"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.manual_seed(0)
    model = outcore.models.UNet(width=32, depth=2).cuda()
    images = torch.randn(1, 3, side, side, device="cuda")
    plain = copy.deepcopy(model)  # whose weights are little
    budget = int(0.6 * under(model, images, None).plain_bytes) if not graphs else None
    plan = under(model, images, budget, graphs=graphs)
    assert plan.order.inside is not None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        model.zero_grad()
        output = model(images)
        total(output).backward()
    if budget is not None:
        assert torch.cuda.max_memory_allocated() <= budget
    given = plain(images)
    assert output.stride() == given.stride()
    total(given).backward()
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= 2e-2 * largest  # TF32 has ten bits
