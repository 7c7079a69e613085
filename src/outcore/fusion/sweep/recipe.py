"""From a trial's settings to what is trained: model, optimizer, batches.

A setting that the job's `model` or `optimizer` takes as an argument is given to it; `batch` is the batch size, `seed`
that of the first weights; every other is set in the optimizer's groups (`lr`, `weight_decay`, `beta1`, ...).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.errors import FuseError
from outcore.fusion.sweep.trials import Trial
from outcore.job import Job

_ALIASES = {"wd": "weight_decay"}
_OWN = ("batch", "seed")


@dataclass(frozen=True)
class Recipe:
    """How the trials of one job are made."""

    job: str
    inputs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    size: int | None = None
    device: str = "cpu"
    seed: int = 0

    def key(self, trial: Trial, model: nn.Module) -> Hashable:
        """Equal for trials that can train in one array."""
        shapes = tuple(
            (n, tuple(t.shape), t.dtype) for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)
        )
        kinds = tuple((n, type(m).__qualname__) for n, m in model.named_modules())
        return self.batch_size(trial), shapes, kinds, type(self.optimizer(trial, model.parameters())).__name__

    def loss(self, trial: Trial) -> Callable[..., torch.Tensor]:
        """The job's, or what fits its targets."""
        return self._job(trial).loss or _default_loss

    def _job(self, trial: Trial) -> Job:
        own = self._model_arguments(trial)
        return _loaded(self.job, self.inputs, (*self.arguments, *own))

    def model(self, trial: Trial) -> nn.Module:
        """A trial's model, with its first weights."""
        torch.manual_seed(_whole("seed", trial.settings.get("seed", self.seed)))
        return self._job(trial).build().to(self.device).train()

    def _model_arguments(self, trial: Trial) -> tuple[str, ...]:
        wanted = _loaded(self.job, self.inputs, self.arguments).settings
        return tuple(f"{n}={v!r}" for n, v in trial.settings.items() if n in wanted and n not in _OWN)

    def batch_size(self, trial: Trial) -> int:
        """Samples of a trial's batches."""
        job = _loaded(self.job, self.inputs, self.arguments)
        size = _whole("batch", trial.settings.get("batch", self.size or job.size))
        if size < 1:
            raise FuseError(f"--set batch={size}: a batch has at least one sample")
        return size

    def batch(self, trial: Trial, size: int, step: int) -> tuple[Any, Any]:
        """The batch of a step: the same for all, and the same if the sweep is run again."""
        torch.manual_seed(self.seed * 1_000_003 + step + 100_000)
        args, kwargs, targets = self._job(trial).example(size)
        return (kwargs or args), targets

    def optimizer(self, trial: Trial, params: Any) -> torch.optim.Optimizer:
        """The job's optimizer with the trial's settings in it."""
        job, settings = self._job(trial), dict(trial.settings)
        for name in (*_OWN, *job.settings):
            settings.pop(name, None)
        if job.optimizer is None:
            made: torch.optim.Optimizer = torch.optim.Adam(params, lr=1e-3)
        else:
            own = {n: settings.pop(n) for n in list(settings) if n in inspect.signature(job.optimizer).parameters}
            try:
                made = job.optimizer(params, **own)
            except (TypeError, ValueError) as error:
                given = ", ".join(f"{n}={v}" for n, v in own.items())
                raise FuseError(f"--set {given}: optimizer() of {self.job} does not take it: {error}") from error
        for group in made.param_groups:
            for name, value in settings.items():
                _set(group, name, value, self.job)
        for group in made.param_groups:
            group.pop("initial_lr", None)
        return made


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int | float) or not math.isfinite(value) or value != int(value):
        raise FuseError(f"--set {name}={value}: give a whole number")
    if not -(2**63) <= value < 2**63:
        raise FuseError(f"--set {name}={value}: it must fit into 64 bits")
    return int(value)


def _default_loss(output: Any, target: Any) -> torch.Tensor:
    if isinstance(target, torch.Tensor) and not target.is_floating_point():
        return F.cross_entropy(output, target)
    return F.mse_loss(output, target)


def _set(group: dict[str, Any], name: str, value: Any, job: str) -> None:
    name = _ALIASES.get(name, name)
    if name in ("beta1", "beta2") and "betas" in group:
        first, second = group["betas"]
        group["betas"] = (value, second) if name == "beta1" else (first, value)
    elif name in group and name != "params":
        if isinstance(group[name], int | float) and not isinstance(value, int | float):
            raise FuseError(f"--set {name}={value}: the optimizer has {group[name]} there; give a number")
        group[name] = value
    else:
        known = [k for k in group if k != "params"]
        raise FuseError(
            f"--set {name}: neither model() nor optimizer() of {job} takes it, and the optimizer has no such setting; "
            f"it has {', '.join(known)}; beside these, batch and seed can be set"
        )


@cache
def _loaded(job: str, inputs: tuple[str, ...], arguments: tuple[str, ...]) -> Job:
    return Job.load(job, inputs=inputs, arguments=arguments)
