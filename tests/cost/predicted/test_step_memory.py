from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.cost.predicted.step_memory import memory_curve
from tests.cost.networks import NETWORKS, WithLoss
from tests.cost.oracle import counted_peak

Adam, SGD = torch.optim.Adam, partial(torch.optim.SGD, lr=0.1)


class Tangle(nn.Module):
    """Skips, sums of shared gradients, views, concatenation, tied weights, an unused branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.unused = nn.Conv2d(8, 64, 3, padding=1)
        self.head = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.unused(x)
        y = F.relu(self.second(F.relu(self.second(x))) + x)
        z = torch.cat([x, y, x * y], dim=1)
        return self.head(z.mean((2, 3)))


def tangle() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return WithLoss(Tangle()), (torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.long))


def predicted_and_counted(
    build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], make: Callable[..., torch.optim.Optimizer]
) -> tuple[int, int]:
    model, args = build()
    graph = outcore.capture(model, args)
    return memory_curve(graph, account(graph), optimizer=make).peak_bytes, counted_peak(model, args, {}, make)


@pytest.mark.parametrize("make", [Adam, SGD], ids=["Adam", "SGD"])
@pytest.mark.parametrize("name", ["tangle", "ResNet-18", "MobileNet-v3", "BERT"])
def test_the_predicted_peak_is_the_counted_one(name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    predicted, counted = predicted_and_counted(tangle if name == "tangle" else NETWORKS[name], make)
    print(f"\n{name}: predicted {predicted:,}, counted {counted:,}, error {predicted / counted - 1:+.2%}")
    assert predicted == pytest.approx(counted, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Adam, SGD], ids=["Adam", "SGD"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_predicted_peak_of_large_networks_is_the_counted_one(
    name: str, make: Callable[..., torch.optim.Optimizer]
) -> None:
    predicted, counted = predicted_and_counted(NETWORKS[name], make)
    print(f"\n{name}: predicted {predicted:,}, counted {counted:,}, error {predicted / counted - 1:+.2%}")
    assert predicted == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("make", [Adam, SGD], ids=["Adam", "SGD"])
def test_the_predicted_peak_under_autocast_is_the_counted_one(make: Callable[..., torch.optim.Optimizer]) -> None:
    model, args = NETWORKS["ResNet-18"]()

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inside(x, target)

    predicted, counted = predicted_and_counted(lambda: (Cast(), args), make)
    assert predicted == pytest.approx(counted, rel=0.02)


def chain(length: int = 4) -> outcore.Graph:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(length)))
    return outcore.capture(model, [(16, 8)])


def test_the_curve_of_a_chain_is_what_one_counts_by_hand() -> None:
    graph = chain(2)
    curve = memory_curve(graph, account(graph), optimizer=0.0)
    weight, value = 8 * 8 * 4, 16 * 8 * 4
    fixed = 2 * weight + value  # weights, input
    by_hand = [
        fixed + 1 * value,  # linear
        fixed + 2 * value,  # tanh keeps its result; the linear's output goes
        fixed + 2 * value,
        fixed + 3 * value,
        fixed + 2 * value + 2 * value,  # backward of tanh: two gradients
        fixed + 2 * value + 2 * value + weight,  # of linear: and a weight's gradient
        fixed + 2 * value + 2 * value + weight,  # the first tanh; the output is still the user's
        fixed + 1 * value + 1 * value + 2 * weight,
        fixed + 1 * value + 2 * weight,
    ]
    assert [m.bytes.total for m in curve.moments] == by_hand
    assert [m.phase for m in curve.moments] == ["forward"] * 4 + ["backward"] * 4 + ["optimizer"]


def test_the_peak_is_broken_down_by_category_and_block() -> None:
    model, args = tangle()
    graph = outcore.capture(model, args)
    curve = memory_curve(graph, account(graph), optimizer=Adam)
    assert curve.at_peak.total == curve.peak_bytes == sum(h.bytes for h in curve.composition)
    assert sum(curve.by_block(2).values()) == curve.peak_bytes
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert curve.at_peak.weights == weights
    unused = 4 * (8 * 64 * 9 + 64)  # no gradient, so no state
    assert curve.at_peak.state == 2 * (weights - unused)
    assert curve.at_peak.inputs == sum(a.numel() * a.element_size() for a in args)
    assert curve.moments[-1].bytes.gradients == weights - unused
    assert "feature maps" in str(curve)
    assert curve.to_json()["peak_bytes"] == curve.peak_bytes


def test_costs_of_another_graph_are_refused() -> None:
    with pytest.raises(outcore.OutcoreError, match="measure this one"):
        memory_curve(chain(2), account(chain(3)))


def test_on_a_gpu_allocations_are_rounded_up() -> None:
    graph = outcore.capture(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh()), [(1, 3)])
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    curve = memory_curve(graph, account(graph, "cuda"), optimizer=0.0)
    assert curve.moments[0].bytes.total == 3 * 512


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (torch.optim.Adam, 2.0),
        (partial(torch.optim.Adam, amsgrad=True), 3.0),
        (SGD, 0.0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1.0),
        (torch.optim.RMSprop, 1.0),
    ],
)
def test_the_state_of_an_optimizer_is_counted(make: Callable[..., torch.optim.Optimizer], state: float) -> None:
    assert OptimizerCost.of(make).state_per_parameter == state


def test_an_optimizer_that_steps_all_at_once_needs_room_for_all() -> None:
    one_by_one, together = OptimizerCost.of(torch.optim.Adam, "cpu"), OptimizerCost.of(torch.optim.Adam, "cuda")
    assert one_by_one.workspace_per_largest > 0 and one_by_one.workspace_per_parameter == 0
    assert together.workspace_per_parameter >= 1
    for make in (torch.optim.Adam, partial(torch.optim.SGD, lr=0.1, momentum=0.9)):  # one without a workspace, too
        loop, all_at_once = OptimizerCost.of(make, "cpu"), OptimizerCost.of(make, "cuda")
        assert all_at_once.together and not loop.together
    made = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    assert OptimizerCost.of(made).state_per_parameter == 1.0


def test_what_a_branch_that_backward_never_comes_to_has_saved_goes_with_its_result() -> None:
    class Net(nn.Module):
        def __init__(self, looks: bool) -> None:
            super().__init__()
            self.first, self.last, self.looks = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1), looks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if self.looks:
                F.max_pool2d(x, 2)  # which keeps the places of the largest
            return self.last(x).mean()

    curves = []
    for looks in (False, True):
        graph = outcore.capture(Net(looks), (torch.rand(2, 3, 32, 32),))
        curves.append(memory_curve(graph, account(graph), optimizer=0.0))
    plain, looked = (curve.moments[-1].bytes for curve in curves)
    assert looked.total == plain.total
    assert max(m.bytes.feature_maps for m in curves[1].moments) > max(m.bytes.feature_maps for m in curves[0].moments)
