"""Shift, sum and ReLU in one pass, against torch's own; by the kernel on a GPU or on Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from outcore.stream.rules.convolve import finish, is_fused
from tests.kernels.interpreter import too_new

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(INTERPRETED and too_new, reason="Triton's interpreter needs numpy < 2.4"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the interpreter
]


def check(device: str, dtype: torch.dtype, relu: bool, skip: str, channels: int) -> None:
    shape = (2, channels, 9, 7)
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device=device, dtype=dtype)

    y = draw(*shape).contiguous(memory_format=torch.channels_last)
    shift = draw(channels)
    whole = draw(2, channels, 12, 11).contiguous(memory_format=torch.channels_last)
    results = []
    for plain in (False, True):
        ys, shifts, wholes = (t.clone().requires_grad_() for t in (y, shift, whole))
        residual = {"none": None, "same": wholes[:, :, :9, :7].contiguous(memory_format=torch.channels_last)}.get(
            skip, wholes[:, :, 2:11, 3:10]
        )
        start = ys * 1
        if plain:  # as precisely as the kernel computes: a sum rounded to nothing on the way has another sign
            kind = torch.promote_types(dtype, torch.float32)
            out = start.to(kind) + shifts.to(kind).reshape(1, -1, 1, 1)
            out = out + residual.to(kind) if residual is not None else out
            out = (out.relu() if relu else out).to(dtype)
        else:
            out = finish(start, shifts, residual, relu)
        weights = torch.linspace(-1, 1, out.numel(), device=device, dtype=dtype).view_as(out)
        wanted = [ys, shifts, wholes] if residual is not None else [ys, shifts]
        results.append([out.detach(), *torch.autograd.grad(out, wanted, weights)])
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


CASES = [(relu, skip, c) for relu in (True, False) for skip in ("none", "same", "region") for c in (3, 64, 80)]


@(pytest.mark.kernel if INTERPRETED else lambda test: test)
@pytest.mark.parametrize(("relu", "skip", "channels"), CASES)
def test_one_pass_is_the_same_as_three(relu: bool, skip: str, channels: int) -> None:
    y = torch.empty(2, channels, 9, 7).contiguous(memory_format=torch.channels_last)
    assert is_fused(y, None) == INTERPRETED
    check("cpu", torch.float32, relu, skip, channels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("relu", "skip", "channels"), CASES)
def test_the_kernel_on_a_gpu(relu: bool, skip: str, channels: int, dtype: torch.dtype) -> None:
    y = torch.empty(2, channels, 9, 7, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    assert is_fused(y, None)
    check("cuda", dtype, relu, skip, channels)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_shift_of_more_precision_than_the_image_is_not_rounded_first(device: str) -> None:
    """A norm's shift folded into a convolution of bfloat16: rounded alone it would be lost beside what it adds to."""
    y = torch.full((1, 2, 4, 4), -1.0, device=device, dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    if not is_fused(y, None):
        pytest.skip("torch's own operations round it")
    shift = torch.tensor([1.001, 1.0], device=device)
    made = finish(y.clone(memory_format=torch.preserve_format), shift, None, True)
    assert made[0, 0].min() > 0 and made[0, 1].max() == 0
