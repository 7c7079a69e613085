"""What an engine saves and loads, between its parts and checkpoint files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outcore.errors import CheckpointError
from outcore.run.checkpoint.files import CheckpointWriter, RankFiles, commit, write
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

if TYPE_CHECKING:
    from outcore.run.engine.engine import Engine

_GENERATORS = ".generators"


class EngineState:
    """Saves and loads the state of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._writing: CheckpointWriter | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self._writing is not None

    @property
    def is_ready(self) -> bool:
        """Whether this rank has written its part of it."""
        return self._writing is None or self._writing.done

    def save(self, root: Path, extra: Any, *, keep: int, wait: bool) -> Path | None:
        """Write a checkpoint; in the background unless `wait`. Collective."""
        engine = self.engine
        self.finish()
        if engine.steps % engine.accumulate:
            raise CheckpointError(
                f"{engine.steps % engine.accumulate} of {engine.accumulate} batches are added up; save after an update"
            )
        self._writing = write(
            engine.world, root, engine.steps, self._files(), self._document(extra), keep=keep, wait=wait
        )
        return self.finish() if wait else None

    def finish(self) -> Path | None:
        """Wait for a checkpoint in the background and make it valid; collective."""
        if self._writing is None:
            return None
        writing, self._writing = self._writing, None
        return commit(self.engine.world, writing)

    def load(self, path: str | Path) -> Any:
        """Load a checkpoint; returns what was saved as `extra`. Collective."""
        engine = self.engine
        stored = find_checkpoint(engine.world, path)
        stored.load_weights(engine.assembly.local_state(), engine.model.state_dict())
        document = stored.document
        if engine.optimizer is not None and document["groups"]:
            wanted = {key for key in stored.state if key.rpartition("/")[0] in engine.parameters}
            tensors = dict(stored.read(wanted, stored.state))
            load_optimizer(engine.optimizer, engine.parameters, tensors, document["scalars"], document["groups"])
        if engine.scheduler is not None and document["scheduler"] is not None:
            engine.scheduler.load_state_dict(document["scheduler"])
        if engine.update.scale is not None and document["scale"] is not None:
            engine.update.scale.scale, engine.update.scale.quiet = document["scale"]
        engine.steps, engine.samples = document["step"], document["samples"]
        engine.update.skipped = document["skipped"]
        engine.set_seed(document["seed"])
        if engine.loader_state is not None and document["loader"] is not None:
            engine.loader_state.load(document["loader"])
        prefix = f"{_GENERATORS}/{engine.rank}/"
        if document["ranks"] == engine.world.size and f"{prefix}torch" in stored.state:
            mine = {key for key in stored.state if key.startswith(prefix)}
            restore_generators({k.removeprefix(prefix): t for k, t in stored.read(mine, stored.state)})
        return document["extra"]

    def _owners(self) -> dict[str, int]:
        """The rank that writes each weight: the first that holds it."""
        owners: dict[str, int] = {}
        for rank, names in enumerate(self.engine.world.share(sorted(self.engine.assembly.local_state()))):
            for name in names:
                owners.setdefault(name, rank)
        return owners

    def _files(self) -> RankFiles:
        engine = self.engine
        owners = self._owners()
        depth, ranks = len(engine.plan.stages), engine.world.size
        weights: dict[str, Mapping[str, torch.Tensor]] = {}
        local, claimed = engine.assembly.local_state(), set[str]()
        for stage in engine.stages:
            names = [n for n in engine.assembly.stage_state(stage) if owners[n] == engine.rank and n not in claimed]
            claimed |= set(names)
            if names:
                weights[f"weights-{stage + 1:05d}-of-{depth:05d}.safetensors"] = {n: local[n] for n in names}
        if rest := {n: t for n, t in local.items() if n not in claimed and owners[n] == engine.rank}:
            weights["weights-rest.safetensors"] = rest
        owner = engine.assembly.owners.owner()
        mine = [name for name in engine.parameters if owner[name] == engine.rank]
        state = optimizer_tensors(engine.optimizer, engine.parameters, mine)
        state |= {f"{_GENERATORS}/{engine.rank}/{name}": t for name, t in generators().items()}
        return RankFiles(weights, {f"state-{engine.rank + 1:05d}-of-{ranks:05d}.safetensors": state})

    def _document(self, extra: Any) -> dict[str, Any]:
        engine = self.engine
        owner = engine.assembly.owners.owner()
        mine = [name for name in engine.parameters if owner[name] == engine.rank]
        scalars: dict[str, Any] = {}
        for row in engine.world.share(scalars_of(engine.optimizer, engine.parameters, mine)):
            scalars |= row
        scale, scheduler = engine.update.scale, engine.scheduler
        return {
            "plan": engine.plan.to_json(),
            "network": engine.plan.graph,
            "ranks": engine.world.size,
            "seed": engine.seed,
            "samples": engine.samples,
            "skipped": engine.update.skipped,
            "groups": group_options(engine.optimizer),
            "scalars": scalars,
            "scheduler": plain(scheduler.state_dict(), "the scheduler's state") if scheduler is not None else None,
            "scale": [scale.scale, scale.quiet] if scale is not None else None,
            "loader": engine.loader_state.state() if engine.loader_state is not None else None,
            "extra": plain(extra, "extra"),
        }
