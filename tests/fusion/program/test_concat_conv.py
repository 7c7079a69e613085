"""Maps that are joined for a 1x1 convolution alone: the same as joined, without joining."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import outcore
from outcore.fusion.program.program import StackedProgram
from outcore.fusion.rules import convolution
from outcore.fusion.training import MemberTraining
from tests.fusion.serial import assert_as_if_alone


class _Joining(nn.Module):
    """Features of each point beside those of all, in one or two dimensions."""

    def __init__(self, how: str, dims: int = 1, bias: bool = True) -> None:
        super().__init__()
        conv: Any = (nn.Conv1d, nn.Conv2d)[dims - 1]
        self.how = how
        self.local = conv(3, 4, 1)
        self.mix = conv(4 + 4 + (4 if how == "twice" else 0), 5, 1, bias=bias, stride=2 if how == "stride" else 1)
        self.last = conv(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        local = torch.tanh(self.local(x))
        space = local.shape[2:]
        cloud = local.flatten(2).amax(2)
        all_of = cloud.view(*cloud.shape, *[1] * len(space)).expand(-1, -1, *space)
        if self.how == "repeat":
            all_of = all_of.clone()
        if self.how == "stack":
            return self.last(self.mix(torch.cat((all_of, local), dim=1)))
        parts = [all_of, local, all_of] if self.how == "twice" else [local, all_of]
        joined = torch.cat(parts, 1)
        made = self.last(torch.tanh(self.mix(joined)))
        return made + joined.mean() if self.how == "read" else made


def _batches(dims: int, stride: int = 1) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    space = (6,) * dims
    return [
        (torch.randn(3, 3, *space).double(), torch.randint(2, (3, *(s // stride for s in space)))) for _ in range(4)
    ]


def _left_apart(how: str, dims: int = 1) -> dict[str, str]:
    model = MemberTraining(_Joining(how, dims).double(), F.cross_entropy)
    (x, y) = _batches(dims, 2 if how == "stride" else 1)[0]
    return StackedProgram.record([model], ((x,), y)).joins


@pytest.mark.parametrize("how", ["plain", "repeat", "twice", "read", "stride", "stack"])
@pytest.mark.parametrize("dims", [1, 2])
def test_members_train_as_if_alone(how: str, dims: int) -> None:
    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        return _Joining(how, dims, bias=how != "stack").double()

    array = assert_as_if_alone(
        build, _batches(dims, 2 if how == "stride" else 1), F.cross_entropy,
        lambda params, i: optim.SGD(params, 0.1 * (i + 1), momentum=0.5), members=3, tolerance=1e-10,
    )  # fmt: skip
    assert array.way.width == 3, array.notes


def test_only_what_a_pointwise_convolution_alone_reads_is_left_apart() -> None:
    found = {how: list(_left_apart(how).values()) for how in ("plain", "repeat", "twice", "stack", "read", "stride")}
    assert found == {
        "plain": ["model.mix#0"], "repeat": ["model.mix#0"], "twice": ["model.mix#0"], "stack": ["model.mix#0"],
        "read": [], "stride": [],
    }  # fmt: skip


@pytest.mark.parametrize(("how", "calls"), [("plain", 1), ("twice", 1), ("repeat", 0)])
def test_parts_are_left_apart_where_one_is_repeated(how: str, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    product = convolution.pointwise_joined
    monkeypatch.setattr(convolution, "pointwise_joined", lambda *given: (seen.append(1), product(*given))[1])
    array = outcore.fuse(
        [_Joining(how).double() for _ in range(2)], loss=F.cross_entropy, optimizer=optim.SGD, check=False
    )  # fmt: skip
    array.step(*_batches(1)[0])
    assert len(seen) == calls
