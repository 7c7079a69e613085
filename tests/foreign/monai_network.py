"""How the zoo builds a MONAI network and feeds it images, volumes or pairs of them."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .foreign import Call, Foreign, one_tensor

Inputs = Callable[[int], Call]


def network(kind: str, inputs: Inputs, *, name: str = "", quick: bool = True, **options: Any) -> Foreign:
    """The MONAI network `kind` with these options, called `name` where one kind occurs several times."""

    def build() -> nn.Module:
        import monai.networks.nets

        return getattr(monai.networks.nets, kind)(**options)

    return Foreign(f"monai/{name or kind}", build, inputs, quick)


def plane(size: int, channels: int = 1) -> Inputs:
    """Square images."""
    return one_tensor(channels, size, size)


def volume(size: int, channels: int = 1) -> Inputs:
    """Cubic volumes."""
    return one_tensor(channels, size, size, size)
