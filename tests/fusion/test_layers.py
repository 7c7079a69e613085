"""Every layer of torch.nn, fused, has the gradients of each member alone; how each is run is known."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import outcore
from outcore.fusion.program.values import Stacked
from outcore.fusion.rules.loss import cross_entropy
from tests.fusion.layers import CASES, NOT_LAYERS, RANDOM, Probe

MEMBERS = 3
FUSED_FAMILIES = ("Conv", "BatchNorm1d", "Linear", "MaxPool", "LayerNorm", "GroupNorm", "LSTM", "GRU", "RNN", "PReLU")


def _loss(output: Tensor, _: Any) -> Tensor:
    return output


def run_case(name: str) -> tuple[float, str, str | None]:
    """The largest difference to serial gradients and buffers, how the layer was run, and why it ran alone."""
    case = CASES[name]
    torch.manual_seed(3)
    inputs = case.inputs()
    models = []
    for i in range(MEMBERS):
        torch.manual_seed(100 + i)
        models.append(Probe(case.make().double(), inputs, case.positive))
        models[-1].layer.train(mode="eval" not in name and name != "SyncBatchNorm")
    twins = [copy.deepcopy(m) for m in models]
    array = outcore.fuse(
        models, loss=_loss, optimizer=lambda p: optim.SGD(p, 1.0), seeds=list(range(MEMBERS)), check=False
    )
    losses = array.step(inputs, torch.zeros(1))
    worst = 0.0
    for i, twin in enumerate(twins):
        torch.manual_seed(i)
        optimizer = optim.SGD(twin.parameters(), 1.0)
        found = twin(*inputs)
        found.backward()
        optimizer.step()
        worst = max(worst, float((found.detach() - losses[i]).abs()))
        ours = array[i].state_dict()
        for key, value in twin.state_dict().items():
            worst = max(worst, float((value.double() - ours[key].double()).abs().max()))
    ways = [way for call, way in array.coverage.items() if call.startswith("model.layer")]
    order = ["members", "vmap", "fused", "shared"]
    way = min(ways, key=order.index) if ways else "none"
    return worst, way, next((n for n in array.notes), None)


@pytest.mark.parametrize("name", CASES)
def test_layer_has_the_gradients_of_each_member_alone(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # what some layers say of themselves
        worst, way, _ = run_case(name)
    assert worst < 1e-10, f"{name} ({way}) differs by {worst:.1e}"


def test_every_layer_of_torch_is_tried() -> None:
    known = {n for n in dir(nn) if inspect.isclass(getattr(nn, n)) and issubclass(getattr(nn, n), nn.Module)}
    tried = {name.partition(",")[0] for name in CASES}
    missing = {n for n in known - tried - NOT_LAYERS if not n.startswith("Lazy")}
    assert not missing, f"say in layers.py how to try {sorted(missing)}"


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in CASES
        if n.startswith(FUSED_FAMILIES)
        and n not in (*RANDOM, "Linear, one row", "Linear, three dims")  # any way is fine
        and not any(word in n for word in ("no batch", "Loss"))
    ],
)
def test_what_has_a_rule_is_run_by_it(name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        _, way, note = run_case(name)
    assert way == "fused" and note is None


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("own_targets", [True, False])
@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3), (4, 5, 2, 3), (4, 3, 5), (4, 2, 3, 5)], ids=str)
def test_cross_entropy_is_that_of_each_member(shape: tuple[int, ...], own_targets: bool, reduction: str) -> None:
    """Five classes, second in memory as in name, or last in memory as a linear layer leaves them."""
    torch.manual_seed(0)
    leaf = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    scores = leaf if shape[1] == 5 else leaf.movedim(-1, 2)
    goals = torch.randint(5, (3, shape[0], *scores.shape[3:]))
    if not own_targets:
        goals = goals[:1].expand_as(goals)
    given = Stacked(goals) if own_targets else goals[0]
    made = cross_entropy(Stacked(scores), given, ignore_index=2, reduction=reduction).tensor
    expected = torch.stack(
        [F.cross_entropy(s, g, ignore_index=2, reduction=reduction) for s, g in zip(scores, goals, strict=True)]
    )
    assert torch.allclose(made, expected, rtol=1e-13)
    weights = torch.arange(1.0, 4.0, dtype=torch.float64)
    (found,), (wanted,) = (torch.autograd.grad(loss @ weights, leaf) for loss in (made, expected))
    assert torch.allclose(found, wanted, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize(
    "settings",
    [{"weight": torch.ones(4)}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"target": torch.rand(3, 5, 4)}],
    ids=["weighted", "smoothed", "not reduced", "probabilities"],
)
def test_cross_entropy_that_has_no_rule_is_left_to_others(settings: dict[str, Any]) -> None:
    goals = Stacked(settings.pop("target", torch.randint(4, (3, 5))))
    assert cross_entropy(Stacked(torch.randn(3, 5, 4)), goals, **settings) is NotImplemented
