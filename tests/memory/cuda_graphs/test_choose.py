"""Live steps are watched, and become graphs only where the loop allows it; with graphs that are the model itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outcore.memory.cuda_graphs import choose as graph_choice
from outcore.memory.cuda_graphs.choose import GraphChoice


class Clock:
    """Time goes on as it is told."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Replays:
    """Instead of graphs: runs the model, and takes its time."""

    def __init__(self, model: nn.Module, clock: Clock, seconds: float) -> None:
        self.model, self.clock, self.seconds = model, clock, seconds
        self.under_way = SimpleNamespace(active=lambda: False)
        self.is_ready, self.freed, self.calls = True, 0, 0

    def ready(self, tensors: list[torch.Tensor]) -> bool:
        return self.is_ready

    def __call__(self, tensors: list[torch.Tensor]) -> tuple[Any]:
        self.clock.now += self.seconds
        self.calls += 1
        return (self.model(*tensors),)

    def free(self) -> None:
        self.freed += 1


class Loop:
    """A model that is trained live in so many seconds, and as graphs in so many others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, live_s: float, graph_s: float, device_s: float = 1e-3) -> None:
        self.clock, self.live_s = Clock(), live_s
        monkeypatch.setattr(graph_choice, "time", self.clock)
        self.model = nn.Linear(3, 2)
        self.graphs = Replays(self.model, self.clock, graph_s)
        self.entry: Any = SimpleNamespace(plan=SimpleNamespace(outcome=SimpleNamespace(time_s=device_s)))
        self.managed_forward: Any = SimpleNamespace(
            wait=lambda: None,
            give_back=lambda: None,
            device=torch.device("cpu"),
            parameters=lambda: list(self.model.parameters()),
            settings=SimpleNamespace(quiet=False),
        )
        self.version, self.made = 0, 0
        self.choice = GraphChoice(SimpleNamespace(), self.make)  # type: ignore[arg-type]
        monkeypatch.setattr(graph_choice, "replace", lambda settings, **_: settings)

    def make(self, settings: Any) -> Any:
        self.made += 1

        def key(args: Any, kwargs: Any) -> Any:
            return (args[0].shape, self.version)

        def run(*args: Any) -> Any:
            (result,) = self.graphs(list(args))
            return result

        other = SimpleNamespace(key=key, run=run, varying=None, admitted={})
        example = torch.Size((4, 3)), self.version
        other.admitted[example] = SimpleNamespace(graphed=self.graphs)
        return other

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The model's output, and whether it was replayed."""
        found = self.choice.call(self.managed_forward, "key", self.entry, (x,), {})
        if found is not None:
            return found[0], True
        self.clock.now += self.live_s
        result = self.model(x)
        self.choice.watch(result)
        return result, False

    def step(self, batch: int = 4, **backward: Any) -> bool:
        self.model.zero_grad()
        output, replayed = self.forward(torch.randn(batch, 3))
        output.sum().backward(**backward)
        return replayed


def test_graphs_that_are_faster_stay(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(monkeypatch, live_s=2.0, graph_s=1.0)
    taken = [loop.step() for _ in range(20)]
    assert not any(taken[:5]) and all(taken[5:])
    assert loop.choice.taken and loop.made == 1
    assert capsys.readouterr().err.count("runs as CUDA graphs: 1.00 s instead of 2.00 s") == 1


def test_graphs_that_are_slower_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(monkeypatch, live_s=2.0, graph_s=2.0)
    taken = [loop.step() for _ in range(20)]
    assert any(taken) and not any(taken[13:])
    assert loop.graphs.freed == 1 and not loop.choice.taken
    assert "it runs call by call" in capsys.readouterr().err


def test_a_step_that_the_device_is_busy_with_is_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, live_s=2.0, graph_s=1.0, device_s=1.95)
    assert not any(loop.step() for _ in range(20))
    assert loop.made == 0


def two_forwards(loop: Loop) -> None:
    loop.model.zero_grad()
    (first, _), (second, _) = loop.forward(torch.randn(4, 3)), loop.forward(torch.randn(4, 3))
    (first.sum() + second.sum()).backward()


def added_up(loop: Loop) -> None:
    output, _ = loop.forward(torch.randn(4, 3))
    output.sum().backward()


def wanting_inputs(loop: Loop) -> None:
    loop.model.zero_grad()
    output, _ = loop.forward(torch.randn(4, 3).requires_grad_())
    output.sum().backward()


def without_backward(loop: Loop) -> None:
    loop.model.zero_grad()
    loop.forward(torch.randn(4, 3))


def second_derivatives(loop: Loop) -> None:
    loop.model.zero_grad()
    output, _ = loop.forward(torch.randn(4, 3))
    (gradient,) = torch.autograd.grad(output.square().sum(), [loop.model.weight], create_graph=True)
    gradient.sum().backward()


LOOPS: dict[str, Callable[[Loop], Any]] = {
    "retain": lambda loop: loop.step(retain_graph=True),
    "two forwards": two_forwards,
    "added up": added_up,
    "gradients of inputs": wanting_inputs,
    "no backward": without_backward,
    "second derivatives": second_derivatives,
}


@pytest.mark.parametrize("kind", LOOPS)
def test_loops_that_cannot_be_replayed_never_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, live_s=2.0, graph_s=1.0)
    for _ in range(20):
        LOOPS[kind](loop)
    assert loop.made == 0 and loop.choice.over


def test_another_size_runs_live_and_graphs_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, live_s=2.0, graph_s=1.0)
    for _ in range(20):
        loop.step()
    assert not loop.step(batch=2) and loop.graphs.freed == 1
    taken = [loop.step() for _ in range(8)]
    assert not taken[0] and taken[-1] and loop.made == 2


def test_what_was_read_and_has_changed_runs_live(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, live_s=2.0, graph_s=1.0)
    for _ in range(20):
        loop.step()
    for _ in range(40):
        loop.version += 1
        assert not loop.step() or loop.made > 1
    assert loop.choice.over  # what changes again and again stays live


def test_evaluation_gets_the_memory_of_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, live_s=2.0, graph_s=1.0)
    for _ in range(20):
        loop.step()
    loop.choice.leave(loop.managed_forward)
    assert loop.graphs.freed == 1 and loop.choice.other is None
    assert [loop.step() for _ in range(6)][-1]
