"""What ``fit`` holds beside a model: targets, and what its compiled loss makes of them.

A plan of a model ends with its outputs, but ``fit`` takes a loss of them against targets, which are there from the
beginning of a step to its end. Neither is known before the first batch comes. `FitLoss` takes the loss that the model
was compiled with, on targets as large as it asks for: of the outputs' shape, or for a sparse loss without the last
axis, as whole numbers. A model that is not compiled yet, or whose loss does not take such targets, is given a squared
error. The compiled loss itself is not used: Keras would bind it to the structure of these targets.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["FitLoss", "regularized_bytes"]


class FitLoss:
    """A function of the outputs of a Keras model, that stands for what ``fit`` does with them."""

    def __init__(self, keras: Any, model: Any) -> None:
        self.keras, self.names = keras, list(getattr(model, "output_names", None) or ())
        compiled = getattr(model, "_compile_loss", None)
        self.given = "mse" if compiled is None else compiled._user_loss
        self.weights = None if compiled is None else compiled._user_loss_weights
        self.regularized_bytes = regularized_bytes(model)

    def __call__(self, output: Any) -> torch.Tensor:
        """The loss of outputs on torch; targets have a shape but no memory, since they are counted apart."""

        def target(made: torch.Tensor, shape: Sequence[int], whole: bool) -> torch.Tensor:
            kind = torch.long if whole else made.dtype
            return torch.zeros((), dtype=kind, device=made.device).expand(tuple(shape))

        try:
            return self.loss(output, self.targets(output, target))  # type: ignore[no-any-return]
        except (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError):  # not such targets
            made = [one for one in self.keras.tree.flatten(output) if torch.is_tensor(one) and one.is_floating_point()]
            return torch.stack([(one - target(one, one.shape, False)).square().mean() for one in made]).sum()

    def loss(self, output: Any, target: Any) -> Any:
        """The loss of outputs against targets, with nothing of it kept."""
        module = importlib.import_module("keras.src.trainers.compile_utils")
        given = copy.copy(self.given) if isinstance(self.given, (list, dict)) else self.given
        return module.CompileLoss(given, self.weights, output_names=self.names or None)(target, output)

    def targets(self, output: Any, make: Any) -> Any:
        """Targets in the structure of the outputs: made from an output, a shape, and whether numbers are whole."""
        made = self.keras.tree.flatten(output)
        names = sorted(output) if isinstance(output, dict) else self.names  # a dict is flattened by its keys
        found = []
        for place, one in enumerate(made):
            if not hasattr(one, "shape"):
                found.append(one)
                continue
            whole = self._is_sparse(place, names, len(made)) and len(one.shape) > 1
            found.append(make(one, tuple(one.shape)[:-1] if whole else tuple(one.shape), whole))
        return self.keras.tree.pack_sequence_as(output, found)

    def bytes_of_targets(self, output: Any) -> int:
        """What targets of these outputs hold throughout, with early gradients of regularized weights."""
        sizes: list[int] = []

        def size(made: Any, shape: Sequence[int], whole: bool) -> int:
            sizes.append(math.prod(shape) * (8 if whole else made.element_size()))
            return 0

        self.targets(output, size)
        return sum(sizes) + self.regularized_bytes

    def _is_sparse(self, place: int, names: Sequence[str], count: int) -> bool:
        """Whether the loss of an output takes classes by their numbers."""
        loss = self.given
        if isinstance(loss, dict):
            loss = loss.get(names[place]) if place < len(names) else None
        elif isinstance(loss, (list, tuple)):
            loss = loss[place] if count == len(loss) else loss[0]
        name = loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", "")
        return "sparse" in str(name).lower()


def regularized_bytes(model: Any) -> int:
    """What regularizers hold: their weights' gradients come first in backward, and three values of the largest."""
    sizes = [
        int(math.prod(v.shape)) * _ITEM_BYTES.get(str(v.dtype), 4)
        for v in getattr(model, "trainable_variables", ())
        if getattr(v, "regularizer", None) is not None
    ]
    return sum(sizes) + 3 * max(sizes, default=0)


_ITEM_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2}
