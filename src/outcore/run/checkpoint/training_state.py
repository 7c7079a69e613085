"""The state of training as it is stored: optimizer, scheduler, loss scale, generators.

Tensors go into safetensors under ``parameter/key`` (``layer1.weight/exp_avg``), everything else into JSON. State is
named after parameters, so that it can be put together again for whichever parameters a rank holds; the options of
parameter groups are the same on all ranks and stored once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from outcore.errors import CheckpointError


def optimizer_tensors(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The tensors an optimizer keeps for the named parameters."""
    if optimizer is None:
        return {}
    return {
        f"{name}/{key}": value
        for name in names
        for key, value in optimizer.state.get(parameters[name], {}).items()
        if isinstance(value, torch.Tensor)
    }


def scalars_of(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter], names: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """The other values an optimizer keeps for the named parameters."""
    if optimizer is None:
        return {}
    found = {}
    for name in names:
        rows = optimizer.state.get(parameters[name], {})
        if rest := {key: value for key, value in rows.items() if not isinstance(value, torch.Tensor)}:
            found[name] = plain(rest, f"the optimizer's state of {name}")
    return found


def group_options(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Options of the parameter groups."""
    if optimizer is None:
        return []
    rows = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [plain(row, "the optimizer's options") for row in rows]


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
    options: list[dict[str, Any]],
) -> None:
    """Give an optimizer the stored state of the parameters it has on this rank."""
    if len(options) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(options)} parameter groups, this optimizer {len(optimizer.param_groups)}; "
            "use the optimizer and the groups it was saved with"
        )
    state: dict[str, dict[str, Any]] = {name: dict(scalars.get(name, {})) for name in parameters}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        state[name][entry] = tensor
    name_of = {id(p): name for name, p in parameters.items()}
    current = optimizer.state_dict()
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    if foreign := sum(id(p) not in name_of for p in ordered):
        raise CheckpointError(
            f"{foreign} of {len(ordered)} parameters of the optimizer are not the model's, and a checkpoint names them "
            "by the model; give the optimizer the parameters of the model"
        )
    current["state"] = {i: state[name_of[id(p)]] for i, p in enumerate(ordered) if state[name_of[id(p)]]}
    for group, stored in zip(current["param_groups"], options, strict=True):
        for key, value in stored.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    optimizer.load_state_dict(current)


def plain(value: Any, what: str) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(inner, what) for key, inner in value.items() if not callable(inner)}
    if isinstance(value, list | tuple):
        return [plain(inner, what) for inner in value]
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise CheckpointError(f"{what} holds a {type(value).__name__}, which JSON cannot hold") from None


def generators() -> dict[str, torch.Tensor]:
    """The states of torch's, NumPy's and Python's generators on this rank."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *numbers, int(gauss is not None)], dtype=torch.int64, device="cpu"),
        "python_gauss": torch.tensor([gauss or 0.0], dtype=torch.float64, device="cpu"),
        "numpy": torch.from_numpy(np.concatenate([keys.astype(np.int64), [position, has_gauss]])),  # type: ignore[union-attr]
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64, device="cpu"),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to stored states."""
    torch.set_rng_state(states["torch"])
    version, *numbers, has = states["python"].tolist()
    random.setstate((version, tuple(numbers), float(states["python_gauss"]) if has else None))
    *keys, position, has_gauss = states["numpy"].tolist()
    cached = float(states["numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
