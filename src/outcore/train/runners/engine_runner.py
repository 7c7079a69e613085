"""The engine behind the loop's interface: many ranks by a plan, or one by the same program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outcore.data import Batch
from outcore.loss_scale import LossScale
from outcore.program import Timeline
from outcore.run import Engine
from outcore.run.ranks.world import World
from outcore.train.examples.feed import MicroBatch
from outcore.train.runners.runner import StepOutcome
from outcore.train.runners.shared_output import packed, unpacked
from outcore.train.scored_output import pick

__all__ = ["EngineRunner", "finite_only"]

_COUNTED = 2
"""The step in which live bytes are counted on a CPU: the optimizer has its state by then."""


def finite_only() -> LossScale:
    """A loss scale of one that never changes: steps whose gradients are not finite are left out."""
    return LossScale(scale=1.0, growth=1.0, backoff=1.0)


class EngineRunner:
    """Steps by a plan."""

    whole_steps = True

    def __init__(self, engine: Engine, world: World, key: str | None = None) -> None:
        self.engine, self._world, self._key = engine, world, key
        self.lazy = engine.plan.spatial is not None
        """Whether each rank reads the part of a slide that it needs."""
        self.rank = engine.rank
        self.optimizer = engine.optimizer
        self.replica = (engine.replica, engine.plan.replicas)
        self._peak: int | None = None
        self._steps = 0

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepOutcome:
        """As many steps of the engine as it accumulates; the update comes with the last."""
        engine = self.engine
        self._steps += 1
        cuda, counted = engine.device.type == "cuda", self._steps == _COUNTED
        if cuda:
            torch.cuda.reset_peak_memory_stats(engine.device)
        elif counted:
            engine.count_memory()
        skipped = engine.update.skipped
        losses = [engine.step(_arguments(m.inputs, self.lazy), m.targets) for m in micro_batches]
        if cuda:
            self._peak = torch.cuda.max_memory_allocated(engine.device)
        elif counted:
            self._peak = max(engine.timeline().peak_bytes)
            engine.count_memory(False)
        updated = engine.update.skipped == skipped
        return StepOutcome(sum(losses) / len(losses), engine.update.norm, updated)

    def evaluate(self, micro_batch: MicroBatch) -> tuple[float, Any]:
        """The loss, and on the first rank the output, or for a map scores of the same classes, where it can be sent."""
        inputs = _arguments(micro_batch.inputs, self.lazy)
        loss = self.engine.evaluate(inputs, micro_batch.targets)
        output = self.engine.predict(inputs)
        world = self.engine.world
        if world.size == 1:
            return loss, output
        shared = self.engine.share(packed(pick(output, self._key), micro_batch.targets))
        found = next((said for said in shared if said is not None), None)
        return loss, None if found is None or self.rank else unpacked(found)

    def peak_bytes(self) -> int | None:
        """The allocator's peak on this rank's GPU; on CPUs that of the rank with most, counted in one step."""
        return self._peak

    def replan(self) -> str | None:
        """Return None: a plan of many ranks is not changed in the middle of a run."""
        return None

    def timeline(self) -> Timeline | None:
        """The last step on every rank."""
        return self.engine.timeline() if self.engine.steps else None

    def close(self) -> None:
        """Leave the other ranks."""
        self.engine.close()
        self._world.close()

    def save(self, path: Path, position: dict[str, Any], *, keep: int) -> None:
        """Write a checkpoint, all ranks together."""
        self.engine.save(path, extra=position, keep=keep)

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint, whichever runner wrote it."""
        return dict(self.engine.load(path) or {})

    def agree(self, stop_request: int) -> int:
        """The signal that any rank was sent, the same on all; 0 for none."""
        return self.engine.largest(stop_request)

    def broadcast(self, figures: dict[str, float]) -> dict[str, float]:
        """The figures of the first rank, on all."""
        return dict(self.engine.share(figures)[0])


def _arguments(inputs: Any, lazy: bool) -> Any:
    if isinstance(inputs, (tuple, list)):
        return tuple(_arguments(x, lazy) for x in inputs)
    return inputs.tensor() if isinstance(inputs, Batch) and not lazy else inputs
