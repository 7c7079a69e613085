"""Convolutions of more than 2^31 numbers on a GPU: bands give what each part of the image gives alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.memory.op_fusion.banded_conv import _Banded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stride", [1, 2])
def test_rows_and_gradients_of_an_image_that_cannot_be_counted(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    module = nn.Conv2d(64, 256 // stride, 1, stride, bias=False).cuda()
    side = 2960 * stride
    x = torch.randn(1, 64, side, side, device="cuda").requires_grad_()
    out = _Banded(module)(x)
    assert max(out.numel(), x.numel()) > 2**31
    weight = torch.zeros_like(module.weight, dtype=torch.float64)
    with torch.no_grad():
        for rows in x.split(592, 2):
            part = F.conv2d(rows, module.weight, None, stride)
            start = rows.storage_offset() // side // stride
            assert torch.allclose(out[:, :, start : start + part.shape[2]], part, rtol=1e-3, atol=1e-4)
            weight += rows[:, :, ::stride, ::stride].double().sum((0, 2, 3))[None, :, None, None] * 1e-6
    (back, found) = torch.autograd.grad(out, [x, module.weight], torch.full_like(out, 1e-6))
    assert torch.allclose(found.double(), weight, rtol=1e-2, atol=1e-2 * float(weight.abs().max()))
    expected = module.weight.sum(0).view(-1) * 1e-6
    assert torch.allclose(back[0, :, 0, 0], expected, rtol=1e-3, atol=1e-9)
    assert torch.allclose(back[0, :, -stride, -stride], expected, rtol=1e-3, atol=1e-9)
    assert stride == 1 or not back[0, :, -1].any()


def test_a_plan_takes_bands_where_numbers_cannot_be_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).cuda()
    images = torch.randn(1, 3, 5824, 5824, device="cuda")
    costs = by_bytes(account(outcore.capture(model, (images,))), 1e12)
    options: dict[str, Any] = {"optimizer": 0.0, "costs": costs, "plan": {"0#0:out": "keep"}, "exact": "reassociated"}
    outcore.within(model, (images,), memory=None, quiet=True, **options)
    (entry,) = model.__dict__["forward"].admitted.values()
    assert isinstance(entry.compiled.instead["0#0"].target, _Banded)
    model(images).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
