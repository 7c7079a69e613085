"""A Lightning module: its network is put within the budget before the Trainer sees it."""

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import outcore
from outcore.models import UNet

try:
    import lightning
except ImportError:
    raise SystemExit("this example needs Lightning; type: pip install lightning") from None


class Segmenter(lightning.LightningModule):
    """A U-Net and its loss."""

    def __init__(self):
        super().__init__()
        self.net = UNet(3, 2, width=8, depth=3)

    def training_step(self, batch, index):
        images, masks = batch
        loss = F.cross_entropy(self.net(images), masks)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


data = DataLoader(TensorDataset(torch.rand(8, 3, 128, 128), torch.randint(2, (8, 128, 128))), batch_size=2)
module = Segmenter()
outcore.within(module.net, [(2, 3, 128, 128)], memory="14MiB")  # the only new line
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(module, data)
print(f"loss {trainer.callback_metrics['loss']:.4f}")
