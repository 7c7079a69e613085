"""Optimizers and learning-rate schedules of torch, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from outcore.errors import ConfigError, TrainError, suggest
from outcore.job import Job
from outcore.train.settings.config import OptimizerConfig, ScheduleConfig

__all__ = ["find_schedule", "make_optimizer", "make_schedule"]


def make_optimizer(config: OptimizerConfig, job: Job) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A function that makes the optimizer: of the name given, else the job's own, else AdamW."""
    if config.name is None and job.optimizer is not None:
        if config.arguments:
            raise ConfigError(f"optimizer.arguments needs optimizer.name; {job.name} has its own optimizer(params)")
        own, lr = job.optimizer, config.lr

        def from_job(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            made = own(_trainable(parameters, job))
            if lr is not None:
                for group in made.param_groups:
                    group["lr"] = lr
            return made

        return from_job
    kind = _find(torch.optim, config.name or "AdamW", torch.optim.Optimizer, "optimizer")
    arguments = dict(config.arguments)
    if config.lr is not None:
        arguments["lr"] = config.lr
    _fit(kind, arguments, "optimizer")

    def by_name(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given = _trainable(parameters, job)
        try:
            made: torch.optim.Optimizer = kind(given, **arguments)
        except (TypeError, ValueError) as error:
            shown = ", ".join(f"{name}={value}" for name, value in arguments.items())
            raise ConfigError(
                f"optimizer {kind.__name__} cannot be made with {shown or 'its defaults'}: {error}"
            ) from error
        return made

    return by_name


def _trainable(parameters: Iterable[nn.Parameter], job: Job) -> Iterable[nn.Parameter]:
    given = list(parameters)
    if not given:
        raise TrainError(
            f"the model of {job.name} has no parameter that requires a gradient, so there is nothing to train; "
            "give it one with requires_grad_(True), or use outcore infer"
        )
    return given


def find_schedule(config: ScheduleConfig) -> type[lr_scheduler.LRScheduler] | None:
    """The class of a schedule, or None where there is none; raises `ConfigError` for one that torch does not have."""
    if config.name is None:
        return None
    found: type[lr_scheduler.LRScheduler] = _find(lr_scheduler, config.name, lr_scheduler.LRScheduler, "schedule")
    return found


def make_schedule(
    config: ScheduleConfig, optimizer: torch.optim.Optimizer, *, epochs: int, steps: int
) -> lr_scheduler.LRScheduler | None:
    """A schedule, or None; a length that it needs and was not given is that of the run."""
    if (kind := find_schedule(config)) is None:
        return None
    length = epochs if config.every == "epoch" else epochs * steps
    arguments = dict(config.arguments)
    for name in ("T_max", "total_iters", "total_steps"):
        if name in inspect.signature(kind).parameters and name not in arguments:
            if not (name == "total_steps" and {"epochs", "steps_per_epoch"} <= set(arguments)):
                arguments[name] = length
    _fit(kind, arguments, "schedule")
    made: lr_scheduler.LRScheduler = kind(optimizer, **arguments)
    return made


def _find(module: Any, name: str, base: type, what: str) -> Any:
    known = [n for n, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, base) and n[0] != "_"]
    if name not in known:
        raise ConfigError(f"{what}.name={name} is not in torch; {suggest(name, known, shown=len(known))}")
    return getattr(module, name)


def _fit(kind: Any, arguments: dict[str, Any], what: str) -> None:
    """Raise for unknown arguments and for missing ones, with a clearer message than torch's."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    names = [p.name for p in parameters]
    for name in arguments:
        if name not in names:
            raise ConfigError(f"{what} {kind.__name__} has no argument {name!r}; {suggest(name, names)}")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in arguments]
    if missing:
        raise ConfigError(f"{what} {kind.__name__} needs {', '.join(f'{what}.arguments.{m}=…' for m in missing)}")
