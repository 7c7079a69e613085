"""A folder with a job, its weights and a slide, for tests of `outcore infer`."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from outcore.data import Scene, write_slide
from outcore.job import Job
from tests.cli.command import Shown, outcore_command

JOB = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, pooled=False, outputs="tensor"):
        super().__init__()
        self.local = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 3, 1))
        self.pooled, self.outputs = pooled, outputs

    def forward(self, x):
        x = self.local(x)
        x = x.mean((2, 3)) if self.pooled else x
        return {"tensor": x, "dict": {"out": x, "aux": 2 * x}, "tuple": (x, 2 * x)}[self.outputs]


def model(pooled=False, outputs="tensor"):
    torch.manual_seed(3)
    return Net(pooled, outputs)


def batch(size):
    return torch.randn(size, 3, 64, 64), None
"""


def write_work(folder: Path, *, size: tuple[int, int] = (300, 410), slides: int = 1) -> Path:
    """A job, weights that tell the kinds of tissue apart, and slides."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.py").write_text(JOB)
    for number in range(slides):
        name = "slide.tif" if slides == 1 else f"slide{number}.tif"
        write_slide(folder / name, Scene(size=size, share=0.4, tile=64, seed=number))
    net = Job.load(str(folder / "job.py")).build()
    first, last = net.local[0], net.local[2]
    for tensor in (first.weight, first.bias, last.weight, last.bias):
        tensor.data.zero_()
    first.weight.data[0] = 1 / 27  # brightness, over nine pixels
    first.weight.data[1, 2] = 1 / 9  # blue
    last.weight.data[:, :2, 0, 0] = torch.tensor([[20.0, 0.0], [0.0, 0.0], [-20.0, 20.0]])
    last.bias.data[0] = -18.0  # glass is bright
    save_file(net.state_dict(), folder / "w.safetensors")
    return folder


def infer(folder: Path, *words: str, job: str = "job.py", weights: tuple[str, ...] = ("-w", "w.safetensors")) -> Shown:
    return outcore_command("infer", job, *weights, *words, "--device", "cpu", folder=folder)
