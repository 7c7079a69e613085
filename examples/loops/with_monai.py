"""A MONAI workflow: its UNet and its SupervisedTrainer, within a budget. Needs monai and pytorch-ignite."""

import torch

import outcore

try:
    import monai
    from ignite.engine import Events
    from monai.data import DataLoader, Dataset
    from monai.engines import SupervisedTrainer
    from monai.losses import DiceLoss
except ImportError as error:
    raise SystemExit(f"this example needs MONAI and Ignite ({error}); type: pip install monai pytorch-ignite") from None

torch.manual_seed(0)
net = monai.networks.nets.UNet(
    spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), norm="instance"
)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
items = [{"image": torch.rand(1, 32, 32, 32), "label": torch.randint(2, (1, 32, 32, 32))} for _ in range(4)]

outcore.within(net, [(2, 1, 32, 32, 32)], memory="3800KiB", optimizer=optimizer)  # the only new line

trainer = SupervisedTrainer(
    device=torch.device("cpu"),
    max_epochs=2,
    train_data_loader=DataLoader(Dataset(items), batch_size=2),
    network=net,
    optimizer=optimizer,
    loss_function=DiceLoss(to_onehot_y=True, softmax=True),
)
trainer.add_event_handler(
    Events.ITERATION_COMPLETED, lambda engine: print(f"loss {engine.state.output[0]['loss']:.4f}")
)
trainer.run()
