"""A model within a budget in the loops that people write: the gradients of plain training in each."""

import copy
import io
import threading

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from tests.memory.test_within import budgeted, gradients, images, managed, network, same, step


def test_forward_without_backward_and_exceptions_leave_nothing() -> None:
    model, x = budgeted(network(), 0.5), images()
    for _ in range(3):
        model(x)

    def explode(*_: object) -> None:
        raise KeyboardInterrupt

    duplicate = copy.deepcopy(outcore.release(copy.deepcopy(model)))
    handle = x.clone().requires_grad_()
    output = model(handle)
    output.register_hook(explode)
    with pytest.raises(KeyboardInterrupt):
        output.sum().backward()
    del output
    duplicate(x)
    model.load_state_dict(duplicate.state_dict())
    step(model, x), step(duplicate, x)
    assert same(model, duplicate)


def test_keeping_the_graph() -> None:
    model, x = network(), images()
    duplicate = copy.deepcopy(model)
    budgeted(model, 0.5)
    found = []
    for net in (model, duplicate):
        torch.manual_seed(0)
        loss = net(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(gradients(net))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_second_derivatives() -> None:
    def penalty(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        torch.manual_seed(0)
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return gradients(net)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    duplicate = copy.deepcopy(model)
    x = torch.randn(64, 32)
    budgeted(model, 0.9, x.clone().requires_grad_())
    want, got = penalty(duplicate, x), penalty(model, x)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_two_forwards_before_one_backward() -> None:
    model = network()
    duplicate = copy.deepcopy(model)
    budgeted(model, 0.5)
    for net in (model, duplicate):
        net.zero_grad()
        torch.manual_seed(0)
        first, second = net(images()), net(images() * 2)
        (first.square().sum() + 3 * second.square().sum()).backward()
    assert same(model, duplicate)


def test_no_grad_and_eval() -> None:
    model = network()
    duplicate = copy.deepcopy(model)
    budgeted(model, 0.6)
    with torch.no_grad():
        assert torch.equal(model.eval()(images()), duplicate.eval()(images()))
    step(model, images()), step(duplicate, images())
    assert same(model, duplicate)


def test_under_autocast_with_a_scaler() -> None:
    model = network()
    duplicate = copy.deepcopy(model)
    x = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        budgeted(model, 0.8)
    for net in (model, duplicate):
        net.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(x).float().square().sum()
        scaler.scale(loss).backward()
    assert same(model, duplicate)


def test_copies_and_files() -> None:
    model, x = budgeted(network(), 0.6), images()
    duplicate = copy.deepcopy(model)
    assert managed(duplicate) is not managed(model) and managed(duplicate).model is duplicate
    step(model, x), step(duplicate, x)
    assert same(model, duplicate)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.zero_grad()
    model.zero_grad()
    step(model, x), step(loaded, x)
    assert same(model, loaded)


def test_several_models_in_one_process_and_threads() -> None:
    models = [budgeted(network(blocks=4 + i), 0.6) for i in range(2)]
    duplicates = [outcore.release(copy.deepcopy(m)) for m in models]
    threads = [threading.Thread(target=lambda m=m: m(images()).square().sum().backward()) for m in models]  # type: ignore[misc]
    for model in models:
        model.eval()
    for duplicate in duplicates:
        duplicate.eval()
        duplicate(images()).square().sum().backward()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(m, t) for m, t in zip(models, duplicates, strict=True))


def test_hooks_of_the_user_run_once() -> None:
    model = network()
    calls: list[str] = []
    model[1].register_forward_hook(lambda *_: calls.append("forward"))
    model[2][0].register_forward_hook(lambda *_: calls.append("layer"))
    budgeted(model, 0.6)
    calls.clear()
    step(model, images())
    assert sorted(calls) == ["forward", "layer"]


def test_modified_inputs_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    x = torch.randn(256, 16)
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    outcore.within(
        model, (x,), memory=None, plan={"0#0:out": "recompute", "1#0:out": "recompute"}, costs=costs, quiet=True
    )
    loss = model(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


@pytest.mark.parametrize("policy", [{}, {"0#0:out": "recompute"}])
def test_a_result_that_is_written_into_after_forward_is_noticed(policy: dict[str, str]) -> None:
    """Tanh's backward needs its own output, which the caller has too."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    x = torch.randn(256, 16)
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    plain = copy.deepcopy(model)
    outcore.within(model, (x,), memory=None, plan=policy, costs=costs, quiet=True)
    for one in (plain, model):
        output = one(x)
        output.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


class TwoResults(nn.Module):
    """Returns a value that its own backward needs, and that others are made again from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tanh, self.gate = nn.Linear(16, 16), nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.tanh(self.first(x))
        return inner, self.gate(self.second(inner)) * 2


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_a_kept_value_that_is_written_into_after_forward_is_noticed(policy: str) -> None:
    model = TwoResults()
    x = torch.randn(256, 16)
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    plain = copy.deepcopy(model)
    plan = {"gate#0:out": "recompute", "second#0:out": policy, "tanh#0:out": "keep"}
    outcore.within(model, (x,), memory=None, plan=plan, costs=costs, quiet=True)
    for one in (plain, model):
        inner, output = one(x)
        inner.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
