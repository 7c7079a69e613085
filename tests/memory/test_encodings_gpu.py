"""Encodings on a GPU: plain gradients bit for bit where they are exact, and as CUDA graphs what they are without."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import outcore
from outcore.program.policies import Encode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def same_sums() -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def network(*, drops: bool = True) -> nn.Module:
    torch.manual_seed(0)

    def block(a: int, b: int, pool: nn.Module, inplace: bool) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace), pool]

    return nn.Sequential(
        *block(3, 16, nn.MaxPool2d(2), True),
        *block(16, 24, nn.MaxPool2d(3, 2, 1, ceil_mode=True), False),
        nn.BatchNorm2d(24),
        *block(24, 24, nn.AvgPool2d(2), True),
        *block(24, 32, nn.Conv2d(32, 32, 3), True),
        *([nn.Dropout(0.3)] if drops else []),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    ).cuda()


def images(last: bool = False) -> torch.Tensor:
    torch.manual_seed(1)
    batch = torch.randn(6, 3, 61, 67, device="cuda")
    return batch.contiguous(memory_format=torch.channels_last) if last else batch


def gradients(model: nn.Module, batch: torch.Tensor, bf16: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(2)
    with torch.autocast("cuda", torch.bfloat16) if bf16 else contextlib.nullcontext():
        loss = model(batch).float().square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def plan_of(model: nn.Module, batch: torch.Tensor, kind: str) -> dict[str, str]:
    keeping = outcore.memory_plan(
        outcore.within(copy.deepcopy(model), (batch,), memory=None, plan={}, quiet=True, measure_s=0.1)
    ).keeping
    found = {}
    for buffer in keeping.buffers.values():
        if buffer.kind == "given" or buffer.opaque or not buffer.savers:
            continue
        exact = [c for c in keeping.choices(buffer) if isinstance(c, Encode)]
        if exact:
            found[buffer.name] = exact[0]
        elif buffer.kind == "value" and kind:
            found[buffer.name] = Encode(kind)
    return found


@pytest.mark.parametrize("kind", ["", "sparse"])
@pytest.mark.parametrize(("last", "bf16"), [(False, False), (True, False), (True, True)])
def test_exact_encodings_give_plain_gradients(kind: str, last: bool, bf16: bool) -> None:
    model, batch = network(), images(last)
    if last:
        model = model.to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16) if bf16 else contextlib.nullcontext():
        plan = plan_of(model, batch, kind)
        twin = copy.deepcopy(model)
        outcore.within(model, (batch,), memory=None, plan=plan, quiet=True, measure_s=0.1)
    assert {Encode("sign"), Encode("window")} <= set(plan.values())
    for _ in range(2):
        want, got = gradients(twin, batch, bf16), gradients(model, batch, bf16)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("codec", ["half", "bf16", "int8", "int4"])
def test_rounded_numbers_that_leave_come_back_the_same(codec: str) -> None:
    found = []
    for more in ("", "+offload"):
        model, batch = network(), images()
        plan = {n: f"{h}{more}" if h != Encode("sign") else h for n, h in plan_of(model, batch, codec).items()}
        outcore.within(model, (batch,), memory=None, plan=plan, quiet=True, measure_s=0.1)
        found.append([gradients(model, batch) for _ in range(2)])
    assert all(torch.equal(a, b) for x, y in zip(*found, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("kind", ["", "half", "int8", "int4"])
def test_as_graphs_they_are_what_they_are_call_by_call(kind: str) -> None:
    found = []
    for graphs in (False, True):
        model, batch = network(drops=False), images()
        plan = plan_of(model, batch, kind)
        outcore.within(model, (batch,), memory=None, plan=plan, quiet=True, graphs=graphs, measure_s=0.1)
        found.append([gradients(model, batch * k) for k in (1, 2, 3)])
    assert all(torch.equal(a, b) for x, y in zip(*found, strict=True) for a, b in zip(x, y, strict=True))


def test_what_is_sized_by_data_runs_call_by_call() -> None:
    model, batch = network(drops=False), images()
    with pytest.warns(UserWarning, match="cannot be a CUDA graph"):
        outcore.within(model, (batch,), memory=None, plan=plan_of(model, batch, "sparse"), quiet=True, graphs=True)
    want, got = gradients(network(drops=False), batch), gradients(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
