import pytest
import torch

from .sample import quarter
from .scalar import differentiable, scalar, tensors
from .zoo import QUICK, ZOO, Foreign, by_name

pytestmark = pytest.mark.foreign


def test_names_are_unique_and_found() -> None:
    names = [foreign.name for foreign in ZOO]
    assert len(set(names)) == len(names)
    assert all(by_name(name).name == name for name in names)


def test_the_zoo_is_large_and_from_four_libraries() -> None:
    assert len(ZOO) >= 75
    assert len(QUICK) >= 60
    assert {foreign.name.split("/")[0] for foreign in ZOO} == {"torchvision", "monai", "hf", "timm"}


def test_an_unknown_name_is_refused_with_what_is_near() -> None:
    with pytest.raises(KeyError, match="torchvision/resnet50"):
        by_name("resnet50")


def test_inputs_leave_the_global_generator_alone_and_repeat() -> None:
    before = torch.get_rng_state()
    for foreign in ZOO:
        assert _same(foreign.inputs(2), foreign.inputs(2)), foreign.name
    assert torch.equal(before, torch.get_rng_state())


def test_scalar_counts_every_differentiable_tensor_once() -> None:
    class Cache:
        def __init__(self, *layers: torch.Tensor) -> None:
            self.layers = list(layers)

    a, b = torch.full((2,), 2.0, requires_grad=True), torch.full((3,), 3.0, requires_grad=True)
    output = {"x": (a, [b, None]), "again": a, "cache": Cache(b * 1, torch.ones(4)), "ids": torch.arange(3)}
    assert len(differentiable(output)) == 3
    assert scalar(output).item() == pytest.approx(4 + 9 + 9)
    with pytest.raises(ValueError, match="no differentiable tensor"):
        scalar({"ids": torch.arange(3)})


@pytest.mark.slow
@pytest.mark.parametrize("foreign", quarter(ZOO), ids=str)
def test_model_trains(foreign: Foreign) -> None:
    torch.manual_seed(0)
    model = foreign.build().train()
    args, kwargs = foreign.inputs(2)
    loss = scalar(model(*args, **kwargs))
    loss.backward()
    assert torch.isfinite(loss)
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("foreign", quarter([foreign for foreign in ZOO if foreign.other_batch]), ids=str)
def test_model_evaluates_another_batch_size(foreign: Foreign) -> None:
    torch.manual_seed(0)
    model = foreign.build().eval()
    args, kwargs = foreign.inputs(3)
    with torch.no_grad():
        outputs = tensors(model(*args, **kwargs))
    assert any(output.is_floating_point() for output in outputs)
    assert all(output.isfinite().all() for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("foreign", quarter(QUICK), ids=str)
def test_building_again_from_the_same_seed_gives_the_same_weights(foreign: Foreign) -> None:
    torch.manual_seed(0)
    first = foreign.build().state_dict()
    torch.manual_seed(0)
    second = foreign.build().state_dict()
    assert _same(dict(first), dict(second))


def _same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left == right
