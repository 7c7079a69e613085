"""How a job is trained: the same value is predicted and, where this machine can, run.

A technique that changes how a step is trained (a precision, a memory format, a compiler, another batch) is a field
here. `outcore.whatif.recording` captures and estimates a setup, `outcore.whatif.trial` trains it, so that what is
predicted and what is measured are the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from outcore.errors import WhatIfError
from outcore.job import Job
from outcore.machine import Device

__all__ = ["TrainingSetup"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class TrainingSetup:
    """A job and how it is trained."""

    job: Job
    size: int | None = None
    """Of the batch; the job's own if none."""
    autocast: torch.dtype | None = None
    channels_last: bool = False
    compiled: bool = False
    fused_optimizer: bool = False
    cuda_graph: bool = False
    within: str | None = None
    """A budget, as `outcore.within` takes it: a size, or a share of what the step holds without one."""

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.size or self.job.size

    def channels_last_on(self, device: Device) -> bool:
        """Whether images are channels last inside: asked for, or chosen by the compiler, as it does for a GPU."""
        return self.channels_last or (self.compiled and device.kind == "cuda")

    def training_job(self) -> Job:
        """The job with its precision and memory format, as it is captured and run; names of blocks stay."""

        def model() -> nn.Module:
            built = self.job.build()
            if self.channels_last:
                built = in_channels_last(built)
            return under_autocast(built, self.autocast) if self.autocast is not None else built

        def batch(size: int) -> tuple[Any, Any]:
            inputs, target = self.job.made_batch(size)
            return (in_channels_last(inputs) if self.channels_last else inputs), target

        optimizer = self.job.optimizer
        if self.fused_optimizer and optimizer is not None:
            optimizer = fused(optimizer)
        return replace(self.job, model=model, batch=batch, optimizer=optimizer)


def under_autocast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same module, whose forward runs under autocast; its blocks keep their names."""
    kind = type(model)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = next((t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), "cpu")
        with torch.autocast("cuda" if first == "cuda" else "cpu", dtype):  # meta tensors are cast as on a CPU
            return kind.forward(self, *args, **kwargs)

    import inspect

    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    names = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), names)
    return model


def in_channels_last(values: Any) -> Any:
    """A module with its images' weights, or tensors of a batch, with channels as the innermost dimension."""
    if isinstance(values, nn.Module):
        for parameter in values.parameters():
            if parameter.dim() in _FORMATS:
                parameter.data = parameter.data.contiguous(memory_format=_FORMATS[parameter.dim()])
        return values

    def turned(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() in _FORMATS and leaf.is_floating_point():
            return leaf.contiguous(memory_format=_FORMATS[leaf.dim()])
        return leaf

    return tree_map(turned, values)


def fused(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """The same optimizer, stepping all parameters in one kernel.

    Raises:
        WhatIfError: when called, if torch has no such form of it.
    """

    def made(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(params)
        for group in optimizer.param_groups:
            if "fused" not in group:
                raise WhatIfError(f"torch has no fused {type(optimizer).__name__}; it has Adam, AdamW, SGD and Adagrad")
            group["fused"], group["foreach"] = True, False
        optimizer.defaults.update(fused=True, foreach=False)
        return optimizer

    return made
