"""Where cuDNN searches for algorithms, what a plan makes again has the bits that forward had."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.memory.saved_tensors.cudnn_search import convolutions, differing, made_again
from outcore.planner.memory.plan import MemoryPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ASKED: dict[str, Any] = {"quiet": True, "measure_s": 1.0, "graphs": False}


def network(width: int) -> nn.Module:
    """Convolutions of many shapes, each before something that keeps its result for backward."""
    layers: list[nn.Module] = []
    channels = 3
    for i in range(10):
        kernel, out = (1, 3, 5)[i % 3], width * (1 + i % 4)
        layers += [nn.Conv2d(channels, out, kernel, padding=kernel // 2, stride=1 + (i in (3, 7))), nn.SiLU()]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize("channels_last", [True, False])
def test_gradients_are_bitwise_those_of_plain_training(bf16: bool, width: int, channels_last: bool) -> None:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        torch.manual_seed(0)
        order = torch.channels_last if channels_last else torch.contiguous_format
        model = network(width).cuda().to(memory_format=order)  # type: ignore[call-overload]
        images = torch.randn(16, 3, 96, 96, device="cuda").contiguous(memory_format=order)

        def gradients() -> list[torch.Tensor]:
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                output = model(images)
            output.float().square().mean().backward()
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        want = gradients()
        if not all(torch.equal(a, b) for a, b in zip(gradients(), want, strict=True)):
            pytest.skip("plain training does not repeat itself here")
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the allocator reserves beside tensors is not the matter here
            with pytest.raises(PlanError) as refused:
                outcore.within(model, (images,), memory="1MiB", stream=False, **ASKED)
            assert refused.value.least_bytes is not None
            outcore.within(model, (images,), memory=int(1.1 * refused.value.least_bytes), stream=False, **ASKED)
            graph = outcore.capture(model, (images,))
        plan = outcore.memory_plan(model)
        assert isinstance(plan, MemoryPlan)
        again = convolutions(graph, made_again(plan))
        differ = differing(graph, graph.calls, images.device)
        print(f"{len(again)} of {len(convolutions(graph, graph.calls))} made again, {len(differ)} differ")
        assert differ.isdisjoint(again)
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), want, strict=True))
    finally:
        torch.backends.cudnn.benchmark = before
