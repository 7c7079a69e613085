"""How long forward holds memory because the user's code refers to it.

`Value.held_until` says when Python let go of each tensor. A tensor that is held also holds what autograd saved on the
way to it. Where the way leads to the loss, that is there until backward anyway; where it does not (an output that is
not used, a branch for a metric), it is freed with the tensor:

    a = conv1(x)        conv2 saved a; backward never comes here, but as long as b is a variable, a is there
    b = conv2(a)

What an attribute of the model holds is there when the next step begins, and is counted until the call that makes its
successor; a program that lets go of it before (sets it to None, writes it twice) holds less than is predicted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from outcore.cost.costs import Costs
from outcore.graph import Graph
from outcore.graph.parts import OUTLIVES


@dataclass
class HeldValues:
    """Positions of the last calls that run while something is held."""

    memory: dict[str, int] = field(default_factory=dict)
    """By the first value in a piece of memory."""
    branches: dict[str, int] = field(default_factory=dict)
    """By call that backward does not come to: as long as what it has saved is there."""
    outliving: set[str] = field(default_factory=set)
    """First values in memory that is held when forward is over."""


def held_values(graph: Graph, costs: Costs, trained: Collection[str]) -> HeldValues:
    """What the user's code holds, and how long; `trained` are the calls that backward goes through."""
    place = {name: i for i, name in enumerate(graph.calls)}
    after = len(place)
    found = HeldValues()

    def hold(first: str, until: int) -> None:
        found.memory[first] = max(found.memory.get(first, 0), until)
        if until == after:
            found.outliving.add(first)

    dies: dict[str, int] = {}
    """The last call that runs while a tensor, or one that autograd made from it, is there."""
    for name, value in graph.values.items():
        used = max((place[c] for c in (*value.consumers, value.producer) if c in place), default=-1)
        held = after if value.held_until == OUTLIVES else place.get(value.held_until or "", -1)
        dies[name] = max(used, held)
        if held >= 0:
            hold(value.base, held)
    for call in reversed(list(graph.calls.values())):
        if call.name in trained:
            continue
        cost = costs.calls[call.name]
        until = found.branches[call.name] = max((dies[name] for name in call.outputs), default=place[call.name])
        for gradient in cost.gradients:
            if gradient.of in dies:
                dies[gradient.of] = max(dies[gradient.of], until)
        for saved in cost.saved:
            if saved.kind == "value":
                hold(saved.of, until)
    return found
