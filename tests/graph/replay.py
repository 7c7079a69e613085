"""The oracle of capture: the model itself, run on the same data from the same random state."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn

import outcore
from outcore.graph.structure import leaves

__all__ = ["assert_same", "run", "scalar"]


def scalar(output: Any) -> torch.Tensor:
    """A number that depends on every differentiable tensor in the output."""
    parts = [t.double().square().mean() for _, t in leaves(output, torch.Tensor) if t.requires_grad]
    return sum(parts, torch.zeros((), dtype=torch.double))


def run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], owner: nn.Module) -> dict[str, torch.Tensor]:
    """One forward and backward; returns outputs, gradients, buffers and the random state afterwards."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    owner.zero_grad()
    args, kwargs = copy.deepcopy((args, kwargs))
    output = model(*args, **kwargs)
    facts = {f"output {path}": t.detach().clone() for path, t in leaves(output, torch.Tensor)}
    facts["random state"] = torch.get_rng_state()
    loss = scalar(output)
    if loss.requires_grad:
        loss.backward()
    facts |= {f"gradient {n}": p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None}
    facts |= {
        f"input gradient {i}": t.grad
        for i, (_, t) in enumerate(leaves((args, kwargs), torch.Tensor))
        if t.grad is not None
    }
    facts |= {f"state {n}": t.detach().clone() for n, t in owner.state_dict().items() if isinstance(t, torch.Tensor)}
    return facts


def assert_same(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    """Bitwise equality, fact by fact."""
    assert expected.keys() == actual.keys(), sorted(expected.keys() ^ actual.keys())[:5]
    wrong = [
        n
        for n, t in expected.items()
        if not (t.shape == actual[n].shape and torch.equal(t.nan_to_num(), actual[n].nan_to_num()))
    ]
    assert not wrong, f"{len(wrong)} of {len(expected)} differ: {wrong[:5]}"


def check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> outcore.Graph:
    """Capture a copy of the model and compare a replayed step with the model's own; returns the graph."""
    kwargs = kwargs or {}
    mine, theirs = copy.deepcopy(model), copy.deepcopy(model)
    graph = outcore.capture(mine, args, kwargs)
    assert_same(run(theirs, args, kwargs, theirs), run(graph.module, args, kwargs, mine))
    return graph
