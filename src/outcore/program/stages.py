"""What a schedule needs to know of a network that was cut into stages.

The partitioner makes it from a graph and its costs; schedules, static checks and the simulator use nothing else. All
figures are for one micro-batch, of one replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outcore.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the network that runs on one rank."""

    calls: tuple[str, ...]
    """Names of the graph's calls in it, in order."""
    forward_s: float
    backward_s: float
    saved_bytes: int
    """Held from the forward of a micro-batch until its backward, including what it receives from and makes for
    others."""
    workspace_bytes: int
    """Needed on top while a forward or backward runs."""
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    """Optimizer state."""
    optimizer_s: float = 0.0
    update_bytes: int = 0
    """Needed on top while the optimizer steps."""

    @property
    def trains(self) -> bool:
        """Whether it has gradients to reduce and parameters to step."""
        return self.gradient_bytes > 0


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that is sent from the stage that makes it directly to each stage that uses it."""

    value: str
    source: int
    targets: tuple[int, ...]
    """Stages that use it, ascending, all greater than the source."""
    bytes: int
    has_gradient: bool
    """Whether a gradient of the same size comes back from each target."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Parameters that several stages use: each has a copy, and the gradients of all copies are added up."""

    stages: tuple[int, ...]
    """Ascending, at least two."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Stages:
    """A network cut into stages."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            raise ProgramError("there are 0 stages; needed at least 1")
        seen: set[str] = set()
        for edge in self.edges:
            if edge.value in seen:
                raise ProgramError(f"value {edge.value!r} has two edges; give it one, with all its targets")
            seen.add(edge.value)
            later = range(edge.source + 1, len(self.stages))
            if edge.source < 0 or not edge.targets or any(target not in later for target in edge.targets):
                raise ProgramError(
                    f"value {edge.value!r} goes from stage {edge.source} to {list(edge.targets)}; "
                    f"needed targets after it and below {len(self.stages)}"
                )
            if list(edge.targets) != sorted(set(edge.targets)):
                raise ProgramError(
                    f"value {edge.value!r} has targets {list(edge.targets)}; needed ascending, each once"
                )

    def __len__(self) -> int:
        return len(self.stages)

    @classmethod
    def uniform(
        cls,
        depth: int,
        *,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        saved_bytes: int = 0,
        edge_bytes: int = 0,
        gradient_bytes: int = 0,
    ) -> Stages:
        """A chain of equal stages, as the closed forms of schedules assume.

        >>> len(Stages.uniform(4)), Stages.uniform(4).edges[0].targets
        (4, (1,))
        """
        stage = Stage((), forward_s, backward_s, saved_bytes, 0, gradient_bytes, gradient_bytes, 0)
        edges = (Edge(f"x{i}", i, (i + 1,), edge_bytes, True) for i in range(depth - 1))
        return cls((stage,) * depth, tuple(edges))

    def incoming(self) -> tuple[tuple[Edge, ...], ...]:
        """For each stage, the values it takes from earlier ones."""
        found: list[list[Edge]] = [[] for _ in self.stages]
        for edge in self.edges:
            for target in edge.targets:
                found[target].append(edge)
        return tuple(map(tuple, found))

    def outgoing(self) -> tuple[tuple[Edge, ...], ...]:
        """For each stage, the values it gives to later ones."""
        found: list[list[Edge]] = [[] for _ in self.stages]
        for edge in self.edges:
            found[edge.source].append(edge)
        return tuple(map(tuple, found))

    def to_json(self) -> dict[str, Any]:
        """The stages as plain lists, dictionaries, strings and numbers."""
        ties = {"ties": [asdict(tie) for tie in self.ties]} if self.ties else {}
        return {"stages": [asdict(s) for s in self.stages], "edges": [asdict(e) for e in self.edges]} | ties

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Stages:
        """The stages that `to_json` wrote."""
        stages = (Stage(**{**row, "calls": tuple(row["calls"])}) for row in data["stages"])
        edges = (Edge(**{**row, "targets": tuple(row["targets"])}) for row in data["edges"])
        ties = (Tie(tuple(row["stages"]), row["bytes"]) for row in data.get("ties", ()))
        return cls(tuple(stages), tuple(edges), tuple(ties))
