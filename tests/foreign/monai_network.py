"""How the zoo builds a MONAI network and feeds it images, volumes or pairs of them."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .foreign import Call, Foreign, one_tensor

Inputs = Callable[[int], Call]

# what MONAI's constructors say about themselves, and no caller can act on
_REMARKS = (
    "arch_code not provided when not searching",
    "enable_nested_tensor is True, but self.use_nested_tensor is False",
    "monai.networks.blocks.Warp: Using PyTorch native grid_sample",
    "torch.meshgrid: in an upcoming release",
)


@contextlib.contextmanager
def remarks_ignored() -> Iterator[None]:
    """Tests treat warnings as errors; these are not ours, and all of them come from building."""
    with warnings.catch_warnings():
        for remark in _REMARKS:
            warnings.filterwarnings("ignore", message=remark, category=UserWarning)
        yield


def network(kind: str, inputs: Inputs, *, name: str = "", quick: bool = True, **options: Any) -> Foreign:
    """The MONAI network `kind` with these options, called `name` where one kind occurs several times."""

    def build() -> nn.Module:
        import monai.networks.nets

        with remarks_ignored():
            return getattr(monai.networks.nets, kind)(**copy.deepcopy(options))  # SPADENet reverses a list

    return Foreign(f"monai/{name or kind}", build, inputs, quick)


def plane(size: int, channels: int = 1) -> Inputs:
    """Square images."""
    return one_tensor(channels, size, size)


def volume(size: int, channels: int = 1) -> Inputs:
    """Cubic volumes."""
    return one_tensor(channels, size, size, size)
