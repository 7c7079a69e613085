"""A convolution's bias with its ReLU as one kernel, on a GPU."""

import copy
import itertools

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.op_fusion import select
from outcore.memory.saved_tensors.managed_forward import ManagedForward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = [(2, 5, 7, 9), (1, 64, 333, 200), (3, 130, 4, 4), (1, 3, 700, 500), (2, 4, 3, 5, 6), (32, 512, 14, 14)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("last", [False, True])
def test_kernels(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    from outcore.kernels.bias_relu import biased, gradients

    torch.manual_seed(0)
    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    form = form if last else torch.contiguous_format
    x, g = (torch.randn(shape, dtype=dtype, device="cuda").contiguous(memory_format=form) for _ in range(2))
    bias = torch.randn(shape[1], dtype=torch.float64 if dtype is torch.float64 else torch.float32, device="cuda")
    wanted = x.add(bias.to(dtype).view(-1, *(1,) * (len(shape) - 2))).relu_()
    biased(x, bias)
    assert torch.equal(x, wanted)
    back, of_bias = gradients(g, x, bias.dtype)
    through = torch.ops.aten.threshold_backward(g, x, 0)
    assert torch.equal(back, through) and back.stride() == x.stride()
    total = through.double().sum([0, *range(2, len(shape))])
    scale = through.double().abs().sum([0, *range(2, len(shape))]).max()
    assert (of_bias.double() - total).abs().max() <= (1e-14 if dtype is torch.float64 else 1e-6) * scale


def network() -> nn.Module:
    widths = (3, 16, 32, 32)
    pairs = [
        (nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)) for a, b in itertools.pairwise(widths)
    ]
    layers = [layer for pair in pairs for layer in pair]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 5))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
def test_trains_as_plain_does(graphs: bool, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "worth_it", lambda *_, **__: True)
    torch.manual_seed(0)
    model, images = network().cuda().double(), torch.randn(2, 3, 256, 256, device="cuda", dtype=torch.float64)
    plain = copy.deepcopy(model)
    plan = {"0#0:out": policy, "3#0:out": policy} if policy != "keep" else None
    options = {"memory": None, "optimizer": 0.0, "quiet": True, "measure_s": 0.5, "exact": "reassociated"}
    outcore.within(model, (images,), plan=plan, graphs=graphs, **options)
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward)
    assert any(e is not None and {"0#0", "1#0"} <= set(e.compiled.instead) for e in managed_forward.admitted.values())
    for _ in range(3):
        for m in (model, plain):
            m.zero_grad(set_to_none=False)
            m(images).square().mean().backward()
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= 1e-10 * largest
