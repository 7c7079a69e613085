"""Plain PyTorch beside the streamed model, in float64."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from outcore.stream import Streamed, stream
from outcore.stream.execute import border_padding

TOLERANCE = 1e-10


def with_statistics(model: nn.Module) -> nn.Module:
    """Running statistics and affine parts that are not the trivial ones."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
            if module.affine:
                module.weight.data.uniform_(0.5, 1.5, generator=generator)
                module.bias.data.normal_(0, 0.1, generator=generator)
    return model


def total(output: Any) -> torch.Tensor:
    """A loss that weighs every number differently."""
    parts = list(output.values()) if isinstance(output, dict) else output
    parts = parts if isinstance(parts, (list, tuple)) else [parts]
    losses = [
        (t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t)).sum() + t.square().mean()
        for t in parts
        if isinstance(t, torch.Tensor)
    ]
    return torch.stack(losses).sum()


@contextlib.contextmanager
def any_excess(most: float = math.inf) -> Iterator[None]:
    """As much excess as is said: on images as small as those of tests, the ordinary share would allow none."""
    before, border_padding._MOST = border_padding._MOST, most
    try:
        yield
    finally:
        border_padding._MOST = before


def assert_equal_to_plain(
    model: nn.Module, *inputs: torch.Tensor, tile: Any, most: float = math.inf, **options: Any
) -> Streamed:
    """Output, every parameter's gradient, the inputs' gradients and all buffers."""
    model = model.double()
    plain = copy.deepcopy(model)
    ours = [x.double().clone().requires_grad_() for x in inputs]
    theirs = [x.double().clone().requires_grad_() for x in inputs]

    torch.manual_seed(7)
    expected = total(plain(*theirs))
    expected.backward()
    torch.manual_seed(7)
    streamed = stream(model, tile=tile, **options)
    with any_excess(most):
        loss = total(streamed(*ours))
        loss.backward()

    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for mine, other in zip(ours, theirs, strict=True):
        assert other.grad is not None and mine.grad is not None
        assert (mine.grad - other.grad).abs().max() <= TOLERANCE * max(other.grad.abs().max(), 1e-3)
    largest = max((p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None), default=0.0)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        if mine.grad is not None and other.grad is not None:
            assert (mine.grad - other.grad).abs().max() <= TOLERANCE * max(largest, 1e-3), name
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    return streamed
