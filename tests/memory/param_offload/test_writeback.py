"""Buckets leave and come back once in every step, in an order that keeps the link busy."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.memory.offload.copy_streams import Ends, RoundTripCopy, ThreadCopyStreams
from outcore.memory.param_offload import flat_buffer, residency, writeback
from outcore.program.policies import RECOMPUTE
from tests.memory.param_offload.test_in_flight_params import PendingCopy
from tests.memory.param_offload.test_offloader import SGD, batch, network, offloaded, same, train
from tests.memory.param_offload.test_offloader_loops import keeper

started: list[list[int]] = []
"""Where in memory the parts of each round trip begin, in the order in which they were started."""


class EmptyRoundTrip:
    """Copies out and back, in between there are no numbers at all: who computes with them is found out."""

    def __init__(self, parts: Sequence[Sequence[Ends]]) -> None:
        self.parts = parts

    def start(self) -> list[PendingCopy]:
        started.append([part[0][0].data_ptr() for part in self.parts])
        for on_device, off_device in (ends for part in self.parts for ends in part):
            off_device.copy_(on_device)
            on_device.fill_(255)
        return [PendingCopy(part) for part in self.parts]


class EmptyCopyStreams(ThreadCopyStreams):
    def round_trip(self, parts: Sequence[Sequence[Ends]]) -> RoundTripCopy:
        return EmptyRoundTrip(parts)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is large, for networks of some kilobytes: buckets of 2, 6 and 68 kB."""
    from outcore.planner.memory import buckets

    monkeypatch.setattr(flat_buffer, "_LEAST_BYTES", 1024)
    for name, size in (("_PIECE_BYTES", 2048), ("_HALVED_BYTES", 8192), ("_BESIDE_BYTES", 1024)):
        monkeypatch.setattr(writeback, name, size)
    monkeypatch.setattr(buckets, "_FIRST_BYTES", 2560)
    monkeypatch.setattr(residency, "copy_streams_for", lambda device: EmptyCopyStreams())
    started.clear()
    yield


def running(steps: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = offloaded(model, SGD, update="backward", optimizer="keep")
    train(model, optimizer, steps)
    assert keeper(model).updates_in_backward and len(keeper(model).buckets) == 3
    return model, optimizer


def pair(steps: int = 4) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    model, optimizer = running(steps)
    plain = network()
    train(plain, twin := SGD(plain.parameters()), steps)
    return model, optimizer, plain, twin


def starts(model: nn.Module) -> list[list[int]]:
    """Of every bucket, where its parts begin."""
    rows = keeper(model).writebacks.parts.values()
    return [[part.flat_buffer.place.memory.data_ptr() + part.start for part in row] for row in rows]


def test_what_is_needed_last_leaves_around_what_is_needed_sooner_and_the_first_bucket_at_the_turn() -> None:
    model, optimizer = running()
    (first,), (beside, second), (third, rest) = starts(model)
    started.clear()
    loss = model(batch()).square().mean()
    assert started == [[beside, first]]
    loss.backward()
    optimizer.step()
    assert started == [[beside, first], [third], [second, rest]]
    parts = [part for row in keeper(model).writebacks.parts.values() for part in row]
    assert sum(part.end - part.start for part in parts) == sum(
        flat_buffer.bytes for flat_buffer in keeper(model).flat_buffers
    )


def test_weights_are_those_of_plain_training_although_nothing_is_there_between_leaving_and_return() -> None:
    model, _, plain, _ = pair(7)
    assert same(model, plain)


def test_one_bucket_leaves_when_it_was_updated() -> None:
    def one() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten())

    model, plain = one(), one()
    optimizer, twin = offloaded(model, SGD, update="backward", optimizer="keep"), SGD(plain.parameters())
    train(model, optimizer), train(plain, twin)
    assert len(keeper(model).buckets) == 1 and len(started) == 3  # of five steps two are looked at
    assert same(model, plain)


def scaled(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    next(model.parameters()).data.mul_(0.5)
    return loss


def decayed(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    return loss + sum(p.square().sum() for p in model.parameters())


def asked(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    assert all(p.grad is None and p.shape.numel() for p in model.parameters())
    return loss


@pytest.mark.parametrize("what", [scaled, decayed, asked])
def test_parameters_that_user_code_touches_between_forward_and_backward(what: Callable[..., torch.Tensor]) -> None:
    model, optimizer, plain, twin = pair()
    for i in range(3):
        for net, opt in ((model, optimizer), (plain, twin)):
            opt.zero_grad()
            torch.manual_seed(i)
            what(net, net(batch(i)).square().mean()).backward()
            opt.step()
    assert same(model, plain)


def test_gradients_of_what_is_late_are_seen() -> None:
    model, optimizer, plain, twin = pair()
    for net, opt in ((model, optimizer), (plain, twin)):
        opt.zero_grad()
        torch.manual_seed(1)
        features = []
        hook = net[-2].register_forward_hook(lambda *given, found=features: found.append(given[-1]))
        net(batch())
        hook.remove()
        features[0].square().mean().backward()  # the last bucket is never complete
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model[8].parameters(), plain[8].parameters(), strict=True))
    optimizer.step(), twin.step()
    assert same(model, plain)


class Tied(nn.Module):
    """The first weight is used again after the last one was."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = network()
        self.first = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).mean(1) + self.first(x).mean((1, 2, 3))


def test_a_weight_that_is_used_once_more_is_waited_for() -> None:
    model, plain = Tied(), Tied()
    optimizer, twin = offloaded(model, SGD, update="backward", optimizer="keep"), SGD(plain.parameters())
    train(model, optimizer, 6), train(plain, twin, 6)
    assert keeper(model).updates_in_backward and same(model, plain)


def test_a_forward_without_backward_and_a_second_one() -> None:
    model, optimizer, plain, twin = pair()
    for net, opt in ((model, optimizer), (plain, twin)):
        torch.manual_seed(2)
        net(batch(1))
        loss = net(batch(2)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        assert torch.equal(model.eval()(batch(3)), plain.eval()(batch(3)))
    model.train(), plain.train()
    train(model, optimizer), train(plain, twin)
    assert same(model, plain)


def test_evaluation_between_forward_and_backward() -> None:
    model, optimizer, plain, twin = pair()
    for net, opt in ((model, optimizer), (plain, twin)):
        opt.zero_grad()
        torch.manual_seed(2)
        loss = net(batch(8)).square().mean()
        with torch.no_grad():
            net.eval()(batch(7))
        net.train()
        loss.backward()
        opt.step()
    assert same(model, plain)


def test_all_of_a_bucket_is_at_home_when_backward_ends_early() -> None:
    model, _ = running()

    class StopError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise StopError

    hook = list(model.parameters())[4].register_hook(stop)  # the last bucket was updated by then, and owes a part
    with pytest.raises(StopError):
        model(batch()).square().mean().backward()
    hook.remove()
    assert any(flat_buffer.pending for flat_buffer in keeper(model).flat_buffers)
    keeper(model).in_flight.wait_all()
    for each in keeper(model).flat_buffers:
        each.make_resident()
    on_device = {name: p.detach().clone() for name, p in model.named_parameters()}
    keeper(model).offload_all()
    assert all(torch.equal(p, on_device[name]) for name, p in model.named_parameters())
    assert not any(flat_buffer.pending or flat_buffer.resident for flat_buffer in keeper(model).flat_buffers)


def test_buckets_that_were_not_updated_in_order_are_completed_by_the_step() -> None:
    model, optimizer, plain, twin = pair()
    for net, opt in ((model, optimizer), (plain, twin)):
        opt.zero_grad()
        torch.manual_seed(3)
        net[6:](torch.randn(4, 16, 12, 12, generator=torch.Generator().manual_seed(1))).square().mean().backward()
        opt.step()
    assert not keeper(model).buckets[2].weights.pending
    assert same(model, plain)


def test_what_was_written_at_home_is_not_overwritten_by_a_part_that_did_not_have_to_leave() -> None:
    model, optimizer, plain, twin = pair()
    with torch.no_grad():
        model.eval()(batch())  # afterwards all are at home
    model.train()
    for net, opt in ((model, optimizer), (plain, twin)):
        list(net.parameters())[-4].data.mul_(0.5)
        opt.zero_grad()
        net[:6](batch()).square().mean().backward()  # the last bucket stays where it is
        opt.step()
    assert same(model, plain)


def test_values_that_are_made_again_find_the_weights_they_are_made_with() -> None:
    model, plain = network(), network()
    optimizer, twin = SGD(model.parameters()), SGD(plain.parameters())
    costs = by_bytes(account(outcore.capture(model, (batch(),))), 1e9)
    outcore.within(model, (batch(),), memory=None, costs=costs, quiet=True)
    kept = outcore.memory_plan(model).keeping
    plan = {b.name: RECOMPUTE for b in kept.buffers.values() if RECOMPUTE in kept.choices(b)}
    state = {"parameters": "offload", "update": "backward"}
    outcore.within(model, (batch(),), memory=None, costs=costs, optimizer=optimizer, plan=plan, state=state, quiet=True)
    train(model, optimizer, 6), train(plain, twin, 6)
    assert plan and keeper(model).updates_in_backward and started and same(model, plain)


def test_nothing_leaves_while_the_model_is_looked_at() -> None:
    model, _ = running()
    state = keeper(model)
    state.in_flight.wait_all()
    started.clear()
    state.in_forward = True
    with state.gathered():
        assert {type(p) for p in model.parameters()} == {nn.Parameter} and not started
    state.in_forward = False


@pytest.mark.parametrize("place", [0, 3, 8, 10])
def test_an_exception_in_any_bucket_loses_nothing(place: int) -> None:
    model, optimizer, plain, twin = pair()

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    for kind in ("register_forward_pre_hook", "register_forward_hook"):
        hook = getattr(model[place], kind)(fail)
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
    train(model, optimizer, 3), train(plain, twin, 3)
    assert same(model, plain)


def test_steps_leave_nothing_behind_and_a_model_takes_its_flat_buffers_with_it() -> None:
    model, optimizer = running()
    counts = []
    for _ in range(3):
        train(model, optimizer, 20)
        started.clear()
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] <= counts[1] + 20
    flat_buffer = weakref.ref(keeper(model).flat_buffers[0])
    gc.disable()
    try:
        del model, optimizer
        assert flat_buffer() is None
    finally:
        gc.enable()
