"""Max pools that keep a byte per output, as torch's own, on a GPU or on Triton's interpreter (`make kernels`)."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outcore
from outcore.kernels.pool_window import PoolWindow
from outcore.memory.encode.byte_index_pool import _Pool
from outcore.memory.encode.pool_positions import window_of
from outcore.program.policies import Encode

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = [pytest.mark.kernel] if INTERPRETED else [pytest.mark.gpu, NO_GPU]


@pytest.fixture(autouse=True)
def same_sums() -> Iterator[None]:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def test_gradients_of_gradients_and_layouts() -> None:
    x = torch.randn(2, 3, 9, 11, device=DEVICE, dtype=torch.float64, requires_grad=True)
    window = PoolWindow((3, 3), (2, 2), (1, 1), (1, 1), (9, 11))
    found = []
    for way in (lambda t: F.max_pool2d(t, 3, 2, 1), _Pool(lambda t: F.max_pool2d(t, 3, 2, 1), window)):
        out = way(x)
        odd = torch.randn(3, 2, 6, 5, device=DEVICE, dtype=torch.float64, generator=_same()).permute(1, 0, 3, 2)
        (first,) = torch.autograd.grad((out * out).sum() + (out * odd).sum(), x, create_graph=True)
        found.append([out.detach(), first.detach(), *torch.autograd.grad(first.square().sum(), x)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding"),
    [
        ((2, 70, 2, 2), 2, 2, 0),  # one pixel comes out, which lies in memory as any does
        ((2, 3, 3, 1), (3, 1), 1, 0),
        ((2, 5, 1, 1), 2, 1, 1),  # one pixel goes in
        ((2, 5, 1, 1), 1, 1, 0),
        ((2, 1, 4, 6), 2, 2, 0),  # one channel
        ((1, 5, 4, 6), (1, 6), 1, 0),
    ],
)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_single_pixels_and_channels(
    shape: tuple[int, ...], kernel: int | tuple[int, int], stride: int, padding: int, form: torch.memory_format
) -> None:
    images = torch.randn(shape, device=DEVICE).contiguous(memory_format=form)
    images = images.as_strided(shape, torch.empty(shape, memory_format=form).stride())  # also where it is both
    window = window_of({"kernel_size": kernel, "stride": stride, "padding": padding}, shape[2:])
    assert window is not None

    def run(t: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(t, kernel, stride, padding)

    found = []
    for way in (run, _Pool(run, window)):
        x = images.detach().requires_grad_()
        out = way(x)
        out.backward(torch.randn(out.shape, device=DEVICE, generator=_same()))
        assert x.grad is not None
        found.append([out.detach(), x.grad])
    for want, got in zip(*found, strict=True):
        assert torch.equal(want, got) and want.stride() == got.stride()


def _same() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(3)


class Net(nn.Module):
    """Pools called in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(c, 6, 3, padding=1) for c in (3, 6, 6)])
        self.pool, self.heard = nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, pool in zip(
            self.convs, (self.pool, self.heard, lambda t: F.max_pool2d(t, (2, 3), stride=1)), strict=True
        ):
            x = pool(conv(x).tanh())
        return x.mean((2, 3))


@pytest.mark.parametrize("last", [False, True])
def test_a_model_s_pools_keep_bytes_however_they_are_called(last: bool) -> None:
    model = Net().to(DEVICE)
    model.heard.register_forward_hook(lambda *_: None)
    batch = torch.randn(2, 3, 30, 26, device=DEVICE)
    if last:
        model, batch = model.to(memory_format=torch.channels_last), batch.contiguous(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    keeping = outcore.memory_plan(
        outcore.within(copy.deepcopy(model), (batch,), memory=None, plan={}, quiet=True, measure_s=0.1)
    ).keeping
    plan = {b.name: Encode("window") for b in keeping.buffers.values() if Encode("window") in keeping.choices(b)}
    assert len(plan) == 3
    outcore.within(model, (batch,), memory=None, plan=plan, quiet=True, measure_s=0.1)
    for _ in range(2):
        want = torch.autograd.grad(twin(batch).square().sum(), tuple(twin.parameters()))
        loss = model(batch).square().sum()
        got = torch.autograd.grad(loss, tuple(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, tuple(model.parameters()))
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, got, again, strict=True))
