"""Parameters that come back as late as they may: whoever writes to them in between is heard, nobody else waits."""

import copy
import gc
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.memory.offload.copy_streams import Ends, ThreadCopyStreams
from outcore.memory.param_offload import residency
from tests.memory.param_offload.test_offloader import SGD, batch, network, offloaded, same, train
from tests.memory.param_offload.test_offloader_loops import keeper


class PendingCopy:
    """The end of copies that happen when somebody waits for them, and undo what was written in between."""

    waited = 0

    def __init__(self, ends: Sequence[Ends]) -> None:
        self.ends: Sequence[Ends] = ends

    def wait(self) -> None:
        PendingCopy.waited += bool(self.ends)
        for on_device, off_device in self.ends:
            on_device.copy_(off_device)
        self.ends = ()

    finish = wait

    def done(self) -> bool:
        return not self.ends


class PendingRoundTrip:
    def __init__(self, parts: Sequence[Sequence[Ends]]) -> None:
        self.parts = parts

    def start(self) -> list[PendingCopy]:
        for on_device, off_device in (ends for part in self.parts for ends in part):
            off_device.copy_(on_device)
        return [PendingCopy(part) for part in self.parts]


class PendingCopyStreams(ThreadCopyStreams):
    def round_trip(self, parts: Sequence[Sequence[Ends]]) -> PendingRoundTrip:
        return PendingRoundTrip(parts)


@pytest.fixture(autouse=True)
def pending_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(residency, "copy_streams_for", lambda device: PendingCopyStreams())
    PendingCopy.waited = 0
    yield


def pair() -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    model, plain = network(), network()
    optimizer = offloaded(model, SGD, update="backward", optimizer="keep")
    train(model, optimizer, 4)
    assert keeper(model).updates_in_backward and keeper(model).in_flight.flat_buffers
    train(plain, twin := SGD(plain.parameters()), 4)
    return model, optimizer, plain, twin


def assign(p: nn.Parameter) -> None:
    p.data = p.data * 0.5


@torch.no_grad()
def scale(p: nn.Parameter) -> None:
    p.mul_(0.5)


@torch.no_grad()
def scale_each(p: nn.Parameter) -> None:
    torch._foreach_mul_([p], 0.5)


@torch.no_grad()
def through_numpy(p: nn.Parameter) -> None:
    p.detach().numpy()[...] *= 0.5


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "p.mul_": scale,
    "p.data.mul_": lambda p: p.data.mul_(0.5),
    "p.detach().add_": lambda p: p.detach().add_(0.01),
    "p.data =": assign,
    "foreach": scale_each,
    "numpy": through_numpy,
    "init": lambda p: nn.init.constant_(p, 0.02),
}


@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_while_they_are_coming_is_what_the_next_step_reads(how: str) -> None:
    model, optimizer, plain, twin = pair()
    for _ in range(2):
        for net in (model, plain):
            WRITES[how](list(net.parameters())[-2])
        train(model, optimizer, 2), train(plain, twin, 2)
        assert keeper(model).in_flight.flat_buffers
    assert same(model, plain)


def test_a_loop_that_leaves_its_parameters_alone_waits_where_they_are_used() -> None:
    model, optimizer, _, _ = pair()
    coming = len(keeper(model).in_flight.flat_buffers)
    before = PendingCopy.waited
    optimizer.zero_grad()
    [(p.requires_grad, p.grad, p.shape) for p in model.parameters()]
    assert PendingCopy.waited == before and len(keeper(model).in_flight.flat_buffers) == coming
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(PendingCopy.waited))
    model[-1].register_forward_hook(lambda *_: seen.append(PendingCopy.waited))
    loss = model(batch(7)).square().mean()
    assert seen == [before, before + coming]  # the first bucket has stayed, the others are used last
    torch.manual_seed(5)
    loss.backward()
    optimizer.step()
    last = list(model.parameters())[-1]
    assert type(last) is not nn.Parameter and isinstance(last, nn.Parameter)


def test_a_gradient_that_is_given_to_one_that_is_late_is_heard() -> None:
    model, _, _, _ = pair()
    last = list(model.parameters())[-1]
    assert last.grad is None and type(last) is not nn.Parameter
    last.grad = torch.ones_like(last)
    assert type(last) is nn.Parameter and torch.equal(last.grad, torch.ones(4))


def test_copies_saved_and_loaded_ones_are_ordinary_parameters() -> None:
    model, optimizer, plain, twin = pair()
    other = copy.deepcopy(plain)
    other.load_state_dict(model.state_dict())
    assert same(other, plain)
    train(model, optimizer, 1), train(plain, twin, 1)
    copied = [copy.deepcopy(p) for p in model.parameters()]
    assert {type(p) for p in (*copied, *model.parameters())} == {nn.Parameter}
    train(model, optimizer, 1), train(plain, twin, 1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert all(torch.equal(torch.load(file)[n], t) for n, t in plain.state_dict().items() if file.seek(0) == 0)
    train(model, optimizer, 1), train(plain, twin, 1)
    model.load_state_dict(other.state_dict()), plain.load_state_dict(other.state_dict())
    train(model, optimizer, 1), train(plain, twin, 1)
    assert same(model, plain)


def test_parameters_that_outlive_their_model() -> None:
    model, optimizer, plain, _ = pair()
    left = list(model.parameters())
    del model, optimizer
    gc.collect()
    assert type(left[0]) is nn.Parameter and type(left[-1]) is not nn.Parameter
    assert all(torch.equal(p, q) for p, q in zip(left, plain.parameters(), strict=True))
    assert {type(p) for p in left} == {nn.Parameter}


def test_evaluation_and_release_in_between() -> None:
    model, optimizer, plain, twin = pair()
    with torch.no_grad():
        assert torch.equal(model.eval()(batch(3)), plain.eval()(batch(3)))
    model.train(), plain.train()
    train(model, optimizer, 2), train(plain, twin, 2)
    outcore.release(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter} and same(model, plain)
    train(model, optimizer, 2), train(plain, twin, 2)
    assert same(model, plain)
