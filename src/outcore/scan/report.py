"""What a scanned layer did: what was chosen and why, predicted memory, solver, iterations."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class SolveOutcome:
    """How the gradients of one segment, or the states of a parallel forward pass, were found.

    Where that was decided on the device it is read from there when first asked for, which synchronises; a pass recorded
    in a CUDA graph reports its last replay.
    """

    _solver: str
    _sweeps: int
    _cells: Tensor | None = None
    _changes: Tensor | None = None
    _correction: float = 0.0
    _done: torch.cuda.Event | None = None

    @classmethod
    def on_device(
        cls, cells: Tensor, warm_ups: int, *, looked: bool, otherwise: str = "products", changes: Tensor | None = None
    ) -> SolveOutcome:
        """The outcome in `cells`: which of the warm-ups were not enough, and last whether products overflowed.

        Args:
            cells: int32, on the device.
            warm_ups: how many were launched.
            looked: whether all of them are known not to have been enough.
            otherwise: what followed where no warm-up was enough.
            changes: numbers of which the largest is the last correction.
        """
        found = cls(otherwise, warm_ups if looked else -warm_ups, cells, changes)
        if cells.is_cuda and not torch.cuda.is_current_stream_capturing():
            found._done = torch.cuda.Event()
            found._done.record()
        return found

    @property
    def known(self) -> bool:
        """Whether reading it does not have to wait; while a CUDA graph is recorded, nothing may be read."""
        if self._cells is None or not self._cells.is_cuda:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        return self._done is not None and self._done.query()

    @property
    def solver(self) -> str:
        """``relaxation``, ``products`` or ``sequential``."""
        return self._read()[0]

    @property
    def sweeps(self) -> int:
        """Sweeps made."""
        return self._read()[1]

    @property
    def gave_up(self) -> bool:
        """Whether something else followed because relaxation was not enough."""
        solver, sweeps = self._read()
        return solver != "relaxation" and sweeps > 1

    @property
    def correction(self) -> float:
        """Largest change of a state in the last of them, where it was asked for."""
        return self._correction if self._changes is None else float(_brought(self._changes, self.known).max())

    def _read(self) -> tuple[str, int]:
        if self._cells is None:
            return self._solver, self._sweeps
        *failed, overflow = _brought(self._cells, self.known).tolist()
        tried = abs(self._sweeps)
        if self._sweeps < 0 and not failed[tried - 1]:
            return "relaxation", 1 + sum(failed[:tried])
        return ("sequential", tried + 2) if overflow else (self._solver, tried + 1)


def _brought(numbers: Tensor, written: bool) -> Tensor:
    """Numbers on the host; those that were written already, without waiting for what the device was told since."""
    if not written or not numbers.is_cuda:
        return numbers.cpu()
    with torch.cuda.stream(_reading(numbers.device)):
        return numbers.cpu()


@functools.cache
def _reading(device: torch.device) -> torch.cuda.Stream:
    """A stream on which nothing is queued but what is read."""
    return torch.cuda.Stream(device)


@dataclass(slots=True)
class LayerReport:
    """One layer of one call."""

    segment: int = 0
    """Steps handled at a time; fewer than the sequence has when memory is short."""
    chunk: int = 0
    predicted_bytes: int = 0
    """Workspace of the backward pass, before it ran."""
    outcomes: list[SolveOutcome] = field(default_factory=list)
    """Per segment; empty until backward has run."""
    engine: str = ""
    """``triton`` or ``torch``."""
    forward: SolveOutcome | None = None
    """Of the parallel forward pass; none where it was not asked for."""
    failure: str = ""
    """Why the forward pass was given to torch although a parallel one was asked for."""

    @property
    def iterations(self) -> int:
        """Of the parallel forward pass."""
        return 0 if self.forward is None else self.forward.sweeps

    @property
    def correction(self) -> float:
        """Largest correction of a state in its last iteration."""
        return 0.0 if self.forward is None else self.forward.correction

    @property
    def fell_back(self) -> str:
        """Why the forward pass ran sequentially although a parallel one was asked for."""
        if self.forward is not None and self.forward.solver == "sequential":
            return self.failure or f"states still change by {self.correction:.1e} after the longest warm-up"
        return self.failure

    @property
    def solvers(self) -> list[str]:
        """Per segment: ``relaxation``, ``products`` or ``sequential``."""
        return [outcome.solver for outcome in self.outcomes]

    @property
    def sweeps(self) -> int:
        """Of all segments together."""
        return sum(outcome.sweeps for outcome in self.outcomes)

    def __str__(self) -> str:
        size = f"{self.predicted_bytes:,} bytes predicted"
        parts = [f"chunks of {self.chunk} in segments of {self.segment} steps, {size}"]
        if self.solvers:
            parts.append(f"{', '.join(dict.fromkeys(self.solvers))} in {self.sweeps} sweeps ({self.engine})")
        if self.forward is not None:
            parts.append(f"forward in {self.iterations} iterations, last correction {self.correction:.1e}")
        if self.fell_back:
            parts.append(f"forward sequential: {self.fell_back}")
        return "; ".join(parts)


@dataclass(slots=True)
class Report:
    """The last call of a scanned module."""

    backward: str
    """``scan`` or ``torch``."""
    reason: str
    layers: list[LayerReport] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"backward by {self.backward}: {self.reason}"]
        lines += [f"  layer {i}: {layer}" for i, layer in enumerate(self.layers)]
        return "\n".join(lines)
