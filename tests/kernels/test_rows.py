"""The kernels of layer norms and scaled sums against double precision, on Triton's interpreter.

`make kernels` runs them on a CPU (the interpreter of Triton 3.6 needs numpy < 2.4, that of 3.7 does not).
On a GPU they are tested in test_fused_rows_gpu.py.
"""

import os

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (make kernels)"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the interpreter
]
pytest.importorskip("triton")
UNITS = {torch.bfloat16: 2**-7, torch.float32: 1e-6, torch.float64: 1e-14}  # the interpreter cuts bfloat16 off


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each has several tiles."""
    from outcore.kernels import layer_norm, layer_scale

    for module in (layer_norm, layer_scale):
        monkeypatch.setattr(module, "programs", lambda tiles: min(tiles, 2))


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    off = (found.double().view(wanted.shape) - wanted).abs()
    assert bool((off <= UNITS[found.dtype] * (wanted.abs() + wanted.abs().max())).all()), off.max().item()


@pytest.mark.parametrize(("rows", "width"), [(35, 96), (100, 5), (300, 20), (3, 5000)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("affine", [0, 1, 2])
def test_layer_norm(rows: int, width: int, kind: torch.dtype, affine: int) -> None:
    from outcore.kernels.layer_norm import gradients, normalised

    torch.manual_seed(0)
    wide = torch.promote_types(kind, torch.float32)
    x, g = ((3 * torch.randn(rows, width) + 2).to(kind) for _ in range(2))
    affines = [torch.randn(width, dtype=wide) if affine > i else None for i in range(2)]
    exact = [None if t is None else t.double().requires_grad_() for t in (x, *affines)]
    wanted = F.layer_norm(exact[0], (width,), exact[1], exact[2], 1e-6)  # type: ignore[arg-type]
    wanted.backward(g.double())
    for out in (kind, wide):
        near(normalised(x, *affines, width, 1e-6, out), wanted.detach())
    back, sums = gradients(g, x, affines[0], width, 1e-6, sums=affine > 0)
    assert exact[0] is not None and exact[0].grad is not None and back.dtype is kind
    near(back, exact[0].grad)
    for i, t in enumerate(exact[1:]):
        if t is not None and t.grad is not None:
            assert sums is not None
            near(sums[i], t.grad)


@pytest.mark.parametrize(("images", "pixels", "width"), [(2, 35, 96), (3, 1, 5), (4, 75, 20), (1, 3, 1300)])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("noise", ["none", "one", "each"])
@pytest.mark.parametrize("copied", [False, True])
def test_scaled_sum(images: int, pixels: int, width: int, kind: torch.dtype, noise: str, copied: bool) -> None:
    from outcore.kernels.layer_scale import gradients, summed

    torch.manual_seed(0)
    wide = torch.promote_types(kind, torch.float32)
    shape = (images, pixels, width)
    x, residual, g = (torch.randn(shape).to(t) for t in (kind, wide, wide))
    scale = torch.randn(width, dtype=wide)
    by = None if noise == "none" else torch.rand(images if noise == "each" else 1, dtype=wide)
    factor = scale.double() if by is None else scale.double() * by.double().view(-1, 1, 1)
    out, copy = torch.empty_like(residual), torch.empty_like(x) if copied else None
    summed(x, scale, by, residual, out, copy)
    for written in (out, copy) if copy is not None else (out,):
        near(written, residual.double() + x.double() * factor)
    more = torch.randn(shape).to(kind) if copied else None
    back, total, both = gradients(g, more, x, scale, by, sums=True)
    wide_g = g.double() if more is None else g.double() + more.double()
    assert back.dtype is kind and total is not None and (both is None) is not copied
    if both is not None:
        near(both, wide_g)
    near(back, wide_g * factor)
    near(total, (wide_g * x.double() * (1 if by is None else by.double().view(-1, 1, 1))).sum((0, 1)))
