"""Encode, then offload: the smaller form leaves the device, and what comes back is what it would be without leaving."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.program.policies import Encode

TANH = "3#0:out"


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 3), nn.Flatten(), nn.LazyLinear(3))


def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, 32, 32)


def ready() -> nn.Module:
    model = network()
    model(images())
    return model


def gradients(model: nn.Module, **kept: bool) -> list[torch.Tensor]:
    torch.manual_seed(2)
    loss = model(images()).square().mean()
    found = list(torch.autograd.grad(loss, list(model.parameters()), **kept))
    if kept:
        found += torch.autograd.grad(loss, list(model.parameters()))
    return found


def under(plan: dict[str, str]) -> nn.Module:
    return outcore.within(ready(), (images(),), memory=None, plan=plan, quiet=True)


def buffers() -> dict[str, str]:
    """What there is to encode, with its codec."""
    plain = outcore.memory_plan(under({}))
    return {
        b.name: c for b in plain.keeping.buffers.values() for c in plain.keeping.choices(b) if isinstance(c, Encode)
    }


def test_exact_forms_that_leave_give_plain_gradients() -> None:
    plan = {name: f"{how}+offload" for name, how in buffers().items() if how != Encode("sign")}
    assert set(plan.values()) >= {"encode:window+offload", "encode:bits+offload"}
    want = gradients(ready())
    model = under(plan)
    for _ in range(2):
        got = gradients(model, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(want * 2, got, strict=True))
    model(images())  # forward without backward, and on
    assert all(torch.equal(a, b) for a, b in zip(want, gradients(model), strict=True))


@pytest.mark.parametrize("codec", ["half", "bf16", "int8", "int4"])
def test_rounded_numbers_are_the_same_wherever_they_were(codec: str) -> None:
    here, away = (under({TANH: f"encode:{codec}{more}"}) for more in ("", "+offload"))
    assert all(torch.equal(a, b) for a, b in zip(gradients(here), gradients(away), strict=True))
    effect = outcore.gradient_effect(away)
    assert effect is not None and effect.codecs == {codec: 1} and effect.held_bytes < 0.55 * effect.bytes
    assert effect.whole is not None and effect.whole.relative > 0


def test_only_the_smaller_form_is_copied_and_nothing_is_held() -> None:
    whole, small = (outcore.memory_plan(under({TANH: how})).outcome for how in ("offload", "encode:half+offload"))
    here = outcore.memory_plan(under({TANH: "encode:half"})).outcome
    assert small.transfers is not None and whole.transfers is not None
    assert small.transfers.bytes == whole.transfers.bytes // 2
    assert (small.curve <= here.curve).all() and small.curve.sum() < here.curve.sum()


def test_what_cannot_leave_encoded_is_refused() -> None:
    with pytest.raises(PlanError, match="in the data"):
        under({TANH: "encode:sparse+offload"})
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(1800, 2))
    with pytest.raises(PlanError, match="bits stay"):
        outcore.within(model, (images(),), memory=None, plan={"1#0:out": "encode:sign+offload"}, quiet=True)
