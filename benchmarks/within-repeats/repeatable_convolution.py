"""Whether a convolution's gradients are the same bits every time, in plain PyTorch.

    python benchmarks/within-repeats/repeatable_convolution.py [--device cuda]

Each convolution runs its backward six times on the same numbers. Before each, memory of the sizes that it will ask for
is filled with NaN and given back, so that a kernel that reads what it never wrote is seen.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

SHAPES = [(16, 32, 2, 3), (32, 32, 2, 3), (16, 32, 4, 3), (8, 16, 4, 3), (4, 8, 8, 3), (1, 24, 96, 3), (24, 24, 96, 3)]
"""Channels, outputs, side, kernel."""


def repeats(channels: int, outputs: int, side: int, kernel: int, bf16: bool, device: str) -> dict[str, int]:
    """Of six gradients of the weight and the bias, how many are like the first; one with NaN is like none."""
    torch.manual_seed(0)
    layer = nn.Conv3d(channels, outputs, kernel, padding=kernel // 2).to(device)
    x = torch.randn(1, channels, side, side, side, device=device, requires_grad=True)
    g = torch.randn(1, outputs, side, side, side, device=device)
    found: dict[str, list[torch.Tensor]] = {"weight": [], "bias": []}
    for _ in range(6):
        layer.zero_grad()
        sizes = (g.numel(), x.numel(), layer.weight.numel(), 64, 1024, 16384)
        filled = [torch.full((n,), float("nan"), device=device) for n in sizes for _ in range(3)]
        del filled
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            y = layer(x)
        y.backward(g.to(y.dtype))
        found["weight"].append(layer.weight.grad.detach().clone())
        found["bias"].append(layer.bias.grad.detach().clone())
    return {name: sum(torch.equal(one, all_[0]) for one in all_) for name, all_ in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--largest", type=int, default=32, help="sides above this are left out")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    for shape in SHAPES:
        if shape[2] <= given.largest:
            for bf16 in (False, True):
                found = repeats(*shape, bf16, given.device)
                print(
                    shape, "bf16" if bf16 else "float32", {name: f"{n} of 6" for name, n in found.items()}, flush=True
                )


if __name__ == "__main__":
    main()
