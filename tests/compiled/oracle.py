"""A compiled step beside a plain one, in float64."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from outcore.compiled.compiled_forward import CompiledForward, CompileSettings
from outcore.compiled.joint_graph import JointGraph
from outcore.compiled.lifetimes import StepOfGraph, step_of
from outcore.compiled.pieces import Piece, PieceChooser, choice_of
from outcore.compiled.reserved import Allocator, step_events
from outcore.compiled.search import Frontier
from outcore.compiled.torch_partitioner import Partitioner, SavedChoice, TracedStep, compile_planned
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.planner.memory.copy_schedule import OffloadTarget
from tests.foreign.scalar import scalar

BOUND = 1e-10
LINK = OffloadTarget(1e8, 1e8, least_bytes=1)


class Chooser(PieceChooser):
    """Chooses a place on the frontier, or the saved values at random, whatever the budget."""

    def __init__(self, forward: CompiledForward, place: float, seed: int | None = None) -> None:
        super().__init__(None, replace(forward.rates, link=LINK if seed is not None else None))
        self.place = place
        self.generator = None if seed is None else random.Random(seed)
        self.sent = 0
        """Values that left the device, of all pieces."""

    def __call__(self, partition: TracedStep) -> SavedChoice:
        """What is saved."""
        if self.generator is not None:
            return self._drawn(partition)
        super().__call__(partition)
        piece = self.pieces.pop()
        points = piece.frontier.points
        chosen = points[round(self.place * (len(points) - 1))]
        self.pieces.append(Piece(piece.frontier, chosen, piece.names))
        return choice_of(JointGraph(partition, self.rates), chosen)

    def _drawn(self, partition: TracedStep) -> SavedChoice:
        assert self.generator is not None
        graph, draw = JointGraph(partition, self.rates), self.generator
        keep = [draw.random() < self.place for _ in graph.nodes]
        drawn = [i for i, one in enumerate(keep) if one and graph.tensor[i] and not graph.is_backward[i]]
        away = frozenset(i for i in range(len(graph.nodes)) if draw.random() < 0.6)
        early = draw.choice((0.0, 1.0, 5.0, 1e6))
        step = step_of(graph, [i for i in drawn if not graph.given[i]], offloaded=away, early=early)
        self.sent += len(step.ways)
        assert living_peak(step) == step.peak_bytes
        assert step.again.isdisjoint(graph.source[i] for i in step.saved)  # nothing is both handed over and made again
        self.pieces.append(Piece(Frontier([step]), step, ()))
        return choice_of(graph, step)


def living_peak(step: StepOfGraph) -> int:
    """The most bytes that live when the buffers of a step come and go as the allocator is told; nothing comes twice,
    goes twice or stays."""
    alive: dict[int, int] = {}
    most = 0
    for name, size in step_events([step], Allocator()):
        if size:
            assert name not in alive
            alive[name] = size
        else:
            del alive[name]
        most = max(most, sum(alive.values()))
    assert not alive
    return most


def planned(model: nn.Module, place: float, *, seed: int | None = None, kernels: bool = False) -> CompiledForward:
    """A model's forward, compiled with the saved values at a place of the frontier, from the fastest at 0."""
    forward = CompiledForward(model, model.forward, CompileSettings(None, OptimizerCost.of(0.0), kernels=kernels))

    def entry(budget_bytes: int | None, known: Any = None, *, copies: bool | None = False) -> Any:
        made = CompiledForward.entry(forward, budget_bytes, known, copies=copies)
        chooser = Chooser(forward, place, seed)
        made.run = compile_planned(forward.inner, Partitioner(chooser), kernels=kernels)
        made.chooser = chooser
        return made

    forward.entry = entry  # type: ignore[method-assign]
    return forward


def doubled(value: Any) -> Any:
    """The same structure in float64."""
    return tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, value)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every probability of dropping at zero: compiled random numbers are others than plain ones."""
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "dropout_p", "drop_prob", "hidden_dropout", "drop_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def step(model: nn.Module, run: Any, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """Loss, gradients and buffers after a forward and a backward."""
    model.zero_grad()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    loss = scalar(run(*args, **kwargs))
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: b.clone() for name, b in model.named_buffers()}


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference over the largest gradient, or over the largest number of a buffer. A gradient that one of
    them does not have is zero: a compiled backward makes those of all inputs of its graph."""
    ours = ours | {name: torch.zeros_like(t) for name, t in theirs.items() if name not in ours}
    theirs = theirs | {name: torch.zeros_like(t) for name, t in ours.items() if name not in theirs}
    largest = max((float(t.abs().max()) for n, t in theirs.items() if n.startswith("grad ") and t.numel()), default=1.0)
    found = 0.0
    for name, there in theirs.items():
        if not there.numel() or not there.is_floating_point():
            found = max(found, 0.0 if torch.equal(there, ours[name]) else 1.0)
            continue
        scale = max(largest, 1e-12) if name.startswith("grad ") else max(1.0, float(there.abs().max()))
        found = max(found, float((ours[name] - there).abs().max()) / scale)
    return found


def compare(model: nn.Module, args: Any, kwargs: Any, place: float, *, seed: int | None = None) -> float:
    """How far a compiled step is from a plain one on a copy; where that is more than rounding, from a step of torch's
    own choice, since some operations of plain PyTorch compute float64 with constants of float32 (hardswish), and a
    checkpoint counts a batch twice."""
    model = without_dropout(model.double())
    args, kwargs = doubled(args), doubled(kwargs)
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    try:
        theirs = step(plain, plain, args, kwargs)
    except RuntimeError as error:
        pytest.skip(f"plain PyTorch cannot run it in float64: {error}")
    run = planned(model, place, seed=seed)
    ours = step(model, run, args, kwargs)
    assert any(entry.chooser.known for entry in run.entries.values()), "nothing was compiled"
    off = worst(ours, theirs)
    if off < BOUND:
        return off
    torch._dynamo.reset()
    return worst(ours, step(again, torch.compile(again, backend="aot_eager_decomp_partition"), args, kwargs))
