"""Batch norms made again from their statistics."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.saved_tensors.managed_forward import ManagedForward


def network(dims: int = 2) -> nn.Module:
    torch.manual_seed(0)
    conv, norm = ((nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d))[dims - 1]
    layers: list[nn.Module] = []
    for i in (3, 8, 8, 8):
        layers += [conv(i, 8, 3, padding=1), norm(8), nn.ReLU(inplace=True)]
    layers += [conv(8, 8, 1), norm(8), conv(8, 2, 1)]
    model = nn.Sequential(*layers)
    for p in model.parameters():
        nn.init.normal_(p, 0.3, 0.4)
    return model


def recompute_norms(model: nn.Module, images: torch.Tensor, exact: str) -> ManagedForward:
    norms = [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    plan = {f"{name}#0:out": "recompute" for name in norms}
    outcore.within(model, (images,), memory=None, plan=plan, exact=exact, quiet=True)
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward)
    return managed_forward


def train(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(images).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())


def compare(mine: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    """A tenth of what reassociated allows, by the largest: biases before a norm have gradients of rounding alone."""
    largest = max(float(t.abs().max()) for t in plain)
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11 * largest)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("last", [False, True])
def test_reassociated_gradients_differ_by_rounding_at_most(dims: int, last: bool) -> None:
    model = network(dims).double()
    images = torch.randn(3, 3, *(7, 6, 5)[:dims], dtype=torch.float64)
    if last and dims > 1:
        images = images.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    twin = copy.deepcopy(model)
    managed_forward = recompute_norms(model, images, "reassociated")
    for _ in range(2):
        compare(train(model, images), train(twin, images))
    (entry,) = managed_forward.admitted.values()
    assert entry is not None
    assert len(entry.compiled.norms) == 5 and None not in entry.compiled.renorm.orders.values()


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("setting", [{}, {"momentum": None}, {"track_running_stats": False}])
def test_a_norm_and_its_relu_as_one_operation(setting: dict[str, Any], again: bool, in_place: bool) -> None:
    model, images = network().double(), torch.randn(3, 3, 7, 6, dtype=torch.float64, requires_grad=True)
    for relu in model:
        if isinstance(relu, nn.ReLU):
            relu.inplace = in_place
    for name in ("1", "4"):
        setattr(model, name, nn.BatchNorm2d(8, **setting).double())
    twin = copy.deepcopy(model)
    outcore.within(model, (images,), memory=None, exact="reassociated", quiet=True)
    if again:
        buffers = outcore.memory_plan(model).keeping.buffers.values()
        plan = {b.name: "recompute" for b in buffers if b.kind == "value" and not b.obstacle}
        outcore.within(model, (images,), memory=None, plan=plan, exact="reassociated", quiet=True)
    (entry,) = model.__dict__["forward"].admitted.values()
    assert len(entry.compiled.instead) == 9  # five norms, four ReLUs
    for _ in range(3):
        want, wanted = train(twin, images), images.grad
        images.grad = None
        got, found = train(model, images), images.grad
        images.grad = None
        compare([*got, found], [*want, wanted])


def test_what_is_looked_at_between_norm_and_relu_stays_apart() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
            self.other.register_forward_hook(lambda *_: None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return y.relu() + y + self.other(x).relu_()

    model, images = Net(), torch.randn(2, 3, 5, 5)
    twin = copy.deepcopy(model)
    outcore.within(model, (images,), memory=None, exact="reassociated", quiet=True)
    (entry,) = model.__dict__["forward"].admitted.values()
    assert list(entry.compiled.instead) == ["norm#0"]
    for mine, plain in zip(train(model, images), train(twin, images), strict=True):
        torch.testing.assert_close(mine, plain)


def test_bitwise_is_bitwise() -> None:
    model, images = network(), torch.randn(3, 3, 9, 9)
    twin = copy.deepcopy(model)
    recompute_norms(model, images, "bitwise")
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(train(model, images), train(twin, images), strict=True))


def test_a_norm_in_eval_mode_has_no_statistics_to_keep() -> None:
    model, images = network().eval(), torch.randn(3, 3, 9, 9)
    twin = copy.deepcopy(model)
    managed_forward = recompute_norms(model, images, "reassociated")
    assert all(torch.equal(a, b) for a, b in zip(train(model, images), train(twin, images), strict=True))
    (entry,) = managed_forward.admitted.values()
    assert entry is not None and not entry.compiled.norms


def test_the_plan_says_how_exact_it_is() -> None:
    model, images = network(), torch.randn(3, 3, 9, 9)
    for exact in ("bitwise", "reassociated"):
        outcore.within(model, (images,), memory=None, exact=exact, quiet=True)
        document = outcore.memory_plan(model).document()
        assert document.exactness == exact
    outcore.within(model, (images,), memory=None, plan=document, quiet=True)
    assert model.__dict__["forward"].settings.reassociated
    outcore.within(model, (images,), memory=None, plan={"0#0:out": "encode:half"}, quiet=True)
    assert outcore.memory_plan(model).document().exactness == "lossy"


def test_an_unknown_grade_is_refused() -> None:
    with pytest.raises(outcore.OutcoreError, match="bitwise"):
        outcore.within(network(), [(1, 3, 9, 9)], memory=None, exact="roughly")
