"""Which output of a network the figures of a validation are about, and which figures can be had of it.

A model may return a tensor, or a dictionary or tuple of several: a segmentation network with an auxiliary output, a
transformer. Its loss knows what to do with them; accuracy, Dice and the table of predictions need one, which `pick`
finds by its key. Figures that suit the targets are measured unasked where they suit the output, too; those that were
asked for are refused before the first step where they cannot be had, not after the first epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from outcore.errors import ConfigError, suggest
from outcore.graph import Graph
from outcore.graph.record.recording import Ref
from outcore.graph.structure import leaves

__all__ = ["check_asked", "chosen", "output_shapes", "pick", "unfit"]


def pick(output: Any, key: str | None) -> Any:
    """The only tensor of an output, or what is under the key; None where there are several, or it is not there.

    >>> import torch
    >>> pick({"logits": torch.tensor(1), "edge": torch.tensor(2)}, "edge")
    tensor(2)
    >>> pick((torch.tensor(1), torch.tensor(2)), None) is None
    True
    """
    if isinstance(output, (tuple, list)):
        output = {str(number): value for number, value in enumerate(output)}
    if not isinstance(output, Mapping):
        return output
    if key is not None:
        return output.get(key)
    tensors = [value for value in output.values() if isinstance(value, Tensor)]
    return tensors[0] if len(tensors) == 1 else None


def output_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Shapes of what a network returns, by the key that picks each; of one tensor by no name.

    Only what can be picked is there: tensors, and not what lies deeper.
    """
    found = [(path, ref.name) for path, ref in leaves(graph._running()[1].result, Ref) if "." not in path]
    return {path: tuple(graph.values[name].shape) for path, name in found if name in graph.values}


def unfit(metric: str, output: Sequence[int], target: Sequence[int]) -> str:
    """Why a metric cannot be had of an output of this shape with targets of that one; empty where it can.

    >>> unfit("accuracy", (2, 5), (2,))
    ''
    >>> unfit("accuracy", (2, 64, 1000), (2, 64))
    'accuracy needs classes along the second dimension; the output is 2x64x1000, the target 2x64'
    """
    many = math.prod(target)
    if metric in ("mae", "rmse"):
        fits, needs = math.prod(output) == many, "as many numbers as targets"
    elif metric == "auc":
        fits, needs = len(output) in (1, 2) and output[0] == many, "a row of scores for each target"
    else:
        fits = len(output) > 0 and math.prod((output[0], *output[2:])) == many
        needs = "classes along the second dimension"
    shapes = ("x".join(map(str, shape)) or "one number" for shape in (output, target))
    return "" if fits else f"{metric} needs {needs}; the output is {next(shapes)}, the target {next(shapes)}"


def check_asked(metrics: Sequence[str], key: str | None, shapes: Mapping[str, tuple[int, ...]], target: Any) -> None:
    """Refuse metrics that were asked for and cannot be had, and a key that picks nothing.

    Args:
        metrics: what was asked for.
        key: which output.
        shapes: what the network returns in training, by key.
        target: of one batch.

    Raises:
        ConfigError: names what to say instead.
    """
    several = "" not in shapes
    if key is not None and several and shapes and key not in shapes:
        raise ConfigError(f"key={key} was given, and the model returns no {key!r}; {suggest(key, shapes)}")
    if not metrics:
        return
    if not isinstance(target, Tensor):
        raise ConfigError(f"metrics={','.join(metrics)} was given, and targets are no tensor; leave out metrics")
    if several and key is None and len(shapes) > 1:
        raise ConfigError(
            f"metrics={','.join(metrics)} was given, and {_returns(shapes)}; say key={next(iter(shapes))}"
        )
    shape = shapes.get(key or "", next(iter(shapes.values()), None))
    for why in (unfit(name, shape, target.shape) for name in metrics if shape is not None):
        if why:
            raise ConfigError(f"metrics={','.join(metrics)} was given; {why}; leave it out, or say another key")


def chosen(
    suiting: Sequence[str], key: str | None, shapes: Mapping[str, tuple[int, ...]], target: Tensor
) -> tuple[tuple[str, ...], str]:
    """Of the metrics that suit a target, those that suit the output; and what to say of the others, in words."""
    if "" not in shapes and key is None and len(shapes) > 1:
        return (), f"the validation measures the loss alone: {_returns(shapes)}; say key={next(iter(shapes))} for more"
    shape = shapes.get(key or "", next(iter(shapes.values()), None))
    if shape is None:
        return tuple(suiting), ""
    why = {name: unfit(name, shape, target.shape) for name in suiting}
    said = next((f"the validation is without what does not suit it: {text}" for text in why.values() if text), "")
    return tuple(name for name, text in why.items() if not text), said


def _returns(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return f"the model returns {len(shapes)} outputs ({', '.join(list(shapes)[:8])})"
