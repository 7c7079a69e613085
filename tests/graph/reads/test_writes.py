"""What forward does to Python in its first call (hooks, settings, flags), a replay does too, and fused members."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

import outcore
from outcore.errors import VaryingError


class Settings:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self.seen: list[int] = []


class Lazy(nn.Module):
    """Registers hooks on its layers, completes its settings, and remembers that it has, in the first call."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.config = config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "ready", False):
            self.layers[1](x)  # before it has a hook
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, out: 2 * out)
            self.layers[0].register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
            self.ready = True
        if self.config.kind is None:
            self.config.kind = "regression"
        return self.layers(x) * len(self.config.kind)


class Completes(nn.Module):
    """Completes its settings in the first call."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers, self.config = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "regression"
        return self.layers(x) * len(self.config.kind)


class Counts(Completes):
    """Counts its calls in its settings."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.config.calls = getattr(self.config, "calls", 0) + 1
        return super().forward(x)


class ChangesInside(Completes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.config.seen.append(len(x))
        return super().forward(x)


def hooks(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks_with_kwargs) for m in model.modules()]


@pytest.mark.parametrize("config", [Settings, lambda: SimpleNamespace(kind=None, seen=[])], ids=["object", "namespace"])
@pytest.mark.parametrize("kind", [Lazy, Completes])
def test_a_replay_does_what_the_first_call_does(kind: type[Lazy | Completes], config: Any) -> None:
    model = kind(config())
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    graph = outcore.capture(model, (x,))
    assert not any(hooks(model)) and model.config.kind is None  # capturing leaves nothing behind
    for _ in range(3):
        assert torch.equal(graph.module(x), plain(x))
        assert hooks(model) == hooks(plain) and vars(model.config) == vars(plain.config)
    assert torch.equal(model(x), plain(x))


def test_what_changes_inside_of_what_an_object_holds_is_refused() -> None:
    model, x = ChangesInside(Settings()), torch.randn(3, 4)
    with pytest.raises(VaryingError, match=r"self\.config"):
        outcore.capture(model, (x,)).module(x)
    assert model.config.seen == []


@pytest.mark.parametrize(("kind", "width"), [(Completes, 2), (Counts, 1), (Lazy, 1)])
def test_fused_members_do_what_their_first_calls_do(kind: type[Lazy | Completes], width: int) -> None:
    """Once, and they train together; what is done in every call makes them train by themselves, as often as alone."""
    models = [kind(Settings()).double() for _ in range(2)]
    twins = [copy.deepcopy(model) for model in models]
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).square().mean()

    array = outcore.fuse(models, loss=loss, optimizer=lambda p, i: optim.SGD(p, 0.01 * (i + 1)))
    for _ in range(3):
        array.step(x, y)
    for i, twin in enumerate(twins):
        steps = optim.SGD(twin.parameters(), 0.01 * (i + 1))
        for _ in range(3):
            steps.zero_grad()
            loss(twin(x), y).backward()
            steps.step()
    assert array.way.width == width, array.notes
    for model, twin in zip(models, twins, strict=True):
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in pairs)
        assert model.config.kind == "regression" and hooks(model) == hooks(twin)
        if kind is Counts:
            assert model.config.calls == twin.config.calls
