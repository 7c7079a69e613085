"""The updates of torch's optimizers, each member with its own numbers.

An `OptimizerUpdate` says of one optimizer: which settings must agree between members because they change the formula,
which tensors it keeps, which numbers a step needs (computed on the host in double precision, as torch does), and the
formula itself on stacked tensors, where every number is a tensor that broadcasts over its member. The formulas are
those of torch's single-tensor implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]
Numbers = dict[str, float]
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class OptimizerUpdate:
    """How one optimizer steps."""

    flags: tuple[str, ...]
    """Settings that change the formula: equal for all members, or they step one by one."""
    state: Callable[[Group], tuple[str, ...]]
    """Names of the tensors it keeps per parameter."""
    numbers: Callable[[Group, float, Numbers], Numbers]
    """The scalars of a member's step, from its settings, the count of steps with this one, and scalars it keeps."""
    apply: Callable[[Tensor, Tensor, State, dict[str, Tensor], Group], Tensor]
    """The new parameter; `state` is replaced entry by entry."""
    scalars: Mapping[str, Callable[[Group], float]] | None = None
    """Scalars kept per parameter, with their first value."""
    first: Callable[[str, Group], float] = lambda name, group: 0.0
    """First value of a tensor it keeps."""


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def _decayed(p: Tensor, g: Tensor, h: dict[str, Tensor], group: Group) -> Tensor:
    g = -g if group.get("maximize") else g
    return g + h["weight_decay"] * p


def _plain(*names: str) -> Callable[[Group], tuple[str, ...]]:
    return lambda group: names


# SGD


def _sgd_numbers(group: Group, step: float, kept: Numbers) -> Numbers:
    momentum = _number(group["momentum"])
    begins = step == 1 or momentum == 0
    return {
        "lr": _number(group["lr"]),
        "weight_decay": _number(group["weight_decay"]),
        "momentum": momentum,
        "keep": 0.0 if begins else momentum,
        "take": 1.0 if begins else 1.0 - _number(group["dampening"]),
    }


def _sgd(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    g = _decayed(p, g, h, group)
    if "momentum_buffer" in s:
        s["momentum_buffer"] = h["keep"] * s["momentum_buffer"] + h["take"] * g
        g = g + h["momentum"] * s["momentum_buffer"] if group["nesterov"] else s["momentum_buffer"]
    return p - h["lr"] * g


# Adam and its kin


def _adam_state(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else []))


def _common_numbers(group: Group) -> Numbers:
    """What Adam and its kin share: betas, eps, and weight decay in the gradient or, decoupled, in the parameter."""
    b1, b2 = (_number(b) for b in group["betas"])
    lr, decay = _number(group["lr"]), _number(group["weight_decay"])
    decoupled = bool(group.get("decoupled_weight_decay"))
    return {
        "b1": b1,
        "b2": b2,
        "eps": _number(group["eps"]),
        "weight_decay": 0.0 if decoupled else decay,
        "shrink": 1 - lr * decay if decoupled else 1.0,
    }


def _moments(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> tuple[Tensor, Tensor]:
    """Parameter and gradient after weight decay; the running means of the gradient and its square take it in."""
    g = _decayed(p, g, h, group)
    s["exp_avg"] = h["b1"] * s["exp_avg"] + (1 - h["b1"]) * g
    s["exp_avg_sq"] = h["b2"] * s["exp_avg_sq"] + (1 - h["b2"]) * g * g
    return p * h["shrink"], g


def _adam_numbers(group: Group, step: float, kept: Numbers) -> Numbers:
    h = _common_numbers(group)
    size, root = _number(group["lr"]) / (1 - h["b1"] ** step), math.sqrt(1 - h["b2"] ** step)
    return {"b1": h["b1"], "b2": h["b2"], "size": size, "root": root, **h}  # the order in which the kernel reads them


def _adam(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    p, g = _moments(p, g, s, h, group)
    second = s["exp_avg_sq"]
    if "max_exp_avg_sq" in s:
        second = s["max_exp_avg_sq"] = torch.maximum(s["max_exp_avg_sq"], second)
    return p - h["size"] * s["exp_avg"] / (second.sqrt() / h["root"] + h["eps"])


def _nadam_numbers(group: Group, step: float, kept: Numbers) -> Numbers:
    h = _common_numbers(group)
    b1, lr, rate = h["b1"], _number(group["lr"]), _number(group["momentum_decay"])
    mu = b1 * (1.0 - 0.5 * 0.96 ** (step * rate))
    following = b1 * (1.0 - 0.5 * 0.96 ** ((step + 1) * rate))
    kept["mu_product"] = (
        torch.tensor(kept["mu_product"], device="cpu") * mu
    ).item()  # torch keeps it in the default dtype
    return h | {
        "now": lr * (1 - mu) / (1 - kept["mu_product"]),
        "next": lr * following / (1 - kept["mu_product"] * following),
        "correction": 1 - h["b2"] ** step,
    }


def _nadam(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    p, g = _moments(p, g, s, h, group)
    root = (s["exp_avg_sq"] / h["correction"]).sqrt() + h["eps"]
    return p - h["now"] * g / root - h["next"] * s["exp_avg"] / root


def _radam_numbers(group: Group, step: float, kept: Numbers) -> Numbers:
    h = _common_numbers(group)
    b2 = h["b2"]
    correction = 1 - b2**step
    longest = 2 / (1 - b2) - 1
    length = longest - 2 * step * (b2**step) / correction
    rectified = length > 5.0
    factor = 0.0
    if rectified:
        factor = math.sqrt(
            (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        ) * math.sqrt(correction)
    size = _number(group["lr"]) / (1 - h["b1"] ** step)
    return h | {"size": size, "factor": factor, "plain": 0.0 if rectified else 1.0}


def _radam(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    p, g = _moments(p, g, s, h, group)
    return p - h["size"] * s["exp_avg"] * (h["plain"] + h["factor"] / (s["exp_avg_sq"].sqrt() + h["eps"]))


def _adamax_numbers(group: Group, step: float, kept: Numbers) -> Numbers:
    b1, b2 = (_number(b) for b in group["betas"])
    return {
        "b1": b1,
        "b2": b2,
        "size": _number(group["lr"]) / (1 - b1**step),
        "eps": _number(group["eps"]),
        "weight_decay": _number(group["weight_decay"]),
    }


def _adamax(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    g = _decayed(p, g, h, group)
    s["exp_avg"] = h["b1"] * s["exp_avg"] + (1 - h["b1"]) * g
    s["exp_inf"] = torch.maximum(h["b2"] * s["exp_inf"], g.abs() + h["eps"])
    return p - h["size"] * s["exp_avg"] / s["exp_inf"]


# The others


def _rmsprop_state(group: Group) -> tuple[str, ...]:
    return (
        "square_avg",
        *(["momentum_buffer"] if _number(group["momentum"]) > 0 else []),
        *(["grad_avg"] if group["centered"] else []),
    )


def _named(*names: str) -> Callable[[Group, float, Numbers], Numbers]:
    return lambda group, step, kept: {name: _number(group[name]) for name in names}


def _rmsprop(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    g = _decayed(p, g, h, group)
    s["square_avg"] = h["alpha"] * s["square_avg"] + (1 - h["alpha"]) * g * g
    spread = s["square_avg"]
    if "grad_avg" in s:
        s["grad_avg"] = h["alpha"] * s["grad_avg"] + (1 - h["alpha"]) * g
        spread = spread - s["grad_avg"] * s["grad_avg"]
    g = g / (spread.sqrt() + h["eps"])
    if "momentum_buffer" in s:
        g = s["momentum_buffer"] = h["momentum"] * s["momentum_buffer"] + g
    return p - h["lr"] * g


def _adadelta(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    g = _decayed(p, g, h, group)
    s["square_avg"] = h["rho"] * s["square_avg"] + (1 - h["rho"]) * g * g
    delta = (s["acc_delta"] + h["eps"]).sqrt() / (s["square_avg"] + h["eps"]).sqrt() * g
    s["acc_delta"] = h["rho"] * s["acc_delta"] + (1 - h["rho"]) * delta * delta
    return p - h["lr"] * delta


def _adagrad_numbers(group: Group, step: float, kept: Numbers) -> Numbers:
    return {
        "size": _number(group["lr"]) / (1 + (step - 1) * _number(group["lr_decay"])),
        "eps": _number(group["eps"]),
        "weight_decay": _number(group["weight_decay"]),
    }


def _adagrad(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    g = _decayed(p, g, h, group)
    s["sum"] = s["sum"] + g * g
    return p - h["size"] * g / (s["sum"].sqrt() + h["eps"])


def _asgd_numbers(group: Group, step: float, kept: Numbers) -> Numbers:
    lr, lambd = _number(group["lr"]), _number(group["lambd"])
    eta, mu = kept["eta"], kept["mu"]
    kept["eta"] = lr / ((1 + lambd * lr * step) ** _number(group["alpha"]))
    kept["mu"] = 1 / max(1, step - _number(group["t0"]))
    return {"eta": eta, "mu": mu, "shrink": 1 - lambd * eta, "weight_decay": _number(group["weight_decay"])}


def _asgd(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    g = _decayed(p, g, h, group)
    p = p * h["shrink"] - h["eta"] * g
    s["ax"] = s["ax"] + (p - s["ax"]) * h["mu"]
    return p


def _rprop_numbers(group: Group, step: float, kept: Numbers) -> Numbers:
    low, high = group["etas"]
    least, most = group["step_sizes"]
    return {"low": _number(low), "high": _number(high), "least": _number(least), "most": _number(most)}


def _rprop(p: Tensor, g: Tensor, s: State, h: dict[str, Tensor], group: Group) -> Tensor:
    g = -g if group.get("maximize") else g
    sign = (g * s["prev"]).sign()
    factor = torch.where(sign > 0, h["high"], torch.where(sign < 0, h["low"], torch.ones_like(sign)))
    s["step_size"] = torch.minimum(torch.maximum(s["step_size"] * factor, h["least"]), h["most"])
    g = torch.where(sign < 0, torch.zeros_like(g), g)
    s["prev"] = g
    return p - g.sign() * s["step_size"]


def _first_step_size(name: str, group: Group) -> float:
    return _number(group["lr"]) if name == "step_size" else 0.0


_ADAM = OptimizerUpdate(("amsgrad", "maximize", "decoupled_weight_decay"), _adam_state, _adam_numbers, _adam)
UPDATES: dict[type[torch.optim.Optimizer], OptimizerUpdate] = {
    torch.optim.SGD: OptimizerUpdate(
        ("nesterov", "maximize"),
        lambda group: ("momentum_buffer",) if _number(group["momentum"]) else (),
        _sgd_numbers,
        _sgd,
    ),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.NAdam: OptimizerUpdate(
        ("maximize", "decoupled_weight_decay"),
        _plain("exp_avg", "exp_avg_sq"),
        _nadam_numbers,
        _nadam,
        {"mu_product": lambda group: 1.0},
    ),
    torch.optim.RAdam: OptimizerUpdate(
        ("maximize", "decoupled_weight_decay"), _plain("exp_avg", "exp_avg_sq"), _radam_numbers, _radam
    ),
    torch.optim.Adamax: OptimizerUpdate(("maximize",), _plain("exp_avg", "exp_inf"), _adamax_numbers, _adamax),
    torch.optim.RMSprop: OptimizerUpdate(
        ("centered", "maximize"), _rmsprop_state, _named("lr", "alpha", "eps", "weight_decay", "momentum"), _rmsprop
    ),
    torch.optim.Adadelta: OptimizerUpdate(
        ("maximize",), _plain("square_avg", "acc_delta"), _named("lr", "rho", "eps", "weight_decay"), _adadelta
    ),
    torch.optim.Adagrad: OptimizerUpdate(
        ("maximize",),
        _plain("sum"),
        _adagrad_numbers,
        _adagrad,
        first=lambda name, group: _number(group["initial_accumulator_value"]),
    ),
    torch.optim.ASGD: OptimizerUpdate(
        ("maximize",),
        _plain("ax"),
        _asgd_numbers,
        _asgd,
        {"eta": lambda group: _number(group["lr"]), "mu": lambda group: 1.0},
    ),
    torch.optim.Rprop: OptimizerUpdate(
        ("maximize",), _plain("prev", "step_size"), _rprop_numbers, _rprop, first=_first_step_size
    ),
}
"""The optimizers whose members step together; the others step one by one."""
