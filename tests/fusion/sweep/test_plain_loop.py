"""The plain loop of a sweep: each member as if trained alone, whoever its neighbours are."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from outcore.fusion.sweep.plain_loop import PlainLoop


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def loop(count: int) -> PlainLoop:
    models = [build(i) for i in range(count)]
    return PlainLoop(models, loss=F.cross_entropy, optimizer=lambda p, i: torch.optim.SGD(p, lr=0.1 * (i + 1)))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 6, generator=draw), torch.randint(3, (4,), generator=draw)) for _ in range(count)]


def test_a_member_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    one, three = loop(1), loop(3)
    before = torch.get_rng_state()
    for x, y in batches(5):
        assert float(one.step(x, y)[0]) == float(three.step(x, y)[0])
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.evaluate(*batches(1)[0])[:1], three.evaluate(*batches(1)[0])[:1])
    three[0].save(tmp_path / "m.safetensors")
    assert all(torch.equal(t, one[0].model.state_dict()[n]) for n, t in load_file(tmp_path / "m.safetensors").items())


def test_stopped_and_diverged_members_change_no_more() -> None:
    members = loop(3)
    members.stop(1)
    with torch.no_grad():
        members[2].model[0].weight.fill_(torch.nan)  # type: ignore[operator]
    state = copy.deepcopy(members[1].model.state_dict())
    losses = members.step(*batches(1)[0])
    assert members.status == ["training", "stopped", "diverged"] and losses[1].isnan() and losses[2].isnan()
    assert all(torch.equal(t, members[1].model.state_dict()[n]) for n, t in state.items())
    members.refill(2, build(7))
    members.keep([2, 0])
    assert members.status == ["training", "training"] and len(members) == 2
    assert members[0].model.training
