"""Which ranks hold which parameter.

A parameter belongs to the stages whose calls read it, and its gradient is added over every rank that holds one of them.
Usually that is one stage, on the ranks of its replicas. A *tied* parameter belongs to several stages: each of their
ranks holds a copy (one copy, where a rank holds two of the stages), and the gradients of all copies are added up, so
the copies stay equal. Parameters with the same stages form one `SharedParameters`, which is reduced in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from outcore.graph import Graph
from outcore.program import Program


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """Parameters that the same stages read."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    """The ranks that hold a copy, ascending."""
    names: tuple[str, ...]
    """First name of each parameter in the model."""

    @property
    def tied(self) -> bool:
        """Whether several stages read them."""
        return len(self.stages) > 1


@dataclass(frozen=True, slots=True)
class ParameterOwners:
    """The parameters of a model, by the ranks that hold them."""

    shares: tuple[SharedParameters, ...]
    """In ascending order of stages."""
    unused: tuple[str, ...]
    """Parameters that no call reads."""

    @classmethod
    def of(cls, model: nn.Module, graph: Graph, stage_of: Mapping[str, int], program: Program) -> ParameterOwners:
        """Derive the owners from the calls of a graph."""
        name_of = {id(p): name for name, p in model.named_parameters()}
        every = dict(model.named_parameters(remove_duplicate=False))
        stages: dict[str, set[int]] = {}
        for call, stage in stage_of.items():
            for alias in graph.calls[call].parameters:
                if alias in every:
                    stages.setdefault(name_of[id(every[alias])], set()).add(stage)
        holders = program.holders()
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in name_of.values():
            if name in stages:
                groups.setdefault(tuple(sorted(stages[name])), []).append(name)
        shares = [
            SharedParameters(key, tuple(sorted({rank for stage in key for rank in holders[stage]})), tuple(names))
            for key, names in sorted(groups.items())
        ]
        return cls(tuple(shares), tuple(name for name in name_of.values() if name not in stages))

    def on(self, rank: int) -> tuple[str, ...]:
        """Names of the parameters that a rank holds."""
        return tuple(name for share in self.shares if rank in share.ranks for name in share.names)

    def owner(self) -> dict[str, int]:
        """The first rank that holds each parameter: what is counted or written once is counted or written there."""
        return {name: share.ranks[0] for share in self.shares for name in share.names}

    def order(self, names: Sequence[str]) -> dict[str, int]:
        """A number for each parameter, the same on all ranks."""
        return {name: i for i, name in enumerate(names)}
