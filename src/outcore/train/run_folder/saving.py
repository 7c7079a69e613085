"""The state of a plain run in the runtime's own checkpoints.

There is one format (`outcore.run.checkpoint.files`): what one process saved here, the engine can load on many ranks,
and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outcore.run.checkpoint.files import RankFiles, commit, write
from outcore.run.checkpoint.restore import find_checkpoint
from outcore.run.checkpoint.training_state import (
    generators,
    group_options,
    load_optimizer,
    optimizer_tensors,
    plain,
    restore_generators,
    scalars_of,
)
from outcore.run.ranks.world import World

__all__ = ["load_state", "save_state"]

_GENERATORS = ".generators/0/"


def save_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    step: int,
    samples: int,
    extra: Mapping[str, Any],
    keep: int,
) -> None:
    """Write weights, optimizer, loss scale and random states, and the loop's `extra` state."""
    parameters = _trained(model)
    state = optimizer_tensors(optimizer, parameters, parameters)
    state |= {_GENERATORS + name: tensor for name, tensor in generators().items()}
    document = {
        "plan": None,
        "network": None,
        "ranks": 1,
        "seed": torch.initial_seed(),
        "samples": samples,
        "skipped": 0,
        "groups": group_options(optimizer),
        "scalars": scalars_of(optimizer, parameters, parameters),
        "scheduler": None,
        "scale": [scaler.get_scale(), scaler._get_growth_tracker()] if scaler.is_enabled() else None,
        "loader": None,
        "extra": plain(extra, "the state of the run"),
    }
    files = RankFiles(
        {"weights-00001-of-00001.safetensors": model.state_dict()}, {"state-00001-of-00001.safetensors": state}
    )
    world = _alone()
    commit(world, write(world, path, step, files, document, keep=keep, wait=True))


def load_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> dict[str, Any]:
    """Read all of it back; returns the loop's state."""
    stored = find_checkpoint(_alone(), path)
    stored.load_weights(_weights(model), model.state_dict())
    document, parameters = stored.document, _trained(model)
    if document["groups"]:
        wanted = {key for key in stored.state if key.rpartition("/")[0] in parameters}
        tensors = dict(stored.read(wanted, stored.state))
        load_optimizer(optimizer, parameters, tensors, document["scalars"], document["groups"])
    if scaler.is_enabled() and document["scale"] is not None:
        scale, quiet = document["scale"]
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": quiet})
    if document["ranks"] == 1 and _GENERATORS + "torch" in stored.state:
        mine = {key for key in stored.state if key.startswith(_GENERATORS)}
        restore_generators({k.removeprefix(_GENERATORS): t for k, t in stored.read(mine, stored.state)})
    return dict(document["extra"] or {})


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers to be read, those that are tied by one of their names."""
    seen: set[tuple[int, torch.Size]] = set()
    found = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if tensor.numel() == 0 or key not in seen:
            seen.add(key)
            found[name] = tensor
    return found


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _alone() -> World:
    return World(0, 1, 0, None, None, owned=False)
