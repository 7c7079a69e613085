"""What is unusual trains as alone, or is run alone; nothing is silently wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import outcore
from outcore.fusion import RunMode
from outcore.fusion.program.call import FusedCall
from outcore.fusion.program.values import Stacked
from outcore.fusion.rules.functions import extreme
from outcore.fusion.rules.matmul import linear
from outcore.ops import operation
from tests.fusion.serial import assert_as_if_alone, distance, train_serially
from tests.fusion.small import momentum, small_array, small_batches, small_net
from tests.fusion.workloads import TINY


def _checkpointed(net: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] * grad  # not the derivative, so that only this backward gives it


class _Body(nn.Module):
    """A linear layer, something unusual, another linear layer."""

    def __init__(self, unusual: Callable[[nn.Module, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.unusual = unusual
        self.register_buffer("seen", torch.zeros(8))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.unusual(self, self.first(x)))


def _write_then_read_the_view(net: nn.Module, x: Tensor) -> Tensor:
    x = x + 0
    view = x[:, :4]
    x.mul_(2)
    return torch.cat([view, x[:, 4:]], 1)


def _write_into_a_part(net: nn.Module, x: Tensor) -> Tensor:
    x = torch.tanh(x) * 1.0
    x[:, 2] = 0.5
    return x


def _write_into_a_transposed_copy(net: nn.Module, x: Tensor) -> Tensor:
    y = x.t().reshape(-1)
    y[:5] = 0.0
    return x + y.view(8, -1).t()


def _look_at_data(net: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(x) if x.sum() > 0 else -torch.tanh(x)


def _remember(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x + net.seen


UNUSUAL: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "checkpoint": (lambda net, x: _checkpointed(net.inner, x), False),
    "custom backward": (lambda net, x: _Square.apply(x), True),
    "a view read after its base was written": (_write_then_read_the_view, False),
    "a part written": (_write_into_a_part, True),
    "a copy written that could be a view": (_write_into_a_transposed_copy, True),
    "the way depends on data": (_look_at_data, False),
    "a buffer updated by hand": (_remember, True),
    "a detached branch": (lambda net, x: x + net.inner(x.detach()), True),
    "a constant of its own": (lambda net, x: x * torch.arange(8.0, dtype=x.dtype), True),
    "an unused layer": (lambda net, x: torch.relu(x), True),
    "no gradient for a while": (lambda net, x: x + _without_grad(net, x), True),
    "a layer twice": (lambda net, x: net.inner(torch.tanh(net.inner(x))), True),
    "in-place activations": (lambda net, x: F.relu_(net.inner(x)).add(1).mul_(0.5), True),
    "chunks": (lambda net, x: torch.cat([p * (i + 1) for i, p in enumerate(x.chunk(4, -1))], -1), True),
    "einsum and matmul": (lambda net, x: torch.einsum("ni,ij->nj", x, net.inner.weight) @ net.inner.weight.T, True),
    "topk and gather": (lambda net, x: x.gather(1, x.topk(8, 1).indices), True),
    "a scalar per member": (lambda net, x: x * net.inner.weight.norm() / x.std(), True),
    "where and masked_fill": (lambda net, x: torch.where(x > 0, x, x * 0.1).masked_fill(x > 2, 2.0), True),
    "cumsum, flip, roll": (lambda net, x: x.cumsum(1).flip(1).roll(2, 1), True),
    "views of every kind": (lambda net, x: x.view(-1, 2, 4).permute(2, 0, 1).reshape(4, -1).T.reshape(-1, 8), True),
}


def _without_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.inner(x)


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_trains_as_alone(name: str) -> None:
    unusual, fused = UNUSUAL[name]

    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        return _Body(unusual).double()

    torch.manual_seed(4)
    batches = [(torch.randn(5, 6).double(), torch.randint(3, (5,))) for _ in range(4)]
    array = assert_as_if_alone(build, batches, F.cross_entropy, momentum)
    assert (array.way.width == 3) == fused, array.notes


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        nn.utils.spectral_norm,
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "old spectral_norm"],
)
def test_reparametrised_layers_train_as_alone(wrap: Callable[[nn.Module], nn.Module]) -> None:
    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        return nn.Sequential(wrap(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)).double()

    batches = [(torch.randn(5, 6).double(), torch.randint(3, (5,))) for _ in range(4)]
    models = [build(i) for i in range(3)]
    twins = [build(i) for i in range(3)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=momentum)
    for x, y in batches:
        array.step(x, y)
    for i, twin in enumerate(twins):
        train_serially(twin, batches, F.cross_entropy, momentum(twin.parameters(), i))
        assert distance(dict(twin.state_dict()), array[i].state_dict()) < 1e-10


def test_settings_may_differ_between_members() -> None:
    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        layers = [
            nn.Linear(6, 4),
            nn.BatchNorm1d(4, eps=10.0 ** -(i + 2), momentum=0.1 * (i + 1)),
            nn.LeakyReLU(0.1 * i),
        ]
        return nn.Sequential(
            *layers, nn.LayerNorm(4, eps=10.0 ** -(i + 1)), nn.Softplus(beta=1 + i), nn.Linear(4, 3)
        ).double()

    torch.manual_seed(4)
    batches = [(torch.randn(8, 6).double(), torch.randint(3, (8,))) for _ in range(5)]
    array = assert_as_if_alone(build, batches, F.cross_entropy, momentum)
    assert array.way.width == 3


def test_a_number_in_forward_may_differ_between_members() -> None:
    class Net(nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.i, self.layer = i, nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(self.layer(x), 0.1 * self.i) * (1 + self.i)

    torch.manual_seed(4)
    batches = [(torch.randn(8, 6).double(), torch.randint(3, (8,))) for _ in range(5)]
    assert_as_if_alone(lambda i: Net(i).double(), batches, F.cross_entropy, momentum)


@pytest.mark.filterwarnings("ignore:.*changes in every call")
def test_settings_changed_between_steps_count_from_the_next() -> None:
    class Net(nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.gain, self.layer, self.norm = 1.0, nn.Linear(6, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)) * self.gain

    def build(i: int) -> Net:
        torch.manual_seed(i)
        return Net(i).double()

    torch.manual_seed(4)
    batches = [(torch.randn(8, 6).double(), torch.randint(3, (8,))) for _ in range(6)]
    models, twins = [build(i) for i in range(3)], [build(i) for i in range(3)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=momentum)
    optimizers = [momentum(twin.parameters(), i) for i, twin in enumerate(twins)]
    for n, batch in enumerate(batches):
        for net in (models, twins):
            net[1].gain = 1.0 + n
            net[2].norm.train(n < 3)
        array.step(*batch)
        for twin, optimizer in zip(twins, optimizers, strict=True):
            train_serially(twin, [batch], F.cross_entropy, optimizer)
    for i, twin in enumerate(twins):
        assert distance(dict(twin.state_dict()), array[i].state_dict()) < 1e-12


def test_tied_and_frozen_weights_stay_so() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.out.weight = self.embed.weight
            self.mid = nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.mid(self.embed(x)))).transpose(1, 2)

    batches = [(torch.randint(9, (2, 5)), torch.randint(9, (2, 5))) for _ in range(5)]
    array = assert_as_if_alone(lambda i: Net().double(), batches, F.cross_entropy, momentum)
    assert array[0].model.out.weight is array[0].model.embed.weight


def test_hooks_of_a_layer_run_for_every_member() -> None:
    seen = []

    def build(i: int) -> nn.Module:
        model = small_net(i)
        model[4].register_forward_hook(lambda m, args, out, i=i: seen.append(i) or out * (i + 1))
        return model

    assert_as_if_alone(build, small_batches(3), F.cross_entropy, momentum)
    assert set(seen) == {0, 1, 2}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_wrong_rule_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    from outcore.fusion.rules import modules

    right = modules.MODULE_RULES.find("Linear")
    assert right is not None

    def wrong(call: Any) -> Any:
        made = right(call)
        return type(made)(made.tensor * torch.tensor([1.0, 1.0, 1.001]).double().view(3, 1, 1))

    monkeypatch.setitem(operation("linear").facts, modules.MODULE_RULES.name, wrong)
    models = [nn.Sequential(*small_net(i), nn.Dropout(dropout)) for i in range(3)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=momentum)
    (x, y), *_ = small_batches()
    with pytest.warns(UserWarning, match="not the model's own"):
        losses = array.step(x, y)
    assert array.way.width == 1 and array.notes and models[0][-1].p == dropout
    assert dropout or abs(float(losses[2]) - float(F.cross_entropy(small_net(2)(x), y).detach())) < 1e-12


def test_counters_count_steps_of_every_member() -> None:
    array = small_array()
    for x, y in small_batches(4):
        array.step(x, y)
    assert [int(array[i].state_dict()["1.num_batches_tracked"]) for i in range(3)] == [4, 4, 4]


def test_rounding_that_a_network_amplifies_is_no_wrong_gradient() -> None:
    """Normalisation over two samples, again and again: no two ways of summing agree, and the check knows it."""

    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        deep = [part for _ in range(12) for part in (nn.Linear(8, 8), nn.BatchNorm1d(8, eps=1e-12), nn.Tanh())]
        return nn.Sequential(nn.Linear(6, 8), *deep, nn.Linear(8, 3)).double()

    torch.manual_seed(0)
    x, y = torch.randn(2, 6).double(), torch.randint(3, (2,))
    twin = build(2)
    rounded = copy.deepcopy(twin)
    with torch.no_grad():
        for p in rounded.parameters():
            p.mul_(1 + 2e-16 * torch.randn_like(p).sign())
    gradients = []
    for model in (twin, rounded):
        F.cross_entropy(model(x), y).backward()
        gradients.append(model[0].weight.grad)
    amplified = float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())
    assert amplified > 1e-9, "this network does not amplify rounding"
    array = outcore.fuse([build(i) for i in range(3)], loss=F.cross_entropy, optimizer=momentum)
    array.step(x, y)
    assert array.way.width == 3, array.notes


@pytest.mark.parametrize("members", [3, 1])
def test_the_largest_and_smallest_along_a_dimension_train_as_alone(members: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv1d(3, 4, 1), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x).relu()  # many equal zeros: the gradient goes to one of them, the same as alone
            return self.out(torch.cat([torch.max(x, 2)[0], -(-x).min(dim=-1, keepdim=True).values.squeeze(2)], 1))

    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        return Net().double()

    torch.manual_seed(5)
    batches = [(torch.randn(4, 3, 5).double(), torch.randint(2, (4,))) for _ in range(4)]
    array = assert_as_if_alone(build, batches, F.cross_entropy, momentum, members=members, way=RunMode(members))
    ways = {name: way for name, way in array.coverage.items() if "max" in name or "min" in name}
    assert len(ways) == 2 and set(ways.values()) == {"fused" if members > 1 else "members"}


def test_the_gradient_of_a_maximum_lies_in_memory_as_its_value_does() -> None:
    x = torch.randn(2, 5, 3, 4).double().permute(2, 0, 3, 1).requires_grad_()  # as a fused 1x1 convolution leaves it
    seen: list[tuple[int, ...]] = []
    hooked = x * 1
    assert hooked.stride() == x.stride()
    hooked.register_hook(lambda grad: seen.append(grad.stride()))
    call = FusedCall("max", 3, 0, torch.max, (Stacked(hooked), 2), {})
    values, where = extreme(call)
    values.tensor.square().sum().backward()
    assert seen == [x.stride()] and not where.tensor.requires_grad
    expected = torch.autograd.grad(torch.max(x, 3)[0].square().sum(), x)[0]
    assert x.grad is not None and torch.equal(x.grad, expected)
    assert torch.autograd.gradgradcheck(lambda t: extreme(replace(call, args=(Stacked(t), 2)))[0].tensor.square(), x)


def test_linear_layers_have_second_derivatives() -> None:
    """Their gradient is our own function, made of differentiable ones."""
    rows, weight, bias = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((2, 3, 4), (2, 5, 4), (2, 5)))

    def run(*tensors: Tensor) -> Tensor:
        made: Tensor = linear(*(Stacked(t) for t in tensors)).tensor
        return made.square()

    assert torch.autograd.gradcheck(run, (rows, weight, bias))
    assert torch.autograd.gradgradcheck(run, (rows, weight, bias))
    (found,) = torch.autograd.grad(run(rows, weight, bias).sum(), weight)
    assert found.is_contiguous()


@pytest.mark.parametrize(("slopes", "unfused"), [((0.1, 0.1, 0.1), ("act",)), ((0.1, 0.2, 0.3), ())])
def test_layers_that_write_in_place_and_run_member_by_member_write_nothing_others_need(
    slopes: tuple[float, ...], unfused: tuple[str, ...]
) -> None:
    class Net(nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.Linear(6, 8), nn.Linear(8, 8), nn.LeakyReLU(slope, inplace=True)
            self.out = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.a(x))
            return self.out(self.act(self.b(x).tanh() + x))  # tanh needs its result, the last layer that of the sum

    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        return Net(slopes[i]).double()

    torch.manual_seed(3)
    batches = [(torch.randn(4, 6).double(), torch.randint(3, (4,))) for _ in range(3)]
    array = outcore.fuse([build(i) for i in range(3)], loss=F.cross_entropy, optimizer=momentum, unfused=unfused)
    for x, y in batches:
        array.step(x, y)
    assert array.way.width == 3 and array.coverage["model.act#0"] == "members"
    for i in range(3):
        twin = build(i)
        train_serially(twin, batches, F.cross_entropy, momentum(twin.parameters(), i))
        assert distance(dict(twin.state_dict()), array[i].state_dict()) < 1e-12


def test_what_half_precision_does_to_gradients_is_no_wrong_gradient() -> None:
    """Those of PointNet in bfloat16 are off by as much as they are large, fused or not."""
    workload = TINY["pointnet-cls-b32"]
    torch.manual_seed(1)
    models = [workload.build(0) for _ in range(2)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=momentum, autocast=torch.bfloat16)
    array.step(*workload.batch())
    assert array.way.width == 2, array.notes


def test_a_wrong_rule_is_found_in_half_precision_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore.fusion.rules import modules

    monkeypatch.setitem(
        operation("tanh").facts, modules.MODULE_RULES.name, lambda call: Stacked(call.args[0].tensor.tanh() * 1.3)
    )
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=momentum, autocast=torch.bfloat16)
    with pytest.warns(UserWarning, match="not the model's own"):
        array.step(torch.randn(16, 6), torch.randint(3, (16,)))
    assert array.way.width == 1


class _OwnModes(nn.Linear):
    """Says itself what a mode is."""

    doubled = False

    def train(self, mode: bool = True) -> _OwnModes:
        self.doubled = not mode
        return super().train(mode)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.doubled else 1)


@pytest.mark.parametrize("layer", [nn.Linear, _OwnModes])
def test_evaluation_is_in_eval_mode_and_training_goes_on(layer: type[nn.Linear]) -> None:
    torch.manual_seed(2)
    models = [nn.Sequential(layer(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double() for _ in range(3)]
    x, y = torch.randn(6, 3).double(), torch.randn(6, 4).double()
    array = outcore.fuse(models, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    array.step(x, y)
    found = array.evaluate(x, y)
    assert all(m.training for model in models for m in model.modules())
    array.step(x, y)
    before = [F.mse_loss(copy.deepcopy(model).eval()(x), y).item() for model in models]
    assert array.evaluate(x, y).tolist() == pytest.approx(before, abs=1e-12)
    assert found.tolist() != before
