"""Models with losses drawn at random under `within`, in chunks wherever that is planned: gradients of plain PyTorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.planner.memory.plan import MemoryPlan

CLASSES, WIDTH = 1501, 16


class Drawn(nn.Module):
    """A network whose head, loss, and what it does with its logits beside, are drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)))
        self.head = nn.Linear(WIDTH, CLASSES, bias=draw.random() < 0.5)
        if draw.random() < 0.4:
            self.head.weight = self.embed.weight
        elif draw.random() < 0.3:
            self.head.requires_grad_(False)
        self.functional = draw.random() < 0.3
        weight = torch.linspace(0.5, 2, CLASSES) if draw.random() < 0.4 else None
        self.criterion = nn.CrossEntropyLoss(weight, label_smoothing=draw.choice([0.0, 0.1]), ignore_index=7)
        self.kind = draw.choice(["criterion", "shifted", "likelihood", "masked", "squares", "two", "classes first"])
        self.beside = draw.choice(["nothing", "returned", "accuracy", "kept", "hook", "capped"])
        self.kept: Any = None

    def forward(self, tokens: torch.Tensor) -> Any:
        """A loss, and perhaps logits."""
        x = self.blocks(self.embed(tokens))
        logits = F.linear(x, self.head.weight, self.head.bias) if self.functional else self.head(x)
        if self.beside == "capped":
            logits = 9 * torch.tanh(logits / 9)
        flat, labels = logits.view(-1, CLASSES), tokens.view(-1)
        losses: dict[str, Callable[[], torch.Tensor]] = {
            "criterion": lambda: self.criterion(flat, labels),
            "shifted": lambda: F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), tokens[:, 1:].reshape(-1)),
            "likelihood": lambda: F.nll_loss(F.log_softmax(flat, dim=-1), labels, reduction="sum") / 99,
            "masked": lambda: (F.cross_entropy(flat, labels, reduction="none") * (labels % 3)).sum() / 99,
            "squares": lambda: F.mse_loss(logits, torch.zeros_like(logits)),
            "two": lambda: F.cross_entropy(flat, labels) + 0.1 * flat.logsumexp(-1).square().mean(),
            "classes first": lambda: F.cross_entropy(logits.transpose(1, 2), tokens),
        }
        loss = losses[self.kind]()
        if self.beside == "accuracy":
            self.kept = (logits.argmax(-1) == tokens).double().mean()
        elif self.beside == "kept":
            self.kept = logits
        elif self.beside == "hook" and logits.requires_grad:
            logits.register_hook(lambda grad: 2 * grad)
        return (loss, logits) if self.beside == "returned" else loss


@pytest.mark.parametrize(
    "seeds", [range(1), *(pytest.param(range(k, k + 10), marks=pytest.mark.slow) for k in range(1, 41, 10))], ids=str
)
def test_drawn_models(seeds: range) -> None:
    tokens = torch.randint(0, CLASSES, (6, 16), generator=torch.Generator().manual_seed(3))
    for seed in seeds:
        plain = Drawn(seed).double()
        model = copy.deepcopy(plain)
        asked: dict[str, Any] = {"optimizer": 0.0, "exact": "reassociated", "measure_s": 0.2, "quiet": True}
        try:
            outcore.within(model, (tokens,), memory="60%", **asked)
        except outcore.OutcoreError:  # its last layer stays whole, and needs more
            outcore.within(model, (tokens,), memory="120%", **asked)
        assert isinstance(outcore.memory_plan(model), MemoryPlan)
        for _ in range(2):
            results = [each(tokens) for each in (plain, model)]
            losses = [r[0] if isinstance(r, tuple) else r for r in results]
            for loss in losses:
                loss.backward()
            assert torch.allclose(losses[0], losses[1], rtol=1e-12), seed
            if isinstance(results[0], tuple):
                assert torch.allclose(results[0][1], results[1][1], rtol=0, atol=1e-10), seed
            if isinstance(plain.kept, torch.Tensor):
                assert torch.allclose(plain.kept, model.kept, rtol=0, atol=1e-10), seed
            for (name, one), two in zip(plain.named_parameters(), model.parameters(), strict=True):
                assert (one.grad is None) == (two.grad is None), (seed, name)
                if one.grad is not None and two.grad is not None:
                    scale = max(1.0, one.grad.abs().max().item())
                    assert torch.allclose(one.grad, two.grad, rtol=0, atol=1e-10 * scale), (seed, name)
