"""Keras' optimizers on torch, for training a twin as Keras would train the model.

SGD, with momentum and Nesterov's, is the same in both while the learning rate is constant. Adam is not: Keras adds
epsilon to the root of the second moment as it is, torch to that of the bias-corrected one, and Keras' default is 1e-7,
not 1e-8. Both are the same with torch's epsilon divided by the root of the bias correction, which changes from step to
step; that is all that `Adam` and `AdamW` here do before torch's own step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from outcore.errors import ModelError

__all__ = ["Adam", "AdamW", "optimizer_of"]


class _KerasEpsilon:
    """Sets the epsilon of every group to what makes torch's step Keras'."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; as torch's."""
        groups = cast(Any, self).param_groups
        for group in groups:
            group["keras_step"] = group.get("keras_step", 0) + 1
            group["keras_eps"] = group.get("keras_eps", group["eps"])
            group["eps"] = group["keras_eps"] / math.sqrt(1 - group["betas"][1] ** group["keras_step"])
        try:
            return super().step(closure)  # type: ignore[misc]
        finally:
            for group in groups:
                group["eps"] = group["keras_eps"]


class Adam(_KerasEpsilon, torch.optim.Adam):
    """Adam as Keras computes it; the arguments are those of `torch.optim.Adam`.

    >>> import torch, outcore.keras
    >>> net = torch.nn.Linear(2, 1)
    >>> optimizer = outcore.keras.Adam(net.parameters(), lr=1e-3)
    >>> net(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, eps: float = 1e-7, **kwargs: Any) -> None:
        super().__init__(params, lr=lr, eps=eps, **kwargs)


class AdamW(_KerasEpsilon, torch.optim.AdamW):
    """AdamW as Keras computes it; the arguments are those of `torch.optim.AdamW`, the weight decay is Keras' 0.004."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, *, eps: float = 1e-7, weight_decay: float = 0.004, **kwargs: Any
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay, **kwargs)


def optimizer_of(optimizer: Any, params: Iterable[Any]) -> torch.optim.Optimizer:
    """The torch optimizer that does what a Keras optimizer does, from its first step on.

    Args:
        optimizer: of Keras: SGD, Adam or AdamW with a constant learning rate.
        params: the parameters of the twin.

    Raises:
        ModelError: it has no exact counterpart; says why.
    """
    kind = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("keras."):
        raise ModelError(f"{kind} is a class of its own; use an optimizer of torch that does the same")
    settings = optimizer.get_config()
    if settings.get("weight_decay") and _spared(optimizer):
        raise ModelError(
            f"{kind} spares some weights its decay (exclude_from_weight_decay); give their parameters a group of their "
            f"own: outcore.keras.{kind}([{{'params': decayed}}, {{'params': spared, 'weight_decay': 0.0}}])"
        )
    rate = settings["learning_rate"]
    if not isinstance(rate, float):
        raise ModelError(f"{kind} has a schedule of learning rates; use one of torch.optim.lr_scheduler with the twin")
    for name in (
        "clipnorm",
        "clipvalue",
        "global_clipnorm",
        "use_ema",
        "loss_scale_factor",
        "gradient_accumulation_steps",
    ):
        if settings.get(name):
            raise ModelError(f"{kind} has {name}={settings[name]}, which is not carried over; do it in your loop")
    decay = settings.get("weight_decay")
    if kind == "SGD" and not decay:
        momentum, nesterov = settings["momentum"], settings["nesterov"]
        return torch.optim.SGD(params, lr=rate, momentum=momentum, nesterov=bool(nesterov and momentum))
    if (kind == "Adam" and not decay) or kind == "AdamW":
        how: dict[str, Any] = {"betas": (settings["beta_1"], settings["beta_2"]), "eps": settings["epsilon"]}
        if not settings["amsgrad"]:
            return (
                Adam(params, rate, **how) if kind == "Adam" else AdamW(params, rate, weight_decay=decay or 0.0, **how)
            )
    raise ModelError(f"{kind} with {settings} has no exact counterpart in torch; choose SGD, Adam or AdamW")


def _spared(optimizer: Any) -> bool:
    """Whether weight decay leaves some weights out."""
    return any(getattr(optimizer, f"_exclude_from_weight_decay{name}", None) for name in ("", "_pattern"))
