"""On a GPU whose host has little memory: bytes and gradients come back by way of the disk."""

import copy
import random

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.offload import backends
from outcore.memory.offload.disk_spill import SpillBackend, SpilledBuffer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("seed", range(6))
def test_the_same_bytes_come_back(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 6_000_000) for _ in range(24)]
    tier = SpillBackend(torch.device("cuda"), sum(sizes), int(draw.choice([0.0, 0.1, 0.4, 0.8]) * sum(sizes)))
    for _ in range(3):
        originals = [torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in sizes]
        buffers: list[SpilledBuffer | None] = []
        for flat in originals:
            leaving = flat.clone()
            buffers.append(buffer := tier.evict(leaving))
            buffer.wait_out()
            leaving.zero_()  # the computing stream comes after the copy out
        for i in reversed(range(len(sizes))):
            for j in range(i, max(-1, i - 3), -1):
                if (buffer := buffers[j]) is not None:
                    buffer.fetch()
            buffer = buffers[i]
            assert buffer is not None
            assert torch.equal(buffer.bytes_back(), originals[i])
            buffers[i] = buffer = None
    assert tier.arena.free_bytes == tier.arena.size
    assert tier.scratch.arena.free_bytes == tier.scratch.arena.size


def test_gradients_are_those_of_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTCORE_HOST_MEMORY", "24MiB")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    made: list[SpillBackend] = []

    class Noted(SpillBackend):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(backends, "SpillBackend", Noted)
    block = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *(copy.deepcopy(layer) for _ in range(6) for layer in block)).cuda()
    x = torch.randn(4, 3, 258, 258, device="cuda")
    twin = copy.deepcopy(model)
    values = [f"{i}#0:out" for i in (1, 2, 4, 5, 7, 8, 10, 11, 13, 14)]  # what norms and the next convolutions read
    outcore.within(model, (x,), memory=None, plan=dict.fromkeys(values, "offload"), quiet=True)
    for _ in range(3):
        for each in (model, twin):
            each.zero_grad()
            each(x).square().mean().backward()
        for (name, ours), plain in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None and plain.grad is not None and torch.equal(ours.grad, plain.grad), name
    assert made and made[0].spilled_bytes > 24 * 2**20
