"""A sum with its ReLU as one kernel, on a GPU: torch's numbers bit for bit."""

import copy

import pytest
import torch

import outcore
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from tests.memory.op_fusion.test_add_relu import made

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("shape", [(3,), (2, 5, 7, 9), (1, 64, 333, 200), (8, 256, 56, 56)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
def test_kernel(shape: tuple[int, ...], dtype: torch.dtype, inplace: bool) -> None:
    from outcore.kernels.bias_relu import rectified_sum

    torch.manual_seed(0)
    x, y = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
    x.view(-1)[0], y.view(-1)[1] = float("nan"), float("inf")
    wanted = (x + y).relu_()
    out = x if inplace else torch.empty_like(x)
    rectified_sum(x, y, out)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
def test_trains_as_plain_does(graphs: bool, policy: str) -> None:
    model, images = made()
    model, images = model.cuda(), images.cuda()
    plain = copy.deepcopy(model)
    plan = {"1.norm#0:out": policy} if policy != "keep" else None
    options = {"memory": None, "optimizer": 0.0, "quiet": True, "measure_s": 0.5, "exact": "reassociated"}
    outcore.within(model, (images,), plan=plan, graphs=graphs, **options)
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward)
    assert any(e is not None and "1.add_()#0" in e.compiled.instead for e in managed_forward.admitted.values())
    for _ in range(3):
        for m in (model, plain):
            m.zero_grad(set_to_none=False)
            m(images).square().mean().backward()
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() <= 1e-10 * largest
