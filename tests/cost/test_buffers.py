"""Which calls must run to make a buffer again."""

from __future__ import annotations

import torch
from torch import nn

import outcore
from outcore.cost.buffers import Buffer, buffers_of
from outcore.cost.measured.saved_bytes import account


class Views(nn.Module):
    """A product that is looked at in other shapes, and passes a dropout that drops nothing."""

    def __init__(self, probability: float, *, through_view: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(4, 8)
        self.act, self.drop, self.through_view = nn.GELU(), nn.Dropout(probability), through_view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.act(self.first(x))).view(-1, 4)
        if self.through_view:
            y.transpose(0, 1).relu_()
        return self.last(y)


def buffer_of(model: nn.Module, name: str) -> Buffer:
    graph = outcore.capture(model, (torch.randn(6, 8),))
    return buffers_of(graph, account(graph))[name]


def test_views_make_nothing() -> None:
    found = buffer_of(Views(0.0), "act#0:out")
    assert found.writers == ("act#0",)
    assert not found.drawn, "a dropout of nothing draws nothing"


def test_what_draws_is_drawn_again() -> None:
    graph = outcore.capture(Views(0.5), (torch.randn(6, 8),))
    found = buffers_of(graph, account(graph))
    assert found["drop#0:out"].drawn and found["drop#0:out"].writers == ("drop#0",)


def test_views_that_are_written_through_run_again() -> None:
    found = buffer_of(Views(0.0, through_view=True), "act#0:out")
    assert found.writers == ("act#0", "drop#0", "view()#0", "transpose()#0", "relu_()#0")


def test_hooks_on_a_view_are_an_obstacle() -> None:
    model = Views(0.0)
    model.drop.register_forward_hook(lambda *_: None)
    assert "hooks" in buffer_of(model, "act#0:out").obstacle


def test_gradients_are_plains_where_views_are_skipped() -> None:
    for through_view in (False, True):
        torch.manual_seed(0)
        model, x = Views(0.0, through_view=through_view), torch.randn(6, 8)
        model(x).square().sum().backward()
        want = [p.grad for p in model.parameters()]
        model.zero_grad()
        outcore.within(model, (x,), memory=None, plan={"act#0:out": "recompute"}, optimizer=0.0, quiet=True)
        model(x).square().sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))
