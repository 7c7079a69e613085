"""The array: members are independent in everything, and what is unusual is handled or refused, never wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from safetensors.torch import load_model
from torch import Tensor, nn, optim

import outcore
from outcore.errors import FuseError
from outcore.fusion import LossScale, Way, choose, forecast
from tests.fusion.serial import assert_as_if_alone, distance, train_serially


def _net(i: int = 0) -> nn.Module:
    torch.manual_seed(i)
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 5)]
    return nn.Sequential(*layers).double()


def _batches(count: int = 6) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(77)
    return [(torch.randn(4, 3, 6, 6).double(), torch.randint(5, (4,))) for _ in range(count)]


def _sgd(params: Any, i: int) -> optim.Optimizer:
    return optim.SGD(params, 0.05 * (i + 1), momentum=0.9)


def _array(members: int = 3, **settings: Any) -> outcore.fusion.FusedArray:
    settings = {"loss": F.cross_entropy, "optimizer": _sgd} | settings
    return outcore.fuse([_net(i) for i in range(members)], **settings)


# Independence


def test_a_diverged_member_is_frozen_and_the_others_do_not_notice() -> None:
    array = _array(optimizer=lambda p, i: optim.SGD(p, float("inf") if i == 1 else 0.05))
    for x, y in _batches():
        array.step(x, y)
    assert array.status == ["training", "diverged", "training"]
    twin = _net(2)
    train_serially(twin, _batches(), F.cross_entropy, optim.SGD(twin.parameters(), 0.05))
    assert distance(dict(twin.state_dict()), array[2].state_dict()) < 1e-12


def test_a_stopped_member_keeps_its_weights_and_goes_on_when_asked() -> None:
    array = _array()
    (x, y), *_ = _batches()
    array.step(x, y)
    array[1].stop()
    before = array[1].state_dict()
    array.step(x, y)
    after = array[1].state_dict()
    assert distance(before, after) == 0
    assert array[1].status == "stopped"
    array.resume(1)
    array.step(x, y)
    assert not torch.equal(after["4.weight"], array[1].state_dict()["4.weight"])


@pytest.mark.parametrize("way", [Way(3), Way(2), Way(1)], ids=str)
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_refilled_slot_trains_like_a_fresh_model(slot: int, way: Way) -> None:
    array = _array(way=way, optimizer=lambda p, i: optim.Adam(p, 0.01 * (i + 1)))
    batches = _batches(8)
    for x, y in batches[:4]:
        array.step(x, y)
    others = {i: copy.deepcopy(array[i].state_dict()) for i in range(3) if i != slot}
    new, twin = _net(40), _net(40)
    array.refill(slot, new)
    assert all(distance(state, array[i].state_dict()) == 0 for i, state in others.items())
    for x, y in batches[4:]:
        array.step(x, y)
    train_serially(twin, batches[4:], F.cross_entropy, optim.Adam(twin.parameters(), 0.01 * (slot + 1)))
    assert distance(dict(twin.state_dict()), array[slot].state_dict()) < 1e-10
    stayed = next(iter(others))
    serial = _net(stayed)
    train_serially(serial, batches, F.cross_entropy, optim.Adam(serial.parameters(), 0.01 * (stayed + 1)))
    assert distance(dict(serial.state_dict()), array[stayed].state_dict()) < 1e-10


def test_every_member_may_have_its_own_batch() -> None:
    batches = [_batches(3), _batches(6)[3:]]
    array = _array(2)
    for n in range(3):
        array.step(each=[batches[0][n], batches[1][n]])
    for i in range(2):
        twin = _net(i)
        train_serially(twin, batches[i], F.cross_entropy, _sgd(twin.parameters(), i))
        assert distance(dict(twin.state_dict()), array[i].state_dict()) < 1e-12


@pytest.mark.parametrize("width", [1, 2, 3])
def test_lanes_of_any_width_give_the_same(width: int) -> None:
    array = assert_as_if_alone(_net, _batches(), F.cross_entropy, _sgd, way=Way(width), tolerance=1e-12)
    assert array.way.width == width and len(array.lanes) == -(-3 // width)


def test_an_array_rearranged_in_the_middle_goes_on_as_if_not() -> None:
    batches = _batches(9)
    array = _array(optimizer=lambda p, i: optim.Adam(p, 0.01 * (i + 1)))
    for n, (x, y) in enumerate(batches):
        if n in (3, 6):
            array.arrange(Way(1 if n == 3 else 2))
        array.step(x, y)
    twin = _net(1)
    train_serially(twin, batches, F.cross_entropy, optim.Adam(twin.parameters(), 0.02))
    assert distance(dict(twin.state_dict()), array[1].state_dict()) < 1e-10


def test_loss_weights_scale_each_members_gradient() -> None:
    array = _array(2, loss_weight=[1.0, 0.25], optimizer=lambda p, i: optim.SGD(p, 0.1))
    (x, y), *_ = _batches()
    array.step(x, y)
    twin = _net(1)
    train_serially(twin, [(x, y)], lambda o, t: 0.25 * F.cross_entropy(o, t), optim.SGD(twin.parameters(), 0.1))
    assert distance(dict(twin.state_dict()), array[1].state_dict()) < 1e-12


def test_a_loss_scale_that_overflows_skips_one_members_step_only() -> None:
    scale = LossScale(initial=1024.0, scales=[1024.0, 1e308])
    array = _array(2, loss_scale=scale, loss=lambda o, t: 100 * F.cross_entropy(o, t))
    (x, y), *_ = _batches()
    before = [copy.deepcopy(array[i].model[4].weight) for i in range(2)]
    array.step(x, y)
    assert scale.scales == [1024.0, 5e307]
    assert torch.equal(array[1].model[4].weight, before[1])
    twin = _net(0)
    train_serially(twin, [(x, y)], lambda o, t: 100 * F.cross_entropy(o, t), _sgd(twin.parameters(), 0))
    assert distance(dict(twin.state_dict()), array[0].state_dict()) < 1e-10


def test_evaluation_changes_nothing_and_gives_metrics() -> None:
    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).double().mean()

    array = _array(metrics={"accuracy": accuracy})
    (x, y), *_ = _batches()
    array.step(x, y)
    before = [copy.deepcopy(array[i].state_dict()) for i in range(3)]
    losses = array.evaluate(x, y)
    for i, model in enumerate(array.models):
        assert distance(before[i], array[i].state_dict()) == 0
        twin = copy.deepcopy(model).eval()
        with torch.no_grad():
            assert abs(float(F.cross_entropy(twin(x), y)) - float(losses[i])) < 1e-12
            assert float(accuracy(twin(x), y)) == float(array.metrics["accuracy"][i])
        assert model.training


def test_seeds_give_each_member_the_masks_of_a_serial_run() -> None:
    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2 * (i + 1)), nn.Linear(16, 3)).double()

    torch.manual_seed(1)
    batches = [(torch.randn(5, 6).double(), torch.randint(3, (5,))) for _ in range(10)]
    assert_as_if_alone(build, batches, F.cross_entropy, _sgd, seeds=[5, 6, 7], tolerance=1e-12)


@pytest.mark.parametrize("rates", [(0.2, 0.7, 0.7), (0.5, 0.5, 0.5), (0.0, 0.5, 0.5)])
def test_dropout_rates_are_each_members_own(rates: tuple[float, ...]) -> None:
    class Net(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p, self.gain = p, nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.gain, self.p, self.training)

    array = outcore.fuse(
        [Net(p) for p in rates], loss=lambda out, _: out.mean(), optimizer=lambda p: optim.SGD(p, 0.0), outputs=True
    )
    array.step(torch.ones(200, 200), torch.ones(1))
    kept = (array.output != 0).double().mean((1, 2))
    assert torch.allclose(kept, 1 - torch.tensor(rates).double(), atol=0.02)
    for b, rate in enumerate(rates):
        values = array.output[b][array.output[b] != 0]
        assert torch.allclose(values, torch.full_like(values, 1 / (1 - rate)))
    assert not torch.equal(array.output[1] != 0, array.output[2] != 0)


def test_attention_drops_for_every_member_apart() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            q = x * self.gain
            return F.scaled_dot_product_attention(q * 0, q * 0, q, dropout_p=0.5)

    models = [Net() for _ in range(3)]
    array = outcore.fuse(models, loss=lambda out, _: out.mean(), optimizer=lambda p: optim.SGD(p, 0.0), outputs=True)
    array.step(torch.ones(4, 2, 64, 8), torch.ones(1))
    assert array.coverage["model.scaled_dot_product_attention()#0"] == "fused"
    assert torch.allclose(array.output.mean((1, 2, 3, 4)), torch.ones(3), atol=0.05)
    rows = array.output[..., 0].flatten(1)
    assert rows.std(1).min() > 0.05 and not torch.equal(rows[0], rows[1])


# What comes out


def test_a_members_state_is_that_of_a_serial_model_and_saves_alone(tmp_path: Path) -> None:
    array = _array()
    (x, y), *_ = _batches()
    array.step(x, y)
    fresh = _net(9)
    assert array[1].state_dict().keys() == fresh.state_dict().keys()
    array[1].save(tmp_path / "one.safetensors")
    load_model(fresh, tmp_path / "one.safetensors")
    assert distance(dict(fresh.state_dict()), array[1].state_dict()) == 0
    assert (tmp_path / "one.safetensors").stat().st_size < 4 * sum(p.numel() * 8 for p in fresh.parameters())
    torch.save(array[1].state_dict(), tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 3 * sum(p.numel() * 8 for p in fresh.parameters()) + 20_000


def test_weights_loaded_into_a_members_model_are_trained_on() -> None:
    array = _array()
    array[1].model.load_state_dict(_net(50).state_dict())
    for x, y in _batches():
        array.step(x, y)
    twin = _net(50)
    train_serially(twin, _batches(), F.cross_entropy, _sgd(twin.parameters(), 1))
    assert distance(dict(twin.state_dict()), array[1].state_dict()) < 1e-12


@pytest.mark.parametrize("way", [Way(3), Way(1)], ids=str)
@pytest.mark.parametrize("kind", [optim.Adam, optim.NAdam, lambda p, lr: optim.SGD(p, lr, momentum=0.9)])
def test_a_checkpoint_of_a_member_is_gone_on_from(kind: Any, way: Way) -> None:
    """Go back to the fourth step in one slot while the others go on; then that slot's run is that of a serial one."""
    batches = _batches(8)
    array = _array(
        optimizer=lambda p, i: kind(p, lr=0.01 * (i + 1)),
        scheduler=lambda o, i: optim.lr_scheduler.StepLR(o, 3, 0.5),
        way=way,
    )
    for n, (x, y) in enumerate(batches):
        array.step(x, y)
        array.schedule()
        if n == 3:
            saved = array[1].checkpoint()
    array[1].restore(saved)
    for x, y in batches[4:]:
        array.step(x, y)
        array.schedule()
    for i, order in ((1, batches), (2, batches + batches[4:])):
        twin = _net(i)
        own = kind(twin.parameters(), lr=0.01 * (i + 1))
        schedulers = [optim.lr_scheduler.StepLR(own, 3, 0.5)]
        train_serially(twin, order, F.cross_entropy, own, schedulers=schedulers)
        assert distance(dict(twin.state_dict()), array[i].state_dict()) < 1e-10


def test_released_models_live_on_by_themselves() -> None:
    array = _array()
    (x, y), *_ = _batches()
    array.step(x, y)
    kept = array[0].state_dict()
    models = array.release()
    models[1].load_state_dict(_net(60).state_dict())
    assert distance(kept, dict(models[0].state_dict())) == 0


# Traps


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
    array = assert_as_if_alone(build, batches, F.cross_entropy, _sgd)
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
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=_sgd)
    for x, y in batches:
        array.step(x, y)
    for i, twin in enumerate(twins):
        train_serially(twin, batches, F.cross_entropy, _sgd(twin.parameters(), i))
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
    array = assert_as_if_alone(build, batches, F.cross_entropy, _sgd)
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
    assert_as_if_alone(lambda i: Net(i).double(), batches, F.cross_entropy, _sgd)


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
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=_sgd)
    optimizers = [_sgd(twin.parameters(), i) for i, twin in enumerate(twins)]
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
    array = assert_as_if_alone(lambda i: Net().double(), batches, F.cross_entropy, _sgd)
    assert array[0].model.out.weight is array[0].model.embed.weight


def test_hooks_of_a_layer_run_for_every_member() -> None:
    seen = []

    def build(i: int) -> nn.Module:
        model = _net(i)
        model[4].register_forward_hook(lambda m, args, out, i=i: seen.append(i) or out * (i + 1))
        return model

    assert_as_if_alone(build, _batches(3), F.cross_entropy, _sgd)
    assert set(seen) == {0, 1, 2}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_wrong_rule_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    from outcore.fusion.rules import modules

    def wrong(call: Any) -> Any:
        made = modules._linear_module(call)
        return type(made)(made.tensor * torch.tensor([1.0, 1.0, 1.001]).double().view(3, 1, 1))

    monkeypatch.setitem(modules.MODULES, nn.Linear, wrong)
    models = [nn.Sequential(*_net(i), nn.Dropout(dropout)) for i in range(3)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=_sgd)
    (x, y), *_ = _batches()
    with pytest.warns(UserWarning, match="not the model's own"):
        losses = array.step(x, y)
    assert array.way.width == 1 and array.notes and models[0][-1].p == dropout
    assert dropout or abs(float(losses[2]) - float(F.cross_entropy(_net(2)(x), y).detach())) < 1e-12


def test_counters_count_steps_of_every_member() -> None:
    array = _array()
    for x, y in _batches(4):
        array.step(x, y)
    assert [int(array[i].state_dict()["1.num_batches_tracked"]) for i in range(3)] == [4, 4, 4]


# Half precision on a CPU, memory, choice


def test_autocast_follows_serial_autocast() -> None:
    array = _array(autocast=torch.bfloat16)
    twin = _net(1)
    (x, y), *_ = _batches()
    for model in array.models:
        assert next(model.parameters()).dtype == torch.float64
    found = array.step(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(twin(x), y)
    assert abs(float(found[1]) - float(expected.detach())) < 0.05


def test_memory_is_predicted_and_too_little_is_refused() -> None:
    array = _array(8)
    (x, y), *_ = _batches()
    predicted = forecast(array, x, y)
    weights = sum(p.numel() * 8 for p in _net().parameters())
    assert predicted.resting_bytes >= 2 * weights  # with momentum
    assert predicted.running_bytes >= weights  # with gradients
    assert predicted.peak_bytes(at_once=2) < predicted.peak_bytes()
    room = predicted.peak_bytes(at_once=3)
    assert predicted.at_once(room) == 3
    with pytest.raises(FuseError, match="members would fit"):
        predicted.at_once(predicted.peak_bytes(at_once=1) - 1)


def test_the_choice_leaves_the_array_as_it_was_and_respects_memory() -> None:
    array = _array(6)
    (x, y), *_ = _batches()
    before = [copy.deepcopy(array[i].state_dict()) for i in range(6)]
    made = choose(array, x, y, seconds=0.01, memory_bytes=forecast(array, x, y).peak_bytes(at_once=2))
    assert all(distance(before[i], array[i].state_dict()) == 0 for i in range(6))
    assert array.way.width <= 2 and made.way == array.way
    assert "members one after the other" in str(made)
    array.step(x, y)


def test_convolutions_run_one_by_one_where_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore.fusion import layerwise
    from outcore.fusion.rules import convolution

    monkeypatch.setattr(convolution, "_WAYS", {})
    monkeypatch.setattr(layerwise, "_time", lambda conv, x, w, way, device, s: 1.0 if way == "grouped" else 0.5)

    def build(i: int) -> nn.Module:
        torch.manual_seed(i)
        layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 5)]
        return nn.Sequential(*layers).double()

    array = outcore.fuse([build(i) for i in range(3)], loss=F.cross_entropy, optimizer=_sgd)
    (x, y), *_ = _batches()
    before = copy.deepcopy(array[1].state_dict())
    assert layerwise.measure_convolutions(array, x, y) == {"members": 1}  # the first sees a shared input: dense
    assert distance(before, array[1].state_dict()) == 0
    assert set(convolution._WAYS.values()) == {"members"}
    assert_as_if_alone(build, _batches(), F.cross_entropy, _sgd)


def test_convolutions_are_timed_both_ways() -> None:
    from outcore.fusion.layerwise import _time
    from outcore.fusion.rules.convolution import Convolution

    conv = Convolution.of(2, 1, 1, 1, 1)
    x, w = torch.empty(3, 2, 4, 6, 6, device="meta"), torch.empty(3, 4, 4, 3, 3, device="meta")
    assert all(_time(conv, x, w, way, torch.device("cpu"), 0.001) > 0 for way in ("grouped", "members"))


def test_blocks_left_unfused_give_the_same() -> None:
    models = [_net(i) for i in range(3)]
    array = outcore.fuse(models, loss=F.cross_entropy, optimizer=_sgd, unfused=("0", "4"))
    for x, y in _batches():
        array.step(x, y)
    assert array.coverage["model.4#0"] == "members" and array.coverage["model.1#0"] == "fused"
    twin = _net(2)
    train_serially(twin, _batches(), F.cross_entropy, _sgd(twin.parameters(), 2))
    assert distance(dict(twin.state_dict()), array[2].state_dict()) < 1e-12


def test_predicted_and_achieved_speed_are_told() -> None:
    array = _array(4)
    (x, y), *_ = _batches()
    assert "nothing was measured" in array.report()
    array.tune(x, y, seconds=0.01)
    assert "predicted" in array.report() and "achieved" not in array.report()
    array.step(x, y)
    assert "achieved in 1 steps" in array.report()


def test_where_nothing_is_faster_members_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore.fusion import choice

    monkeypatch.setattr(choice, "_time", lambda array, n, *rest: 1.0 * n)
    monkeypatch.setattr(choice, "_time_serially", lambda *rest: 0.5)
    array = _array(6)
    (x, y), *_ = _batches()
    made = choose(array, x, y)
    assert made.speedup == pytest.approx(0.5) and array.way == Way(1)
    assert "does not pay" in str(made)
    assert array.step(x, y).shape == (6,)


def test_the_time_of_all_members_follows_from_two_and_four(monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore.fusion import choice

    def time(array: Any, count: int, way: Way, *rest: Any) -> float:
        return 1.0 + 0.25 * count if way.width > 1 else 0.5 + 0.5 * count

    monkeypatch.setattr(choice, "_time", time)
    monkeypatch.setattr(choice, "_time_serially", lambda *rest: 1.0)
    array = _array(8)
    (x, y), *_ = _batches()
    made = choose(array, x, y)
    assert made.best.predicted_s == pytest.approx(3.0) and array.way.width == 8
    assert made.speedup == pytest.approx(8 / 3)


# Refusals


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "no models"),
        ([nn.Linear(2, 2), nn.Linear(2, 3)], "weight is"),
        ([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)], "another architecture"),
        ([nn.Sequential(nn.Linear(2, 2))] * 2, "share"),
    ],
)
def test_models_that_cannot_be_members_are_refused(models: list[nn.Module], message: str) -> None:
    with pytest.raises(FuseError, match=message):
        outcore.fuse(models, loss=F.mse_loss, optimizer=_sgd)


def test_models_that_do_different_things_are_refused() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))]
    array = outcore.fuse(models, loss=lambda o, _: o.sum(), optimizer=_sgd)
    models[1][1] = nn.Sequential(nn.ReLU(), nn.ReLU())
    with pytest.raises(FuseError, match=r"does something else|calls in a step"):
        array.step(torch.randn(2, 4), torch.zeros(1))


def test_missing_and_wrong_arguments_are_refused() -> None:
    with pytest.raises(FuseError, match="needs loss"):
        outcore.fuse([_net()])
    with pytest.raises(FuseError, match="clip has 2 values"):
        _array(clip=[1.0, 2.0])
    array = _array()
    with pytest.raises(FuseError, match="one batch for all"):
        array.step()
    with pytest.raises(FuseError, match="each has 1"):
        array.step(each=_batches(1))
    with pytest.raises(FuseError, match="must be one number"):
        _array(loss=lambda o, t: F.cross_entropy(o, t, reduction="none")).step(*_batches(1)[0])
    with pytest.raises(FuseError, match="not its model's"):
        _array(optimizer=lambda p, i: optim.SGD(nn.Linear(2, 2).parameters(), 0.1))


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
    array = outcore.fuse([build(i) for i in range(3)], loss=F.cross_entropy, optimizer=_sgd)
    array.step(x, y)
    assert array.way.width == 3, array.notes
