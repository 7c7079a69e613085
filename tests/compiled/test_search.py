"""The frontier of a joint graph, and the lifetimes that it rests on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from outcore.compiled.joint_graph import JointGraph, Rates
from outcore.compiled.lifetimes import Moment, StepOfGraph, step_of
from outcore.compiled.pieces import choose_together, peak_of
from outcore.compiled.search import Frontier, search
from outcore.compiled.torch_partitioner import Partitioner, SavedChoice, TracedStep, compile_planned

WIDTH, LAYERS, BATCH = 32, 8, 64
VALUE = WIDTH * BATCH * 4


@cache
def joint(activation: Callable[[], nn.Module] = nn.Tanh) -> JointGraph:
    """The joint graph of a chain of linear layers, each with an activation."""
    found: list[JointGraph] = []

    def choose(partition: TracedStep) -> SavedChoice:
        found.append(JointGraph(partition, Rates.of(torch.device("cpu"))))
        return SavedChoice(partition.torch_choice(1.0))

    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), activation()) for _ in range(LAYERS)]
    run = compile_planned(nn.Sequential(*layers).forward, Partitioner(choose), kernels=False)
    run(torch.randn(BATCH, WIDTH)).sum().backward()
    return found[0]


def named(graph: JointGraph, name: str) -> list[int]:
    """The values of the forward that an operation makes."""
    return [i for i, node in enumerate(graph.nodes) if node.name.startswith(name) and graph.is_forward[i]]


def test_a_step_that_saves_every_activation_holds_what_can_be_counted_by_hand() -> None:
    graph = joint()
    step = step_of(graph, named(graph, "tanh"))
    weight = WIDTH * WIDTH * 4
    assert step.saved_bytes == LAYERS * VALUE
    assert step.forward_bytes == LAYERS * VALUE
    # When backward begins there are all activations, the gradient of the result, and that of the last layer's input.
    # It ends with the gradients of all weights, the result, and its own last value.
    begin, end = (LAYERS + 2) * VALUE, LAYERS * weight + 2 * VALUE
    assert begin <= step.peak_bytes <= max(begin + VALUE, end + VALUE)
    assert not [i for i in step.again if graph.is_forward[i] and not graph.nodes[i].name.startswith("permute")]


def test_a_step_that_saves_nothing_makes_all_again_and_is_slower() -> None:
    graph = joint()
    kept, none = step_of(graph, named(graph, "tanh")), step_of(graph, [])
    assert none.saved_bytes < kept.saved_bytes
    assert none.seconds > kept.seconds
    assert {i for i in none.again if graph.is_forward[i]} >= set(named(graph, "mm")[:-1])


def test_what_must_not_run_twice_is_saved_whatever_was_chosen() -> None:
    def drop() -> nn.Module:
        return nn.Dropout(0.5)

    graph = joint(drop)
    drawn = {i for i in range(len(graph.nodes)) if graph.fixed[i]}
    step = step_of(graph, [])
    assert drawn
    assert not step.again & drawn


def test_copies_that_inductor_makes_for_channels_last_are_held_until_their_backward() -> None:
    found: list[JointGraph] = []

    def choose(partition: TracedStep) -> SavedChoice:
        if not partition.channels_last:
            pytest.skip("Inductor leaves convolutions as they are here")
        found.append(JointGraph(partition, Rates.of(torch.device("cpu"))))
        return SavedChoice(partition.torch_choice(1.0))

    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Tanh())
    images = torch.randn(2, 3, 32, 32)
    compile_planned(network.forward, Partitioner(choose), kernels=False)(images).sum().backward()
    graph = found[0]
    copied = images.nbytes + sum(p.nbytes for p in network.parameters() if p.dim() == 4)
    assert sum(graph.bytes[i] for i in graph.converted) == copied
    saved = [graph.index[node] for node in graph.partition.torch_choice(1.0)]
    counted = step_of(graph, saved)
    graph.converted = frozenset()
    without = step_of(graph, saved)
    assert counted.forward_bytes == without.forward_bytes + copied
    assert without.peak_bytes < counted.peak_bytes <= without.peak_bytes + copied


def test_a_frontier_gets_slower_as_it_gets_smaller_and_begins_with_torchs_choice() -> None:
    graph = joint()
    frontier = search(graph)
    points = frontier.points
    assert all(a.seconds <= b.seconds and a.peak_bytes > b.peak_bytes for a, b in itertools.pairwise(points))
    theirs = step_of(graph, [graph.index[node] for node in graph.partition.torch_choice(1.0)])
    assert points[0].seconds <= theirs.seconds
    assert frontier.least.peak_bytes < 0.75 * theirs.peak_bytes
    sizes = range(frontier.least.peak_bytes, points[0].peak_bytes + VALUE, VALUE // 4)
    found = [frontier.within(size) for size in sizes]
    assert all(p is not None and p.peak_bytes <= size for p, size in zip(found, sizes, strict=True))
    times = [p.seconds for p in found if p is not None]
    assert times == sorted(times, reverse=True)
    assert frontier.within(frontier.least.peak_bytes - 1) is None


def test_the_same_graph_has_the_same_frontier() -> None:
    first, second = search(joint()), search(joint())
    assert [p.saved for p in first.points] == [p.saved for p in second.points]


@pytest.mark.parametrize("seed", range(30))
def test_pieces_meet_a_budget_together_if_any_choice_does(seed: int) -> None:
    draw = random.Random(seed)
    frontiers = []
    for _ in range(draw.randint(1, 3)):
        size, seconds, points = draw.randint(50, 100), 1.0, []
        for _ in range(draw.randint(1, 5)):
            points.append(point(size, seconds, draw.randint(1, size)))
            size, seconds = max(2, size - draw.randint(1, 20)), seconds + draw.random()
        frontiers.append(Frontier(points))
    every = list(itertools.product(*(f.points for f in frontiers)))
    for budget in range(0, 320, 10):
        possible = [c for c in every if peak_of(c) <= budget]
        chosen = choose_together(frontiers, budget)
        if chosen is not None:
            assert peak_of(chosen) <= budget
        assert (chosen is None) == (not possible)
        if len(frontiers) == 1:
            assert chosen is None or chosen[0].seconds == min(c[0].seconds for c in possible)


def point(peak_bytes: int, seconds: float, held: int) -> StepOfGraph:
    """A step of which only sizes and time matter."""
    moment = Moment("backward", 0, 0)
    return StepOfGraph(frozenset(), peak_bytes, seconds, moment, held, frozenset(), held, [], [])
