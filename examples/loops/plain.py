"""A plain PyTorch loop, within a budget: one line more."""

import torch
from torch.nn import functional as F

import outcore
from outcore.models import UNet

net = UNet(3, 2, width=8, depth=3)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
images, masks = torch.rand(2, 3, 256, 256), torch.randint(2, (2, 256, 256))

outcore.within(net, (images,), memory="48MiB", optimizer=optimizer)  # the only new line

for step in range(4):
    optimizer.zero_grad()
    loss = F.cross_entropy(net(images), masks)
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.4f}")
