"""What a Keras model has beside its outputs, which a twin would lose without a word.

A twin computes what the model returns. A regularizer or an activity regularizer is part of Keras' loss, a constraint of
its update, a mask on an output of the mean that its loss takes, and a precision policy of every call. Each is refused,
with the layer or weight that has it, also where it is deep inside of a layer: in the cell of a recurrent one, or in
the dense layers of an attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outcore.errors import ModelError
from outcore.keras.part import Site
from outcore.keras.twin import leaves

__all__ = ["Precision", "refuse_extras", "refuse_masked_outputs", "refuse_update", "what_to_do", "why_unknown"]


class Precision:
    """The one floating type that all layers of a model compute in."""

    def __init__(self) -> None:
        self.first: tuple[str, str] | None = None
        """The first layer's, and its path."""

    def refuse_others(self, layer: Any, path: str) -> None:
        """Refuse a layer that computes in another type than it keeps weights in, or than the layers before it."""
        compute, kept = getattr(layer, "compute_dtype", None), getattr(layer, "variable_dtype", None)
        if compute is None:
            return
        if compute != kept:
            raise ModelError(
                f"{path} computes in {compute} and keeps weights in {kept}; set the dtype policy to {kept} and use "
                "torch.autocast around the twin"
            )
        if "float" not in str(compute):
            return
        self.first = self.first or (str(compute), path)
        if self.first[0] != compute:
            raise ModelError(
                f"{path} computes in {compute} and {self.first[1]} in {self.first[0]}; a twin has one type: build all "
                "layers with the same dtype"
            )


def refuse_extras(layer: Any, site: Site) -> None:
    """Refuse penalties on what a layer, or one inside of it, returns."""
    for inner in layer._flatten_layers() if hasattr(layer, "_flatten_layers") else ():
        if getattr(inner, "activity_regularizer", None) is not None:
            site.refuse("it has an activity regularizer", "add the penalty to your loss")
    refuse_update(getattr(layer, "weights", ()), site)


def refuse_update(variables: Iterable[Any], site: Site) -> None:
    """Refuse weights that Keras penalizes or constrains."""
    for variable in variables:
        if getattr(variable, "regularizer", None) is not None:
            site.refuse(
                f"{variable.path} has a regularizer, which is part of Keras' loss",
                "set it to None and use weight_decay in the optimizer, or add the penalty to your loss",
            )
        if getattr(variable, "constraint", None) is not None:
            site.refuse(f"{variable.path} has a constraint", "set it to None")


def refuse_masked_outputs(keras: Any, graph: Any, path: str) -> None:
    """Refuse outputs with a mask, which Keras' losses leave out of their mean."""
    for number, tensor in enumerate(leaves(graph._outputs_struct)):
        if keras.src.backend.get_keras_mask(tensor) is not None:
            raise ModelError(
                f"output {number} of {path} has a mask, which Keras' losses take and a twin does not carry; make the "
                "mask an output of its own, and use it in your loss"
            )


def why_unknown(layer: Any) -> str:
    """Why there is no converter for a layer."""
    if type(layer).__module__.startswith("keras."):
        return "this kind is not known"
    return "it is a class of its own"


def what_to_do(layer: Any) -> str:
    """What to do about a layer without a converter."""
    if "preprocessing" in type(layer).__module__:
        return "apply it in the data set instead"
    name = type(layer).__name__
    return (
        f"pass to_torch(model, layers={{{name}: function}}) a function that makes a torch module of it, or write "
        "it with layers that are known"
    )
