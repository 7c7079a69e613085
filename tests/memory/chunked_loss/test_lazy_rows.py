"""Whatever is done to lazy logits: the numbers, gradients and errors of plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from outcore.memory.chunked_loss.lazy_rows import lazy_linear
from tests.memory.chunked_loss.logit_programs import play


def _lazy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return lazy_linear(x, weight, bias, rows_per_chunk=4)


def _differs(seed: int, *, writes: bool) -> str:
    """How a program on lazy logits differs from the plain one; empty if it does not."""
    plain, error = play(seed, F.linear, writes=writes)
    if error:
        return ""  # what torch refuses, nobody relies on
    ours, error = play(seed, _lazy, writes=writes)
    if error or ours.refused:
        return error
    if len(plain.seen) != len(ours.seen):
        return f"{len(plain.seen)} observations, {len(ours.seen)} with lazy logits"
    pairs = [*zip(plain.seen, ours.seen, strict=True)]
    for one, two in zip(plain.leaves(), ours.leaves(), strict=True):
        if (one.grad is None) != (two.grad is None):
            return "a gradient is missing"
        if one.grad is not None and two.grad is not None:
            pairs.append((one.grad, two.grad))
    for at, (one, two) in enumerate(pairs):
        scale = max(1.0, one.abs().max().item()) if one.numel() else 1.0
        if one.shape != two.shape or not torch.allclose(one, two, rtol=0, atol=1e-10 * scale, equal_nan=True):
            return f"observation {at} of {len(pairs)}"
    return ""


@pytest.mark.parametrize("writes", [False, True])
def test_programs(writes: bool) -> None:
    wrong = {seed: text for seed in range(40) if (text := _differs(seed, writes=writes))}
    assert not wrong


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_read_without_gradients_saved_and_copied(tmp_path: Path) -> None:
    x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    wanted, logits = F.linear(x, weight), _lazy(x, weight, None)
    with torch.inference_mode():
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
        assert torch.equal(logits.view(3, 2, 11).topk(2).values, wanted.view(3, 2, 11).topk(2).values)
        assert torch.equal(logits, wanted)
    logits = _lazy(x, weight, None)
    torch.save({"logits": logits.detach()}, tmp_path / "logits.pt")
    assert torch.equal(torch.load(tmp_path / "logits.pt")["logits"], wanted)
    assert torch.equal(copy.deepcopy(logits.detach()), wanted)
    assert np.array_equal(np.asarray(logits.detach()), wanted.detach().numpy())
    with torch.autograd.detect_anomaly(check_nan=True):
        F.cross_entropy(logits, torch.arange(6)).backward()
    (plain,) = torch.autograd.grad(F.cross_entropy(wanted, torch.arange(6)), x)
    assert x.grad is not None and torch.allclose(plain, x.grad, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("part", range(10))
def test_more_programs(part: int, writes: bool) -> None:
    seeds = range(1000 * (part + 1), 1000 * (part + 2))
    wrong = {seed: text for seed in seeds if (text := _differs(seed, writes=writes))}
    assert not wrong
