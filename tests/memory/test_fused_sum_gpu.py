"""A sum with its ReLU as one kernel, on a GPU: torch's numbers bit for bit."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("shape", [(3,), (2, 5, 7, 9), (1, 64, 333, 200), (8, 256, 56, 56)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
def test_kernel(shape: tuple[int, ...], dtype: torch.dtype, inplace: bool) -> None:
    from outcore.memory.sum_triton_kernels import rectified_sum

    torch.manual_seed(0)
    x, y = (torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2))
    x.view(-1)[0], y.view(-1)[1] = float("nan"), float("inf")
    wanted = (x + y).relu_()
    out = x if inplace else torch.empty_like(x)
    rectified_sum(x, y, out)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())
