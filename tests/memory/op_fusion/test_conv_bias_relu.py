"""A convolution's bias with its ReLU as one operation: plain training up to the order in which a bias's gradient is
summed, under every policy."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.machine.clock import TimedRuns
from outcore.memory.op_fusion import conv_bias_relu
from outcore.memory.op_fusion.conv_bias_relu import as_biased, biases_of, worth_it
from tests.memory.fused import managed, replaced
from tests.memory.oracle import policies

BOUND = 1e-10
CPU = torch.device("cpu")


class Functional(nn.Module):
    """ReLU as a function, a sum that reads a convolution before its ReLU, a ReLU that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x))
        y = self.second(x)
        return F.relu(self.third(F.relu(y) + y))


def network(*, inplace: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in ((3, 8), (8, 8), (8, 6)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=inplace), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 4, 3))


def made(which: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = {"in place": lambda: network(inplace=True), "apart": lambda: network(inplace=False)}.get(
        which, Functional
    )()
    return model.double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_bias_relu, "_DEVICES", {"cpu"})


def agrees(model: nn.Module, plain: nn.Module, images: torch.Tensor) -> None:
    outputs = [m(images) for m in (model, plain)]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)  # convolutions may add a bias before they round
    for m, output in zip((model, plain), outputs, strict=True):
        m.zero_grad()
        output.square().mean().backward()
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and (a.grad - b.grad).abs().max() <= BOUND * largest, name


def test_which_convolutions() -> None:
    found = {}
    for which in ("in place", "apart", "functional"):
        model, images = made(which)
        found[which] = biases_of(outcore.capture(model, (images,)), model, CPU)
    assert found["in place"] == found["apart"] == {"0#0": "1#0", "3#0": "4#0", "6#0": "7#0"}
    assert found["functional"] == {"first#0": "relu()#0", "third#0": "relu()#2"}
    model, images = made("apart")
    graph = outcore.capture(model, (images,))
    assert not biases_of(graph, model, torch.device("cuda"))
    handle = model[0].register_forward_hook(lambda *_: None)
    assert "0#0" not in biases_of(outcore.capture(model, (images,)), model, CPU)
    handle.remove()


@pytest.mark.parametrize("which", ["in place", "apart", "functional"])
def test_trains_as_plain_does(which: str) -> None:
    model, images = made(which)
    plain = copy.deepcopy(model)
    managed(model, images)
    assert len(replaced(model)) == (4 if which == "functional" else 6)
    for _ in range(2):
        agrees(model, plain, images)


@pytest.mark.parametrize("which", ["in place", "apart", "functional"])
@pytest.mark.parametrize("mode", ["recompute", "offload", "encode", "mixture"])
def test_under_every_policy(which: str, mode: str) -> None:
    model, images = made(which)
    plain = copy.deepcopy(model)
    plan = managed(model, images)
    chosen = policies(plan.keeping, mode)
    if mode == "offload":  # also what is too small to be worth it
        chosen = {b.name: mode for b in plan.keeping.buffers.values() if b.kind == "value" and b.savers}
    assert managed(model, images, plan=chosen).policy
    for _ in range(2):
        agrees(model, plain, images)


def test_bitwise_training_and_state_that_leaves_have_none() -> None:
    model, images = made("apart")
    managed(model, images, exact="bitwise")
    assert not replaced(model)
    plain = copy.deepcopy(outcore.release(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    managed(model, images, optimizer=optimizer, state={"parameters": "offload"})
    assert not replaced(model) & {"0#0", "1#0"}
    agrees(model, plain, images)


def test_frozen_convolutions() -> None:
    model, images = made("in place")
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)  # type: ignore[union-attr]
    plain = copy.deepcopy(model)
    managed(model, images)
    for m in (model, plain):
        m(images).square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_what_it_is_expected_to_save() -> None:
    model, images = made("apart")
    graph = outcore.capture(model, (images,))
    costs = outcore.measure(graph, runs=2)
    biases = biases_of(graph, model, CPU)
    rate = 3 * costs.calls["0#0"].output_bytes / (0.8 * 0.3 * _seconds(costs.calls["0#0"]))
    less = as_biased(costs, biases, rate).calls["0#0"]
    assert _seconds(less) < _seconds(costs.calls["0#0"])

    def busy(device_s: float, host_s: float) -> Any:
        timing = TimedRuns.of([device_s], dispatch_s=host_s)
        return type(costs)(**{**costs.__dict__, "calls": {n: _with(c, timing) for n, c in costs.calls.items()}})

    assert worth_it(biases, busy(1.0, 1e-4), issued=True)
    assert not worth_it(biases, busy(1e-4, 1.0), issued=True) and worth_it(biases, busy(1e-4, 1.0), issued=False)


def _with(cost: Any, timing: TimedRuns) -> Any:
    from dataclasses import replace

    return replace(cost, forward=timing, backward=timing)


def _seconds(cost: Any) -> float:
    return sum(t.median_s for t in (cost.forward, cost.backward) if t is not None)
