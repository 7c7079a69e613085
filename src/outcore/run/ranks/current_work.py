"""What a rank is doing, for the report to the others when it fails, hangs or dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class CurrentWork:
    """What a rank is doing."""

    stage: int = -1
    doing: str = "start"
    micro_batch: int = -1
    call: str = ""
    step: int = 0
    waiting: bool = False
    """Whether it waits for other ranks; still set after an error that came from there."""

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        """A context around whatever waits for other ranks."""
        self.waiting = True
        yield
        self.waiting = False

    def to_json(self) -> dict[str, Any]:
        """What the rank is doing, as values that JSON can hold."""
        return asdict(self)
