"""What is not a number stays so through every ReLU of a kernel, as in torch: `on_nan` looks for it in the loss.

On a GPU `tl.maximum(nan, 0.0)` is 0.0. Triton's interpreter takes numpy's maximum, which keeps it: there the values of
the kernels are checked, and the text of all kernels for a maximum with a number; the rest needs a GPU.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore.kernels
from tests.kernels.interpreter import INTERPRETED

DEVICES = [
    # numpy warns of sums that are no numbers
    pytest.param("cpu", marks=[*INTERPRETED, pytest.mark.filterwarnings("ignore::RuntimeWarning")]),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES)


def with_nan(shape: tuple[int, ...], device: str, last: bool = False) -> torch.Tensor:
    """Numbers of both signs, a few of them none, and both infinities."""
    x = torch.randn(shape, dtype=torch.float32)
    flat = x.view(-1)
    flat[::7], flat[3], flat[5] = math.nan, math.inf, -math.inf
    return x.to(device).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@on_devices
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_bias_skip_and_relu(device: str, last: bool, skip: bool, relu: bool) -> None:
    if skip and not last:
        pytest.skip("a skip is added to images of which the channels lie side by side")
    from outcore.kernels.bias_relu import biased, gradients

    x, gradient = with_nan((2, 5, 6, 9), device, last), torch.randn(2, 5, 6, 9, device=device)
    gradient = gradient.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    bias = torch.randn(5, device=device)
    larger = torch.randn(2, 5, 8, 12, device=device).contiguous(memory_format=torch.channels_last)
    added = larger[:, :, 1:7, 2:11] if skip else None
    wanted = x + bias.view(-1, 1, 1)
    wanted = wanted + added if added is not None else wanted
    wanted = wanted.relu() if relu else wanted
    biased(x, bias, added, relu=relu)
    torch.testing.assert_close(x, wanted, rtol=0, atol=0, equal_nan=True)
    assert x.isnan().any()
    back, of_bias = gradients(gradient, x, torch.float32, relu=relu)
    through = torch.ops.aten.threshold_backward(gradient, x, 0) if relu else gradient
    torch.testing.assert_close(back, through, rtol=0, atol=0)
    torch.testing.assert_close(of_bias, through.sum((0, 2, 3)), rtol=1e-5, atol=1e-5)


@on_devices
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_batch_norm_and_relu(device: str, last: bool, bad: float) -> None:
    from outcore.kernels.batch_norm_relu import normalise, statistics

    x = torch.randn(2, 3, 6, 5)
    x[0, 1, 2, 3] = bad
    x = x.to(device).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    ours, plain = nn.BatchNorm2d(3).to(device), nn.BatchNorm2d(3).to(device)
    mean, invstd, weight, bias = statistics(x, ours).view(4, -1)
    y, wanted = normalise(x, mean, invstd, weight, bias, 0, True), plain(x).relu()
    assert y[:, 1].isnan().all() and wanted[:, 1].isnan().all()
    torch.testing.assert_close(y, wanted.detach(), equal_nan=True)
    assert ours.running_var is not None and ours.running_var[1].isnan()


@pytest.mark.filterwarnings("ignore:the parallel forward pass ran sequentially")
@on_devices
def test_a_recurrent_network_of_relu(device: str) -> None:
    from outcore.scan import RNN, Newton, Options

    torch.manual_seed(0)
    plain = nn.RNN(4, 5, nonlinearity="relu").to(device)
    options = Options(backward="scan", chunk=20, forward=Newton(tolerance=1e-6))
    ours = RNN(4, 5, nonlinearity="relu", options=options).to(device)
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(60, 3, 4, device=device)
    x[4, 1, 2] = math.nan
    found, wanted = ours(x), plain(x)
    torch.testing.assert_close(found[0].isnan(), wanted[0].isnan())
    assert found[1][0, 1].isnan().all()  # to the last state, chunks after it


def test_no_kernel_takes_a_maximum_that_drops_it() -> None:
    """Of numbers that may be none: with a literal, unless told to propagate it."""
    found = []
    for path in sorted(Path(outcore.kernels.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.maximum", "tl.minimum", "tl.clamp"):
                literal = any(isinstance(a, ast.Constant) and isinstance(a.value, float) for a in node.args)
                if literal and not any(k.arg == "propagate_nan" for k in node.keywords):
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found
