"""Members are independent in everything, and what comes out of one is an ordinary model's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from safetensors.torch import load_model
from torch import Tensor, nn, optim

import outcore
from outcore.fusion import MemberLossScale, RunMode
from tests.fusion.serial import assert_as_if_alone, distance, train_serially
from tests.fusion.small import momentum, small_array, small_batches, small_net


def test_a_diverged_member_is_frozen_and_the_others_do_not_notice() -> None:
    array = small_array(optimizer=lambda p, i: optim.SGD(p, float("inf") if i == 1 else 0.05))
    for x, y in small_batches():
        array.step(x, y)
    assert array.status == ["training", "diverged", "training"]
    twin = small_net(2)
    train_serially(twin, small_batches(), F.cross_entropy, optim.SGD(twin.parameters(), 0.05))
    assert distance(dict(twin.state_dict()), array[2].state_dict()) < 1e-12


def test_a_stopped_member_keeps_its_weights_and_goes_on_when_asked() -> None:
    array = small_array()
    (x, y), *_ = small_batches()
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


@pytest.mark.parametrize("way", [RunMode(3), RunMode(2), RunMode(1)], ids=str)
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_a_refilled_slot_trains_like_a_fresh_model(slot: int, way: RunMode) -> None:
    array = small_array(way=way, optimizer=lambda p, i: optim.Adam(p, 0.01 * (i + 1)))
    batches = small_batches(8)
    for x, y in batches[:4]:
        array.step(x, y)
    others = {i: copy.deepcopy(array[i].state_dict()) for i in range(3) if i != slot}
    new, twin = small_net(40), small_net(40)
    array.refill(slot, new)
    assert all(distance(state, array[i].state_dict()) == 0 for i, state in others.items())
    for x, y in batches[4:]:
        array.step(x, y)
    train_serially(twin, batches[4:], F.cross_entropy, optim.Adam(twin.parameters(), 0.01 * (slot + 1)))
    assert distance(dict(twin.state_dict()), array[slot].state_dict()) < 1e-10
    stayed = next(iter(others))
    serial = small_net(stayed)
    train_serially(serial, batches, F.cross_entropy, optim.Adam(serial.parameters(), 0.01 * (stayed + 1)))
    assert distance(dict(serial.state_dict()), array[stayed].state_dict()) < 1e-10


def test_every_member_may_have_its_own_batch() -> None:
    batches = [small_batches(3), small_batches(6)[3:]]
    array = small_array(2)
    for n in range(3):
        array.step(each=[batches[0][n], batches[1][n]])
    for i in range(2):
        twin = small_net(i)
        train_serially(twin, batches[i], F.cross_entropy, momentum(twin.parameters(), i))
        assert distance(dict(twin.state_dict()), array[i].state_dict()) < 1e-12


@pytest.mark.parametrize("width", [1, 2, 3])
def test_groups_of_any_width_give_the_same(width: int) -> None:
    array = assert_as_if_alone(
        small_net, small_batches(), F.cross_entropy, momentum, way=RunMode(width), tolerance=1e-12
    )
    assert array.way.width == width and len(array.groups) == -(-3 // width)


def test_an_array_rearranged_in_the_middle_goes_on_as_if_not() -> None:
    batches = small_batches(9)
    array = small_array(optimizer=lambda p, i: optim.Adam(p, 0.01 * (i + 1)))
    for n, (x, y) in enumerate(batches):
        if n in (3, 6):
            array.arrange(RunMode(1 if n == 3 else 2))
        array.step(x, y)
    twin = small_net(1)
    train_serially(twin, batches, F.cross_entropy, optim.Adam(twin.parameters(), 0.02))
    assert distance(dict(twin.state_dict()), array[1].state_dict()) < 1e-10


@pytest.mark.parametrize("way", [RunMode(4), RunMode(2), RunMode(1)], ids=str)
def test_members_that_are_kept_go_on_as_if_the_others_had_never_been(way: RunMode) -> None:
    batches, dropped = small_batches(9), nn.Dropout(0.3)

    def build(i: int) -> nn.Module:
        return nn.Sequential(*small_net(i)[:4], copy.deepcopy(dropped), small_net(i)[4])

    def optimizer(params: Any, i: int) -> optim.Optimizer:
        return optim.Adam(params, float("inf") if i == 1 else 0.01 * (i + 1))

    clips, seeds = [9.0, 9.0, 0.1, 0.2], [3, 4, 5, 6]
    array = outcore.fuse(
        map(build, range(4)), loss=F.cross_entropy, optimizer=optimizer, clip=clips, seeds=seeds, way=way
    )
    for x, y in batches[:4]:
        array.step(x, y)
    array[0].stop()
    left = array.models[0]
    stopped = copy.deepcopy(array[0].state_dict())
    array.keep([3, 1, 2])
    assert array.status == ["training", "diverged", "training"] and len(array) == 3
    for x, y in batches[4:]:
        array.step(x, y)
    assert distance(stopped, dict(left.state_dict())) == 0
    for slot, i in ((0, 3), (2, 2)):
        twin = build(i)
        train_serially(twin, batches, F.cross_entropy, optimizer(twin.parameters(), i), clip=clips[i], seed=seeds[i])
        assert distance(dict(twin.state_dict()), array[slot].state_dict()) < 1e-10
    with pytest.raises(outcore.OutcoreError, match="none twice"):
        array.keep([1, 1])


def test_loss_weights_scale_each_members_gradient() -> None:
    array = small_array(2, loss_weight=[1.0, 0.25], optimizer=lambda p, i: optim.SGD(p, 0.1))
    (x, y), *_ = small_batches()
    array.step(x, y)
    twin = small_net(1)
    train_serially(twin, [(x, y)], lambda o, t: 0.25 * F.cross_entropy(o, t), optim.SGD(twin.parameters(), 0.1))
    assert distance(dict(twin.state_dict()), array[1].state_dict()) < 1e-12


def test_a_loss_scale_that_overflows_skips_one_members_step_only() -> None:
    scale = MemberLossScale(initial=1024.0, scales=[1024.0, 1e308])
    array = small_array(2, loss_scale=scale, loss=lambda o, t: 100 * F.cross_entropy(o, t))
    (x, y), *_ = small_batches()
    before = [copy.deepcopy(array[i].model[4].weight) for i in range(2)]
    array.step(x, y)
    assert scale.scales == [1024.0, 5e307]
    assert torch.equal(array[1].model[4].weight, before[1])
    twin = small_net(0)
    train_serially(twin, [(x, y)], lambda o, t: 100 * F.cross_entropy(o, t), momentum(twin.parameters(), 0))
    assert distance(dict(twin.state_dict()), array[0].state_dict()) < 1e-10


def test_evaluation_changes_nothing_and_gives_metrics() -> None:
    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target).double().mean()

    array = small_array(metrics={"accuracy": accuracy})
    (x, y), *_ = small_batches()
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
    assert_as_if_alone(build, batches, F.cross_entropy, momentum, seeds=[5, 6, 7], tolerance=1e-12)


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


def test_a_members_state_is_that_of_a_serial_model_and_saves_alone(tmp_path: Path) -> None:
    array = small_array()
    (x, y), *_ = small_batches()
    array.step(x, y)
    fresh = small_net(9)
    assert array[1].state_dict().keys() == fresh.state_dict().keys()
    array[1].save(tmp_path / "one.safetensors")
    load_model(fresh, tmp_path / "one.safetensors")
    assert distance(dict(fresh.state_dict()), array[1].state_dict()) == 0
    assert (tmp_path / "one.safetensors").stat().st_size < 4 * sum(p.numel() * 8 for p in fresh.parameters())
    torch.save(array[1].state_dict(), tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 3 * sum(p.numel() * 8 for p in fresh.parameters()) + 20_000


def test_weights_loaded_into_a_members_model_are_trained_on() -> None:
    array = small_array()
    array[1].model.load_state_dict(small_net(50).state_dict())
    for x, y in small_batches():
        array.step(x, y)
    twin = small_net(50)
    train_serially(twin, small_batches(), F.cross_entropy, momentum(twin.parameters(), 1))
    assert distance(dict(twin.state_dict()), array[1].state_dict()) < 1e-12


@pytest.mark.parametrize("way", [RunMode(3), RunMode(1)], ids=str)
@pytest.mark.parametrize("kind", [optim.Adam, optim.NAdam, lambda p, lr: optim.SGD(p, lr, momentum=0.9)])
def test_a_checkpoint_of_a_member_is_gone_on_from(kind: Any, way: RunMode) -> None:
    """Go back to the fourth step in one slot while the others go on; then that slot's run is that of a serial one."""
    batches = small_batches(8)
    array = small_array(
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
        twin = small_net(i)
        own = kind(twin.parameters(), lr=0.01 * (i + 1))
        schedulers = [optim.lr_scheduler.StepLR(own, 3, 0.5)]
        train_serially(twin, order, F.cross_entropy, own, schedulers=schedulers)
        assert distance(dict(twin.state_dict()), array[i].state_dict()) < 1e-10


def test_released_models_live_on_by_themselves() -> None:
    array = small_array()
    (x, y), *_ = small_batches()
    array.step(x, y)
    kept = array[0].state_dict()
    models = array.release()
    models[1].load_state_dict(small_net(60).state_dict())
    assert distance(kept, dict(models[0].state_dict())) == 0
