"""Lower precision, loss scales, and weights that change: no worse than plain PyTorch against float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from outcore.errors import OutcoreError
from outcore.memory.chunked_loss.lazy_rows import LazyRows, lazy_linear

Make = Callable[..., torch.Tensor]


def _lazy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return lazy_linear(x, weight, bias, rows_per_chunk=16)


def _operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 32, 24, generator=generator, dtype=torch.float64)
    weight, bias = (0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((97, 24), (97,)))
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), bias.to(dtype).requires_grad_()


def _step(make: Make, dtype: torch.dtype, cast: torch.dtype | None, scale: float, kind: str) -> list[torch.Tensor]:
    x, weight, bias = _operands(dtype)
    labels = torch.arange(4 * 32).view(4, 32) % 97
    labels[0, :5] = -100
    on = torch.autocast("cpu", dtype=cast) if cast is not None else contextlib.nullcontext()
    with on:
        logits = make(x * 1, weight, bias)
        if kind == "shifted":
            rows = logits[..., :-1, :].float() if dtype != torch.float64 else logits[..., :-1, :]
            loss = F.cross_entropy(rows.reshape(-1, 97), labels[..., 1:].reshape(-1))
        elif kind == "masked":
            each = F.cross_entropy(logits.view(-1, 97), labels.view(-1), reduction="none")
            loss = (each * torch.linspace(0, 1, 128, dtype=each.dtype)).sum() / 50
        else:
            loss = (20 * torch.tanh(logits / 20)).log_softmax(-1).mul(-0.01).mean()
    (scale * loss).backward()
    found = [t.grad for t in (x, weight, bias) if t.grad is not None]
    assert len(found) == 3 and all(g.dtype == dtype for g in found)
    return [loss.detach(), logits.detach() + 0, *(g / scale for g in found)]


@pytest.mark.parametrize("kind", ["shifted", "masked", "capped"])
@pytest.mark.parametrize(
    ("dtype", "cast", "scale"),
    [
        (torch.float32, torch.bfloat16, 1.0),
        (torch.float32, torch.float16, 4096.0),
        (torch.bfloat16, None, 1.0),
        (torch.float16, None, 1024.0),
        (torch.float32, None, 1.0),
    ],
    ids=str,
)
def test_no_further_from_float64_than_plain(
    dtype: torch.dtype, cast: torch.dtype | None, scale: float, kind: str
) -> None:
    exact = _step(F.linear, torch.float64, None, 1.0, kind)
    plain, ours = (_step(make, dtype, cast, scale, kind) for make in (F.linear, _lazy))
    for true, one, two in zip(exact, plain, ours, strict=True):
        assert one.dtype == two.dtype
        error, allowed = (two - true).abs().max(), (one - true).abs().max()
        assert error <= 2 * allowed + 1e-6 * true.abs().max()


def test_a_loss_scale_that_moves() -> None:
    def train(make: Make) -> list[torch.Tensor]:
        x, weight, _ = _operands(torch.float32)
        optimizer, scaler = torch.optim.SGD([x, weight], lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            optimizer.zero_grad()
            for half in range(2):  # gradients of two micro-batches add up
                rows = make(x[2 * half : 2 * half + 2], weight).view(-1, 97)
                scaler.scale(F.cross_entropy(rows, torch.arange(64)) / 2).backward()
            scaler.step(optimizer)
            scaler.update()
        return [x.detach(), weight.detach()]

    for one, two in zip(train(F.linear), train(_lazy), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["hook", "data", "optimizer"])
def test_logits_that_are_read_after_the_weight_was_updated(how: str) -> None:
    x, weight, bias = _operands(torch.float64)
    wanted = F.linear(x, weight, bias).detach()
    if how == "hook":  # an optimizer that steps while backward runs

        def update(p: torch.Tensor) -> None:
            assert p.grad is not None
            p.detach().sub_(0.1 * p.grad)

        weight.register_post_accumulate_grad_hook(update)
    logits = _lazy(x, weight, bias)
    F.cross_entropy(logits.view(-1, 97), torch.arange(128) % 97).backward()
    if how == "data":
        assert weight.grad is not None
        weight.data.sub_(weight.grad)
    elif how == "optimizer":
        torch.optim.Adam([weight, bias]).step()
    assert isinstance(logits, LazyRows) and logits.is_lazy
    assert torch.equal(logits, wanted)


def test_operands_that_are_overwritten_before_backward_are_refused() -> None:
    x, weight, bias = _operands(torch.float64)
    logits = _lazy(x, weight, bias)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(OutcoreError, match="written in place"):
        logits.sum()
