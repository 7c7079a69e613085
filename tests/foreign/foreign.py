"""One model from another library, and how to feed it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Foreign:
    """A third-party model: built on demand, so that listing the zoo imports none of the libraries.

    `build` draws its weights from torch's global generator: seed it first. `inputs` does not touch that one.
    A batch of one is refused in train mode by some: BatchNorm needs two values per channel.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Call]
    quick: bool  # forward and backward of a batch of two well under 1.5 s on one core, and in little memory
    other_batch: bool = True  # whether one model takes batches of another size than two

    def __str__(self) -> str:
        return self.name


def floats(*size: int, seed: int = 0) -> Tensor:
    """Normal noise, the same for the same size and seed."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *size: int, low: int = 0, seed: int = 0) -> Tensor:
    """Uniform integers in [low, high), the same for the same size and seed."""
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(seed))


def one_tensor(*size: int) -> Callable[[int], Call]:
    """Inputs of a model that takes one tensor of (batch, *size)."""
    return lambda batch: ((floats(batch, *size),), {})


def keywords(make: Callable[[int], dict[str, Any]]) -> Callable[[int], Call]:
    """Inputs of a model that is called with keywords only."""
    return lambda batch: ((), make(batch))
