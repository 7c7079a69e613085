"""The kernels of batch norms, of biases and of sums with ReLU against torch's own, on Triton's interpreter.

`make kernels` runs them on a CPU. On a GPU they are tested in test_gpu.py, test_fused_bias_gpu.py and
test_fused_sum_gpu.py.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

from tests.foreign.sample import one_in

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 (make kernels)"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the interpreter
]
pytest.importorskip("triton")
UNITS = {torch.float32: 2e-6, torch.float64: 1e-13}
SHAPES = [(2, 5, 7, 9), (1, 70, 1, 3), (3, 2, 40, 37)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> torch.Tensor:
    form = torch.channels_last if last else torch.contiguous_format
    return (torch.randn(shape, dtype=dtype) + 0.3).contiguous(memory_format=form)


def near(found: torch.Tensor, wanted: torch.Tensor, scale: float = 1.0) -> None:
    unit = UNITS[found.dtype] * scale
    assert found.shape == wanted.shape
    assert bool(((found - wanted).abs() <= unit * (1 + wanted.abs().max())).all()), (found - wanted).abs().max().item()


@pytest.mark.parametrize(
    ("shape", "last", "dtype", "relu", "momentum"),
    one_in(
        2,
        [
            (shape, last, dtype, relu, momentum)
            for shape in SHAPES
            for last in (False, True)
            if last or shape[1] < 10
            for dtype in UNITS
            for relu, momentum in ((False, 0.1), (True, None))
        ],
    ),
)
def test_a_batch_norm_with_its_relu(
    shape: tuple[int, ...], last: bool, dtype: torch.dtype, relu: bool, momentum: float | None
) -> None:
    """Output, the gradients of input, weight and bias, and the statistics over two batches."""
    from outcore.kernels.batch_norm_relu import normalise, statistics
    from outcore.kernels.batch_norm_relu_backward import gradients

    theirs = nn.BatchNorm2d(shape[1], momentum=momentum, dtype=dtype)
    nn.init.uniform_(theirs.weight, -1, 1), nn.init.uniform_(theirs.bias, -1, 1)
    ours = copy.deepcopy(theirs)
    for _ in range(2):
        x, g = drawn(shape, dtype, last), drawn(shape, dtype, last)
        given = x.detach().requires_grad_()
        out = theirs(given).relu() if relu else theirs(given)
        wanted = torch.autograd.grad(out, [given, theirs.weight, theirs.bias], g)
        found = statistics(x, ours)
        for order in range(4) if shape == SHAPES[0] else [3]:
            near(normalise(x, *found.view(4, -1).unbind(0), order, relu), out.detach())
        for mine, other in zip(gradients(g, x, found, dtype, 0, relu), wanted, strict=True):
            near(mine, other, 30)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        near(mine, other) if mine.is_floating_point() else torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 4, 3, 5, 6)])
@pytest.mark.parametrize("dtype", [*UNITS, torch.float16])
@pytest.mark.parametrize("last", [False, True])
def test_a_bias_with_its_relu(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    from outcore.kernels.bias_relu import biased, gradients

    form = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x, g = (
        torch.randn(shape, dtype=dtype).contiguous(memory_format=form if last else torch.contiguous_format)
        for _ in range(2)
    )
    bias = torch.randn(shape[1], dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    wanted = x.add(bias.to(dtype).view(-1, *(1,) * (len(shape) - 2))).relu_()
    biased(x, bias)
    assert torch.equal(x, wanted)
    back, of_bias = gradients(g, x, bias.dtype)
    through = torch.ops.aten.threshold_backward(g, x, 0)
    assert torch.equal(back, through) and back.stride() == x.stride()
    near(of_bias, through.sum([0, *range(2, len(shape))], dtype=bias.dtype), 30)


@pytest.mark.parametrize("shape", [(3,), (2, 5, 7, 9), (4097,)])
@pytest.mark.parametrize("dtype", [*UNITS, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_sum_with_its_relu(shape: tuple[int, ...], dtype: torch.dtype, inplace: bool) -> None:
    from outcore.kernels.bias_relu import rectified_sum

    x, y = (torch.randn(shape, dtype=dtype) for _ in range(2))
    x.view(-1)[0], y.view(-1)[1] = float("nan"), float("inf")
    wanted = (x + y).relu_()
    out = x if inplace else torch.empty_like(x)
    rectified_sum(x, y, out)
    assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(out.nan_to_num(), wanted.nan_to_num())
