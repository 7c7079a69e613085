"""A plain PyTorch loop over a slide that is never in memory: the model is streamed, the image is a lazy batch."""

import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import outcore
from outcore.data import Batch, Scene, open_slide, write_slide
from outcore.models import SlideNet
from outcore.stream import plan_tiles

folder = Path(tempfile.mkdtemp())
scene = Scene((2048, 2048), kinds=(0, 1))
images = Batch((open_slide(write_slide(folder / "slide.tif", scene)),))

net = SlideNet()
plan = plan_tiles(outcore.capture(net, [images.shape]), memory="24MiB")
print(plan)
streamed = plan.apply(net, workers=2)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(3):
    optimizer.zero_grad()
    loss = F.cross_entropy(streamed(images), torch.tensor([scene.label]))
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.4f}")
