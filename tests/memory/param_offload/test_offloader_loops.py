"""State below the device survives what training loops do: saving, copying, clipping, adding up, failing."""

import copy
import gc
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.errors import OutcoreError, PlanError
from outcore.memory.param_offload.offloader import StateOffloader
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from tests.memory.param_offload.test_offloader import (
    ADAM,
    SGD,
    WAYS,
    batch,
    network,
    offloaded,
    same,
    same_state,
    train,
)

CAREFUL = {name: way for name, way in WAYS.items() if "update" not in way}


def keeper(model: nn.Module) -> StateOffloader:
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward) and managed_forward.keeper is not None
    return managed_forward.keeper


def pair(make: Any = ADAM, build: Callable[[], nn.Module] = network, **state: Any) -> tuple[Any, Any, Any, Any]:
    """A model with its state elsewhere and a plain one, each with its optimizer."""
    model, plain = build(), build()
    return model, offloaded(model, make, **state), plain, make(plain.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_saved_after_any_step_and_loaded_again(way: str) -> None:
    model, optimizer, plain, twin = pair(**WAYS[way])
    train(model, optimizer, 4), train(plain, twin, 4)
    kept, kept_state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 3)
    file.seek(0)
    loaded = torch.load(file)
    assert all(torch.equal(loaded["model"][n], kept[n]) for n in kept)
    model.load_state_dict(kept)
    optimizer.load_state_dict(kept_state)
    assert same(model, plain) and same_state(optimizer, twin)
    train(model, optimizer, 3), train(plain, twin, 3)
    assert same(model, plain) and same_state(optimizer, twin)


@pytest.mark.parametrize("way", CAREFUL)
def test_clipping_and_adding_up_gradients(way: str) -> None:
    model, optimizer, plain, twin = pair(SGD, **CAREFUL[way])
    for net, opt in ((model, optimizer), (plain, twin)):
        torch.manual_seed(1)
        for i in range(3):
            opt.zero_grad()
            for k in range(2):
                net(batch(2 * i + k)).square().sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
    assert same(model, plain)


@pytest.mark.parametrize("way", CAREFUL)
def test_autocast_a_gradient_scaler_and_channels_last(way: str) -> None:
    def build() -> nn.Module:
        return network().to(memory_format=torch.channels_last)

    model, optimizer, plain, twin = pair(SGD, build, **CAREFUL[way])
    for net, opt in ((model, optimizer), (plain, twin)):
        torch.manual_seed(1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for i in range(4):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(batch(i).to(memory_format=torch.channels_last)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    assert same(model, plain)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("why", "between"),
    [
        ("changed between backward", lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1)),
        ("added up", lambda net: net(batch(9)).mean().backward()),
    ],
)
def test_a_loop_that_needs_the_careful_way_is_told_and_gets_it(why: str, between: Callable[[nn.Module], Any]) -> None:
    model, optimizer, plain, twin = pair(SGD, update="backward")
    for net, opt in ((model, optimizer), (plain, twin)):
        torch.manual_seed(1)
        for i in range(5):
            opt.zero_grad()
            net(batch(i)).square().mean().backward()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                between(net)
                opt.step()
            if net is model and i == 0:
                assert any(why in str(w.message) for w in told)
    assert same(model, plain)


def test_weights_written_behind_torchs_back_are_noticed() -> None:
    model, optimizer, plain, twin = pair(SGD, update="backward")
    for net, opt in ((model, optimizer), (plain, twin)):
        torch.manual_seed(1)
        for i in range(5):
            opt.zero_grad()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                loss = net(batch(i)).square().mean()
            if net is model and i == 1:
                assert any("parameters are changed" in str(w.message) for w in told)
            loss.backward()
            opt.step()
            for p in net.parameters():
                p.data.clamp_(-0.05, 0.05)
    assert same(model, plain)


@pytest.mark.parametrize("way", WAYS)
def test_weights_written_through_torch_between_steps(way: str) -> None:
    model, optimizer, plain, twin = pair(SGD, **WAYS[way])
    for net, opt in ((model, optimizer), (plain, twin)):
        train(net, opt, 4)
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.mul_(0.9)
                if i % 3 == 0:
                    p.data = p.data * 0.5
        train(net, opt, 2)
    assert same(model, plain)


@pytest.mark.parametrize("evaluated", [False, True])
def test_what_is_written_after_a_step_is_what_the_next_one_reads(evaluated: bool) -> None:
    """Parameters turn round in backward; by the end of the step they are back, and whoever writes to them is heard."""
    model, optimizer, plain, twin = pair(SGD, update="backward")
    for net, opt in ((model, optimizer), (plain, twin)):
        train(net, opt, 4)
        for write in (lambda p: p.data.mul_(0.5), lambda p: p.detach().add_(0.01)):
            for p in net.parameters():
                write(p)
            if evaluated:
                with torch.no_grad():
                    net(batch(3))
            train(net, opt, 2)
    assert keeper(model).updates_in_backward
    assert same(model, plain)


def test_a_second_backward_is_refused_when_the_first_was_applied() -> None:
    model, optimizer, _, _ = pair(SGD, update="backward")
    train(model, optimizer, 3)
    model(batch()).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OutcoreError, match='use update="step"'):
        model(batch()).sum().backward()
    assert all(torch.equal(before[n], t) for n, t in model.named_parameters())


def test_settings_that_change_after_the_update_are_refused() -> None:
    model, optimizer, _, _ = pair(SGD, update="backward")
    train(model, optimizer, 3)
    model(batch()).sum().backward()
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(OutcoreError, match="settings changed"):
        optimizer.step()


@pytest.mark.parametrize("way", WAYS)
def test_schedulers_and_several_groups(way: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        listed = list(parameters)
        return torch.optim.AdamW([{"params": listed[::2], "lr": 1e-3}, {"params": listed[1::2], "weight_decay": 0.0}])

    model, optimizer, plain, twin = pair(make, **WAYS[way])
    for net, opt in ((model, optimizer), (plain, twin)):
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)
        for _ in range(3):
            train(net, opt, 2)
            schedule.step()
    assert same(model, plain) and same_state(optimizer, twin)


class Switched(nn.Module):
    """A layer that is left out at times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, more: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.extra(x)) if more else x)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_not_used_may_be_written_before_it_is(way: str) -> None:
    x = torch.randn(3, 16)
    nets = []
    for managed in (True, False):
        torch.manual_seed(0)
        net = Switched()
        opt = SGD(net.parameters())
        if managed:
            costs = by_bytes(account(outcore.capture(net, (x,))), 1e9)
            state = {"parameters": "offload", "optimizer": "offload", "flat_buffer_bytes": 512, **WAYS[way]}
            outcore.within(net, (x,), memory=None, costs=costs, optimizer=opt, state=state, quiet=True)
        for i in range(6):
            opt.zero_grad()
            loss = net(x, i % 2 == 0).square().mean()
            if i == 3:
                net.extra.weight.data.mul_(0.5)
            loss.backward()
            opt.step()
        nets.append(net)
    assert same(*nets)


def test_hooks_on_the_step_run_once() -> None:
    model = network()
    optimizer = offloaded(model, SGD)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(model, optimizer, 2)
    assert seen == ["before", "after"] * 2


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_anywhere_loses_nothing(way: str) -> None:
    model, optimizer, plain, twin = pair(ADAM, **WAYS[way])
    train(model, optimizer, 3), train(plain, twin, 3)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model[8].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    hook.remove()
    with torch.no_grad():  # what an unfinished pass did to statistics is the model's own doing
        for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
            ours.copy_(theirs)
    assert same(model, plain)
    output = model(batch(1))
    output.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        output.sum().backward()
    plain(batch(1))
    del output
    optimizer.zero_grad()
    assert same(model, plain)
    train(model, optimizer, 3), train(plain, twin, 3)
    assert same(model, plain) and same_state(optimizer, twin)


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_between_passes_and_copies(way: str) -> None:
    model, optimizer, plain, twin = pair(ADAM, **WAYS[way])
    for net, opt in ((model, optimizer), (plain, twin)):
        train(net, opt, 3)
        net.eval()
        with torch.no_grad():
            net(batch(7))
        net.train()
        opt.zero_grad()
        loss = net(batch(8)).square().sum()
        net.eval()
        with torch.no_grad():
            net(batch(7))
        net.train()
        loss.backward()
        opt.step()
    assert same(model, plain)
    twin_of_ours = copy.deepcopy(model)
    assert same(twin_of_ours, plain)
    own = ADAM(twin_of_ours.parameters())
    train(twin_of_ours, own, 2)
    assert same(model, plain)
    fresh = copy.deepcopy(plain)
    train(fresh, ADAM(fresh.parameters()), 2)
    assert same(twin_of_ours, fresh)


def test_a_graph_that_outlives_the_step_is_refused_as_by_torch() -> None:
    for way in (None, "in step", "through a window"):
        model = network()
        optimizer = SGD(model.parameters()) if way is None else offloaded(model, SGD, **WAYS[way])
        loss = model(batch()).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_window_and_visits_bound_what_is_here() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)]
    model = nn.Sequential(*layers)
    x = torch.randn(2, 64)
    optimizer = ADAM(model.parameters())
    state = {"parameters": "offload", "optimizer": "offload", "gradients": "offload", "flat_buffer_bytes": 1}
    window = 4 * 64 * 66 * 4
    costs, where = by_bytes(account(outcore.capture(model, (x,))), 1e9), {**state, "stage_bytes": window}
    outcore.within(model, (x,), memory=None, costs=costs, optimizer=optimizer, state=where, quiet=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        assert keeper(model).stats.here_bytes == 0
        optimizer.step()
    assert keeper(model).stats.peak_bytes <= window
    assert keeper(model).stats.peak_bytes > window // 3


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_steps_leave_nothing_behind(count: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(2, 8)
    optimizer = SGD(model.parameters())
    state = {"parameters": "offload", "optimizer": "offload", "stage_bytes": 1100, "flat_buffer_bytes": 256}
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    outcore.within(model, (x,), memory=None, costs=costs, optimizer=optimizer, state=state, quiet=True)

    def steps(count: int) -> int:
        for _ in range(count):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        gc.collect()
        return len(gc.get_objects())

    steps(20)
    before = steps(20)
    assert steps(count) <= before + 50


def test_refusals_say_what_to_do() -> None:
    model = network()
    with pytest.raises(OutcoreError, match="optimizer=optimizer"):
        outcore.within(model, (batch(),), memory=None, state={"parameters": "offload"}, quiet=True)
    for wrong, match in [
        ({"weights": "offload"}, "not known"),
        ({"parameters": "disk"}, "keep, offload"),
        ({"gradients": "offload"}, "stage_bytes"),
        ({"parameters": "offload", "gradients": "offload", "stage_bytes": 1, "update": "backward"}, "used up"),
    ]:
        with pytest.raises(PlanError, match=match):
            outcore.within(model, (batch(),), memory=None, optimizer=SGD(model.parameters()), state=wrong, quiet=True)
    with pytest.raises(OutcoreError, match="LBFGS"):
        offloaded(model, lambda p: torch.optim.LBFGS(p))
    optimizer = offloaded(model, SGD)
    model[0].weight.data = torch.zeros(1)
    with pytest.raises(OutcoreError, match="release"):
        train(model, optimizer, 1)


def test_a_disk_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    model = network()
    with pytest.raises(OutcoreError, match="OUTCORE_SCRATCH"):
        offloaded(model, SGD)
    monkeypatch.undo()
    assert all(math.isfinite(float(p.detach().sum())) for p in model.parameters())
    assert "forward" not in model.__dict__
