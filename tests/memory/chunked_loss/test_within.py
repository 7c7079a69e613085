"""Models whose last layer and loss are planned in chunks: gradients, peaks, what is returned beside, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.errors import PlanError
from outcore.memory.chunked_loss.lazy_rows import LazyRows
from outcore.planner.memory.plan import MemoryPlan

CLASSES, WIDTH = 3001, 24


class Language(nn.Module):
    """Tokens to a loss, with the logits beside it; the last layer may have the embedding's weight."""

    def __init__(self, *, tied: bool = True, bias: bool = False, cap: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.cap = cap
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Loss and logits, or logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        if labels is None:
            return logits
        shifted = logits[..., :-1, :].contiguous()
        loss = F.cross_entropy(shifted.view(-1, CLASSES), labels[..., 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


def _tokens() -> torch.Tensor:
    return torch.randint(0, CLASSES, (8, 32), generator=torch.Generator().manual_seed(1))


def _peak(model: nn.Module, tokens: torch.Tensor) -> int:
    """Live bytes of a step at its peak, beside the weights."""
    for p in model.parameters():
        p.grad = None
    with LiveBytes() as live:
        model(tokens=tokens, labels=tokens)["loss"].backward()
    return int(live.peak)


@pytest.mark.parametrize(
    "kind", [{"cap": 5.0}, pytest.param({"tied": False, "bias": True}, marks=pytest.mark.slow)], ids=str
)
def test_gradients_and_peak_of_a_model_with_its_loss(kind: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, tokens = Language(**kind).double(), _tokens()
    model = copy.deepcopy(plain)
    before = _peak(plain, tokens)
    outcore.within(
        model,
        (),
        {"tokens": tokens, "labels": tokens},
        memory="30%",
        optimizer=0.0,
        exact="reassociated",
        quiet=True,
    )
    plan = outcore.memory_plan(model)
    assert isinstance(plan, MemoryPlan) and plan.chunked is not None and plan.exactness == "reassociated"
    assert _peak(model, tokens) < before / 2
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.allclose(one.grad, two.grad, rtol=0, atol=1e-10)
    found, wanted = model(tokens=tokens, labels=tokens), plain(tokens, labels=tokens)
    assert isinstance(found["logits"], LazyRows)
    found["loss"].backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.allclose(found["logits"], wanted["logits"], rtol=0, atol=1e-10)  # also after the weight has changed


def test_bitwise_names_what_chunks_would_do() -> None:
    model, tokens = Language(), _tokens()
    asked: dict[str, Any] = {
        "kwargs": {"tokens": tokens, "labels": tokens},
        "optimizer": 0.0,
        "quiet": True,
        "measure_s": 0.3,
    }
    with pytest.raises(PlanError, match=r'with exact="reassociated", [\d.]+ MiB would do'):
        outcore.within(model, (), memory="30%", **asked)


def test_other_uses_of_the_logits_keep_the_layer_whole() -> None:
    class Mixed(Language):
        """Adds what mixes rows."""

        def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            """Loss and logits."""
            found = super().forward(tokens, labels)
            found["loss"] = found["loss"] + found["logits"].softmax(1).square().mean()
            return found

    model, tokens = Mixed(), _tokens()
    asked: dict[str, Any] = {
        "kwargs": {"tokens": tokens, "labels": tokens},
        "optimizer": 0.0,
        "quiet": True,
        "measure_s": 0.3,
    }
    with pytest.raises(PlanError, match="cannot be done within"):
        outcore.within(model, (), memory="40%", exact="reassociated", **asked)


def test_a_loss_after_the_model() -> None:
    torch.manual_seed(0)
    plain, tokens = Language().double(), _tokens()
    model = copy.deepcopy(plain)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.view(-1, CLASSES), tokens.to(logits.device).view(-1))

    outcore.within(
        model, (tokens,), memory="30%", loss=loss, optimizer=0.0, exact="reassociated", measure_s=0.3, quiet=True
    )
    plan = outcore.memory_plan(model)
    assert isinstance(plan, MemoryPlan) and plan.chunked is not None
    peaks = []
    for each in (plain, model):
        with LiveBytes() as live:
            logits = each(tokens)
            assert logits.argmax(-1).shape == tokens.shape
            loss(logits).backward()
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] / 2
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert torch.allclose(one.grad, two.grad, rtol=0, atol=1e-10)
