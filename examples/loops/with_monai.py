"""A MONAI workflow: its UNet and its trainer, within a budget."""

import monai
import torch
from monai.data import DataLoader, Dataset
from monai.losses import DiceLoss

import outcore

net = monai.networks.nets.UNet(
    spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), norm="instance"
)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
items = [{"image": torch.rand(1, 32, 32, 32), "label": torch.randint(2, (1, 32, 32, 32))} for _ in range(4)]
loader = DataLoader(Dataset(items), batch_size=2)
criterion = DiceLoss(to_onehot_y=True, softmax=True)

outcore.within(net, [(2, 1, 32, 32, 32)], memory="3800KiB", optimizer=optimizer)  # the only new line

for batch in loader:
    optimizer.zero_grad()
    loss = criterion(net(batch["image"]), batch["label"])
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
