"""What a schedule needs to know of a network that was cut into stages.

The partitioner makes it from a graph and its costs; schedules, static checks and the simulator work on it alone. All
figures are for one micro-batch, of one replica.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Edge", "Stage", "Stages"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the network that runs on one rank."""

    calls: tuple[str, ...]
    """Names of the graph's calls in it, in order."""
    forward_s: float
    backward_s: float
    saved_bytes: int
    """Held from the forward of a micro-batch until its backward."""
    workspace_bytes: int
    """Needed on top while a forward or backward runs."""
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    """Optimizer state."""
    optimizer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that crosses from the stage that makes it straight to each stage that uses it."""

    value: str
    source: int
    targets: tuple[int, ...]
    """Stages that use it, ascending, all greater than the source."""
    bytes: int
    has_gradient: bool
    """Whether a gradient of the same size comes back from each target."""


@dataclass(frozen=True, slots=True)
class Stages:
    """A network cut into stages."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]

    def __len__(self) -> int:
        return len(self.stages)
