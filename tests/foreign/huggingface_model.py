"""How the zoo builds a Hugging Face model: random weights from a configuration, no download."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .foreign import Call, Foreign


def model(
    name: str, architecture: str, inputs: Callable[[int], Call], *, quick: bool = True, **options: Any
) -> Foreign:
    """The architecture with these options of its configuration."""

    def build() -> nn.Module:
        import transformers

        kind = getattr(transformers, architecture)
        return kind(kind.config_class(**options))

    return Foreign(f"hf/{name}", build, inputs, quick)
