"""Steps that become CUDA graphs by themselves train as plain PyTorch does, whatever the loop does next."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.cuda_graphs import choose as graph_choice
from tests.memory.test_gpu import gradients, network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are tried and taken, however fast they are."""
    monkeypatch.setattr(graph_choice, "_HOST_BOUND", 0.0)
    monkeypatch.setattr(graph_choice, "_FASTER", 1e9)
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


class Scaled(nn.Module):
    """A network with an attribute that a loop may change."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.alpha = network(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x * self.alpha)
        return found


class Both:
    """A model within most of its memory, and what plain training makes of the same batches, known before."""

    def __init__(self, batches: list[torch.Tensor], alphas: list[float]) -> None:
        model = Scaled().cuda()
        twin = copy.deepcopy(model)
        self.want = []
        for batch, twin.alpha in zip(batches, alphas, strict=True):
            self.want.append([t.cpu() for t in (*gradients(twin, batch, bf16=False), *twin.buffers())])
            torch.optim.SGD(twin.parameters(), lr=0.01).step()
        self.model, self.batches, self.alphas, self.done = model, batches, alphas, 0
        del twin
        gc.collect()
        torch.cuda.empty_cache()
        outcore.within(model, (batches[0],), memory="75%", optimizer=0.0, measure_s=1.0, quiet=True)
        self.choice = model.__dict__["forward"].choice
        assert self.choice is not None

    def step(self) -> bool:
        """One step, compared; whether it ran as graphs."""
        batch, self.model.alpha = self.batches[self.done], self.alphas[self.done]
        found = [*gradients(self.model, batch, bf16=False), *self.model.buffers()]
        replayed = self.choice.other is not None
        assert all(torch.equal(a, b.cpu()) for a, b in zip(self.want[self.done], found, strict=True)), self.done
        torch.optim.SGD(self.model.parameters(), lr=0.01).step()
        self.model.zero_grad()
        self.done += 1
        return replayed


def drawn(count: int, size: int = 16) -> list[torch.Tensor]:
    return [torch.randn(size, 3, 128, 128, device="cuda") for _ in range(count)]


def test_steps_become_graphs_and_stay_plain_trainings() -> None:
    both = Both(drawn(16), 16 * [1.0])
    replayed = [both.step() for _ in range(16)]
    assert not any(replayed[:5]) and all(replayed[6:]) and both.choice.taken


def test_what_changes_later_is_never_stale() -> None:
    batches = [*drawn(14), *drawn(1, 10), *drawn(7), *drawn(7), *drawn(6)]
    both = Both(batches, 22 * [1.0] + 13 * [0.5])
    replayed = [both.step() for _ in range(28)]
    assert replayed[13] and not replayed[14]  # another size
    assert replayed[21] and not replayed[22]  # another attribute
    assert replayed[27]
    model = both.model
    with torch.no_grad():
        model(both.batches[0])
    assert both.choice.other is None
    for buffer, want in zip(model.buffers(), both.want[27][-len(list(model.buffers())) :], strict=True):
        buffer.copy_(want)
    assert not both.step()
