"""A job's model and its loss as one network.

What a loss computes and saves for backward is part of the step: of a segmentation, as large as the last feature maps.
The model is given a forward that ends in the loss, in place, so that every block keeps the name the user knows.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.cost.image_size import with_longest_side
from outcore.errors import OutcoreError, TrainError
from outcore.graph import Graph, capture
from outcore.job import Job


def default_loss(output: Any, target: Any) -> torch.Tensor:
    """Cross-entropy for class numbers (of images or pixels), mean squared error for values."""
    if not isinstance(output, torch.Tensor):
        raise TrainError(f"the model returns {type(output).__name__}; write loss(output, target) into the job")
    if target is None:
        raise TrainError("the batches have no targets; write loss(output, target) into the job, or give --data")
    try:
        return _usual_loss(output, target)
    except (RuntimeError, ValueError, IndexError) as error:
        if type(error) not in (RuntimeError, ValueError, IndexError):  # out of memory, or one of ours
            raise
        said = str(error).splitlines()[0].rstrip(".")
        raise TrainError(
            f"no loss of an output of shape {tuple(output.shape)} and targets of shape {tuple(target.shape)} "
            f"({str(target.dtype).removeprefix('torch.')}): {said}; write loss(output, target) into the job, or give "
            "other targets"
        ) from error


def _usual_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if target.dtype.is_floating_point:
        return F.mse_loss(output, target.reshape(output.shape).to(output.dtype))
    if output.ndim == 1 or output.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(output, target.reshape(output.shape).to(output.dtype))
    return F.cross_entropy(output, target)


def with_loss(model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> nn.Module:
    """The same module, whose forward also takes ``target`` and returns the loss.

    >>> net = with_loss(nn.Linear(4, 2), nn.functional.mse_loss)
    >>> net(torch.ones(3, 4), target=torch.ones(3, 2)).shape
    torch.Size([])
    """
    kind = type(model)

    def forward(self: nn.Module, *args: Any, target: Any, **kwargs: Any) -> torch.Tensor:
        return loss(kind.forward(self, *args, **kwargs), target)

    forward.__signature__ = _with_target(kind.forward)  # type: ignore[attr-defined]
    names = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), names)
    return model


def _with_target(forward: Callable[..., Any]) -> inspect.Signature:
    """The signature of a forward and ``target``, so that inputs keep their names."""
    given = inspect.signature(forward)
    target = inspect.Parameter("target", inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for p in given.parameters.values() if p.name != "target"]
    end = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    return given.replace(parameters=[*parameters[:end], target, *parameters[end:]])


def capture_training(job: Job, size: int | None = None, *, image: int | None = None) -> Graph:
    """The graph of a job's model with its loss where it has one, without memory for weights or data if possible.

    Args:
        job: the job.
        size: of the batch; the job's own by default.
        image: longest side of the images instead of the job's own; inputs and targets of that shape change alike.
    """
    failure: OutcoreError | NotImplementedError | None = None
    for device in ("meta", None):
        try:
            return _capture(job, size, image, device)
        except (OutcoreError, NotImplementedError) as error:
            failure = failure or error
    if image is None:
        graph = job.capture(size)  # its message is about the model alone, or the loss was what cannot be recorded
        if job.loss is not None and failure is not None:
            said = str(failure).splitlines()[0]
            warnings.warn(f"outcore: the loss of {job.name} is in no figure, because it fails: {said}", stacklevel=2)
        return graph
    raise failure or OutcoreError(f"{job.name} cannot be captured")


def _capture(job: Job, size: int | None, image: int | None, device: str | None) -> Graph:
    model = job.build(device).train()
    args, kwargs, target = job.example(size, device)
    if image is not None:
        args, kwargs, target = with_longest_side((args, kwargs, target), (args, kwargs), image, _without_memory)
    if job.loss is None or target is None:
        return capture(model, args, kwargs)
    return capture(with_loss(model, job.loss), args, {**kwargs, "target": target})


def _without_memory(leaf: torch.Tensor, shape: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    return torch.empty((*leaf.shape[: -len(shape)], *wanted), dtype=leaf.dtype, device="meta")
