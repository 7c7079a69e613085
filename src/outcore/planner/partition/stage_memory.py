"""Which stage holds which memory, for any assignment of units to stages: one Boolean matrix.

A piece of memory is held by every stage in which a unit saves it, and, if it crosses a border, by the stage that makes
it and those that read it; a parameter by every stage that uses it. Which unit touches what is stored once, as two lists
of numbers; an assignment then takes a few passes over them, so thousands of assignments can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

INPUT = -1
"""The producer of the model's inputs."""

Parameter = tuple[str, int, tuple[int, ...]]
"""Name, bytes and the units that use it."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedMemoryUse:
    """One piece of memory, and the units that touch it."""

    name: str
    bytes: int
    producer: int
    """Unit that makes it, or `INPUT`."""
    users: tuple[int, ...]
    """Units that read it, ascending, without the producer."""
    savers: tuple[int, ...]
    """Units that save it for backward, ascending."""
    to_loss: bool = False


def merged(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Parameters of the same users as one, under the first name."""
    found: dict[tuple[int, ...], tuple[str, int]] = {}
    for name, nbytes, users in parameters:
        first, before = found.get(users, (name, 0))
        found[users] = (first, before + nbytes)
    return tuple((name, nbytes, users) for users, (name, nbytes) in found.items())


class StageMemory:
    """Which units touch which memory."""

    def __init__(
        self, memory_uses: Sequence[SharedMemoryUse], parameters: Sequence[Parameter], fixed: Sequence[Parameter]
    ) -> None:
        self._sizes = np.array([f.bytes for f in memory_uses], dtype=np.int64)
        self._producer = np.array([f.producer for f in memory_uses], dtype=np.int64)
        self._to_loss = np.array([i for i, f in enumerate(memory_uses) if f.to_loss], dtype=np.int64)
        self._keepers = _touches([f.savers for f in memory_uses])
        self._users = _touches([f.users for f in memory_uses])
        self._trained = _touches([users for _, _, users in parameters])
        self._trained_sizes = np.array([nbytes for _, nbytes, _ in parameters], dtype=np.int64)
        self._fixed = _touches([users for _, _, users in fixed])
        self._fixed_sizes = np.array([nbytes for _, nbytes, _ in fixed], dtype=np.int64)

    def held(self, stage_of: Numbers, count: int) -> list[int]:
        """Bytes of memory that each stage holds."""
        holds = np.zeros((len(self._sizes), count), dtype=bool)
        memory_use, unit = self._keepers
        holds[memory_use, stage_of[unit]] = True
        memory_use, unit = self._users
        stage = stage_of[unit]
        if len(self._to_loss):
            memory_use = np.concatenate((memory_use, self._to_loss))
            stage = np.concatenate((stage, np.full(len(self._to_loss), count - 1)))
        producer_stage = np.where(self._producer == INPUT, INPUT, stage_of[self._producer])[memory_use]
        elsewhere = stage != producer_stage
        holds[memory_use[elsewhere], stage[elsewhere]] = True
        made = elsewhere & (producer_stage != INPUT)
        holds[memory_use[made], producer_stage[made]] = True
        return _sums(self._sizes, holds)

    def trained(self, stage_of: Numbers, count: int) -> list[int]:
        """Bytes of the trained parameters that each stage holds."""
        return _owned(self._trained, self._trained_sizes, stage_of, count)

    def fixed(self, stage_of: Numbers, count: int) -> list[int]:
        """Bytes of the buffers and frozen parameters that each stage holds."""
        return _owned(self._fixed, self._fixed_sizes, stage_of, count)


def _touches(units: Sequence[Sequence[int]]) -> tuple[Numbers, Numbers]:
    what = [i for i, touching in enumerate(units) for _ in touching]
    return np.array(what, dtype=np.int64), np.array([u for touching in units for u in touching], dtype=np.int64)


def _owned(touches: tuple[Numbers, Numbers], sizes: Numbers, stage_of: Numbers, count: int) -> list[int]:
    holds = np.zeros((len(sizes), count), dtype=bool)
    holds[touches[0], stage_of[touches[1]]] = True
    return _sums(sizes, holds)


def _sums(sizes: Numbers, holds: NDArray[np.bool_]) -> list[int]:
    found: list[int] = (sizes @ holds).tolist() if len(sizes) else [0] * holds.shape[1]
    return found
