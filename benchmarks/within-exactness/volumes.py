"""torch's weight gradient of a bf16 convolution of a small volume on a CPU: the same numbers, twenty calls."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
torch.manual_seed(0)
x, gradient = torch.randn(2, 64, 2, 2, 2).bfloat16(), torch.randn(2, 64, 2, 2, 2).bfloat16()
weight = torch.randn(64, 64, 3, 3, 3).bfloat16().to(memory_format=torch.channels_last_3d)


def weight_gradient(g: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Of a 3x3x3 convolution with padding."""
    settings = [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1, [True, True, False]
    return torch.ops.aten.convolution_backward(g, i, w, None, *settings)[1]


true = weight_gradient(gradient.double(), x.double(), weight.double())
found, held = [], []
for _ in range(20):
    found.append(weight_gradient(gradient.clone(), x.clone(), weight))
    held.append(torch.randn(100_000))  # so that memory is not the same again
distinct = len({each.float().numpy().tobytes() for each in found})
worst = max(float((each.double() - true).abs().max()) for each in found)
most = float(true.abs().max())
print(f"torch {torch.__version__}: {distinct} different results of 20, off by up to {worst:g} of {most:g}")
