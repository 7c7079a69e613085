"""The zoo: real models from torchvision, MONAI, Hugging Face and timm, with small inputs and no downloads.

for foreign in ZOO:
    torch.manual_seed(0)
    model = foreign.build()
    args, kwargs = foreign.inputs(2)
    scalar(model(*args, **kwargs)).backward()
"""

from .foreign import Foreign
from .huggingface_zoo import HUGGINGFACE
from .monai_zoo import MONAI
from .shim import define_torchvision_operators
from .timm_zoo import TIMM
from .torchvision_zoo import TORCHVISION

define_torchvision_operators()

ZOO: tuple[Foreign, ...] = TORCHVISION + MONAI + HUGGINGFACE + TIMM
QUICK: tuple[Foreign, ...] = tuple(foreign for foreign in ZOO if foreign.quick)

__all__ = ["QUICK", "ZOO", "Foreign", "by_name"]


def by_name(name: str) -> Foreign:
    """The model called `name`, such as "torchvision/resnet50"."""
    for foreign in ZOO:
        if foreign.name == name:
            return foreign
    near = [foreign.name for foreign in ZOO if name.split("/")[-1].lower() in foreign.name.lower()]
    raise KeyError(f"no foreign model {name!r}; near it: {', '.join(near) or 'none'}")
