"""Networks drawn at random, of odd sizes and layouts, under every policy: the numbers of plain training bit for bit."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError

from ..foreign.sample import one_in, quarter
from .examine import examine
from .odd_networks import odd_network, odd_volume
from .odd_sequences import odd_sequence

KINDS = {"image": odd_network, "volume": odd_volume, "sequence": odd_sequence}
FORMS = {
    "image": ("fp32", "fp32 channels_last"),
    "volume": ("fp32", "fp32 channels_last"),
    "sequence": ("fp32", "bf16"),
}
"""bf16 convolutions only on a GPU: on a CPU, their gradients over images one pixel wide read memory nobody wrote."""
QUICK, MANY = range(12), range(12, 150)


CASES = [(kind, form) for kind, forms in FORMS.items() for form in forms]


@pytest.mark.parametrize(
    ("number", "kind", "precision"),
    [
        *one_in(2, [(n, *case) for n in QUICK for case in CASES]),
        *(pytest.param(n, *case, marks=pytest.mark.slow) for n in quarter(MANY) for case in CASES),
    ],
)
def test_odd_networks(number: int, kind: str, precision: str) -> None:
    _equal(kind, number, torch.device("cpu"), precision)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "fp32 channels_last", "bf16 channels_last"])
@pytest.mark.parametrize("number", range(20))
def test_odd_networks_on_a_gpu(number: int, precision: str, kind: str) -> None:
    _equal(kind, number, torch.device("cuda", 0), precision)


STATES: tuple[dict[str, Any], ...] = (
    {},
    {"parameters": "offload"},
    {"optimizer": "offload"},
    {"parameters": "offload", "optimizer": "offload", "update": "backward"},
    {"parameters": "offload", "gradients": "offload", "stage_bytes": 2**20, "flat_buffer_bytes": 4096},
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "number", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in quarter(range(5, 100)))]
)
def test_steps_of_odd_networks_within_a_budget_or_with_their_state_away(number: int, kind: str) -> None:
    """A smaller batch in between, and what is planned, refused and planned again leaves no trace."""
    foreign, choice = KINDS[kind](number), random.Random(number)
    ((x,), _), state = foreign.inputs(4), STATES[number % len(STATES)]
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = foreign.build().train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        if ours:
            settings: dict[str, Any] = {"optimizer": optimizer, "quiet": True, "measure_s": 0.05}
            outcore.within(model, (x,), memory=None, state=state or None, **settings)
            if not state:
                plan = outcore.memory_plan(model)
                budget = int(choice.choice([0.9, 0.7, 0.5]) * plan.plain_bytes)
                with contextlib.suppress(PlanError):  # as before then
                    outcore.within(model, (x,), memory=budget, costs=plan.keeping.costs, **settings)
        torch.manual_seed(7)
        try:
            losses = [_step(model, optimizer, x[:size]) for size in (4, 4, 2, 4)]
        except RuntimeError as error:
            assert not ours
            pytest.skip(str(error))
        found.append([*losses, *(t.clone() for t in model.state_dict().values())])
    assert all(torch.equal(a.nan_to_num(3), b.nan_to_num(3)) for a, b in zip(*found, strict=True))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def _equal(kind: str, number: int, device: torch.device, precision: str) -> None:
    verdict = examine(KINDS[kind](number), device, precision)
    if verdict.outcome == "not trainable":
        pytest.skip(verdict.note)  # in plain PyTorch: written in place into what backward needs
    assert verdict.outcome in ("equal", "equal where plain repeats itself"), verdict
