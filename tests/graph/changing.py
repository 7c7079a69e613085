"""A small network whose Python changes between steps, and the changes, for all that replay recordings."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

FACTOR = 1.0


def variable() -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, float]]:
    """A function that reads a dictionary around it, and that dictionary."""
    around = {"slope": 1.0}
    return lambda x: x * around["slope"], around


class Changing(nn.Module):
    """Convolutions and a layer at the end, with numbers from attributes, a global name and a closure between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(4, 2)
        self.register_buffer("gain", torch.ones(4, 1, 1))
        self.alpha, self.activation, self.config = 1.0, F.relu, {"slope": [1.0]}
        self.does, self.step = "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.does == "counts":
            self.step += 1
            x = x * self.step
        if self.does == "draws":
            x = x * random.random()
        x = F.relu(self.first(x)) * self.alpha * FACTOR * self.gain
        x = SLOPED(self.activation(self.second(x))) * self.config["slope"][0]
        if self.does == "writes":
            self.aux = x.mean()
        return self.head(self.drop(x.mean((2, 3))))


SLOPED, AROUND = variable()


def reset() -> None:
    """Global names as they were."""
    globals()["FACTOR"] = 1.0
    AROUND["slope"] = 1.0


def set_global(_: Changing) -> None:
    globals()["FACTOR"] = 2.0


def set_attribute(name: str, value: object) -> Callable[[Changing], None]:
    """A change of one attribute."""
    return lambda net: setattr(net, name, copy.copy(value))


CHANGES: dict[str, Callable[[Changing], object]] = {
    "attribute": set_attribute("alpha", 2.0),
    "inside an attribute": lambda net: net.config["slope"].__setitem__(0, 3.0),
    "function": set_attribute("activation", torch.tanh),
    "global": set_global,
    "closure": lambda _: AROUND.update(slope=0.5),
    "dropout": lambda net: setattr(net.drop, "p", 1.0),
    "buffer": set_attribute("gain", torch.full((4, 1, 1), 2.0, dtype=torch.float64)),
    "hook": lambda net: net.second.register_forward_hook(lambda module, args, output: output * 2),
    "hook of the model": lambda net: net.register_forward_hook(lambda module, args, output: output * 2),
    "counts": set_attribute("does", "counts"),
    "draws": set_attribute("does", "draws"),
    "writes": set_attribute("does", "writes"),
}
"""What is done to a network after its second step."""


def changing(seed: int = 0) -> Changing:
    """A network with weights of its own."""
    torch.manual_seed(seed)
    return Changing().double()


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step."""
    generator = torch.Generator().manual_seed(n)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=generator)
    return images, torch.randn(2, 2, dtype=torch.float64, generator=generator)


def train_both(
    step: Callable[[torch.Tensor, torch.Tensor], Sequence[float]],
    nets: Sequence[Changing],
    change: Callable[[Changing], object],
    *,
    steps: int = 6,
    every: bool = False,
) -> None:
    """Train networks by `step` and copies of them plainly; both change, and every loss is the same.

    Args:
        step: trains on a batch; returns a loss for each network.
        nets: that are trained by it.
        change: what is done to each before the third step.
        steps: in all.
        every: whether an attribute is another number in every step.
    """
    plain = [copy.deepcopy(net) for net in nets]
    for net in plain:
        net.__dict__.pop("forward", None)
    optimizers = [torch.optim.SGD(net.parameters(), 0.01) for net in plain]
    for n in range(steps):
        if n == 2:
            for net in (*nets, *plain):
                change(net)
        if every:
            for net in (*nets, *plain):
                net.alpha = 1.0 + n
        images, targets = batch(n)
        random.seed(n)
        found = list(step(images, targets))
        random.seed(n)
        for net, optimizer, loss in zip(plain, optimizers, found, strict=True):
            expected = F.mse_loss(net(images), targets)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            assert abs(loss - expected.item()) < 1e-10, f"step {n}"
