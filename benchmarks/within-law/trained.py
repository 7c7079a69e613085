"""The models of the table, each with its batch, its loss and its optimizer, as somebody would train it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "within-frontier"))
from networks import build, torchvision

import outcore

IMAGES = ("resnet50", "vgg19", "inception_v3", "densenet121", "unet", "convnext_tiny")
VISION = ("vit_b_16", "swin_t")
TEXT = ("bert", "distilbert", "gpt2", "lstm", "t5")


@dataclass(frozen=True)
class Case:
    """A model at a size, in a precision: "resnet50:1x2048:tf32"."""

    model: str
    batch: int
    side: int
    """Pixels, or words."""
    precision: str

    @staticmethod
    def parse(text: str) -> Case:
        """From the form it is written in."""
        model, size, precision = text.split(":")
        batch, side = map(int, size.split("x"))
        return Case(model, batch, side, precision)

    def __str__(self) -> str:
        return f"{self.model}:{self.batch}x{self.side}:{self.precision}"


class Recurrent(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, words: int = 8000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next word."""
        return self.head(self.lstm(self.embedding(tokens))[0])


class Text(nn.Module):
    """A Hugging Face model that returns one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Its first output."""
        return self.inner(input_ids=tokens)[0]


class Trained:
    """A case on a device, and one step of it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.case, self.device, self.bf16 = case, device, case.precision == "bf16"
        self.model = model_of(case.model).train().to(device)
        self.batch = batch_of(case).to(device)
        if self.bf16 and self.batch.is_floating_point():
            form = torch.channels_last if self.batch.dim() == 4 else torch.channels_last_3d
            self.model, self.batch = self.model.to(memory_format=form), self.batch.to(memory_format=form)
        self.optimizer = optimizer_of(case.model)(self.model.parameters())

    def autocast(self) -> torch.autocast:
        """The precision."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        for part in self.parts():
            part()

    def parts(self) -> tuple[Callable[[], None], ...]:
        """Forward, backward, the optimizer's step."""
        return self.forward, self.backward, self.optimizer.step

    def forward(self) -> None:
        """Up to the loss."""
        with self.autocast():
            output = self.model(self.batch)
        self.loss = loss_of(output)

    def backward(self) -> None:
        """The gradients."""
        self.loss.backward()
        del self.loss


def model_of(name: str) -> nn.Module:
    """A model with random weights."""
    if name in IMAGES:
        return build(name)
    if name in VISION:
        return getattr(torchvision().models, name)()
    if name == "unet3d":
        return outcore.models.UNet(1, 2, width=32, depth=3, dims=3)
    if name == "lstm":
        return Recurrent()
    import transformers

    if name == "distilbert":
        return Text(transformers.DistilBertModel(transformers.DistilBertConfig()))
    if name == "t5":
        return Text(transformers.T5EncoderModel(transformers.T5Config()))
    if name == "bert":
        return Text(transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False))
    return Text(transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)))


def batch_of(case: Case) -> torch.Tensor:
    """A random batch."""
    if case.model in TEXT:
        return torch.randint(0, 8000, (case.batch, case.side))
    if case.model == "unet3d":
        return torch.randn(case.batch, 1, case.side, case.side, case.side)
    return torch.randn(case.batch, 3, case.side, case.side)


def optimizer_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    """AdamW for what is trained with it, SGD with momentum for the others."""
    if name in (*TEXT, *VISION, "convnext_tiny"):
        return lambda parameters: torch.optim.AdamW(parameters, lr=1e-6)
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-6, momentum=0.9)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A number that depends on every output."""
    return output.float().square().mean()
