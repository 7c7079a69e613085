"""Convolutions that have other bits in backward's thread are not made again; which ones have is made up here."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import PlanError
from outcore.memory.saved_tensors import cudnn_search, plan_call
from outcore.memory.saved_tensors.cudnn_search import differing, in_backward, known_to_differ, made_again
from outcore.planner.memory.plan import MemoryPlan

IMAGES = torch.randn(4, 8, 32, 32, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1 + i % 2), nn.SiLU()) for i in range(8)]
    return nn.Sequential(*layers)


@pytest.fixture
def unlike(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of convolutions that differ, in a process in which algorithms are searched for."""
    names: set[str] = set()
    monkeypatch.setattr(cudnn_search, "searches", lambda device: True)
    monkeypatch.setattr(cudnn_search, "_REPEATS", {})
    monkeypatch.setattr(plan_call, "tier_below", lambda *args, **kwargs: None)  # nothing leaves the device
    monkeypatch.setattr(cudnn_search, "_key", lambda graph, step, device: step.name)
    monkeypatch.setattr(cudnn_search, "_repeats", lambda graph, name, device: name not in names)
    yield names


def planned(model: nn.Module, memory: int | str) -> MemoryPlan:
    outcore.within(model, (IMAGES,), memory=memory, quiet=True, measure_s=0.3)
    plan = outcore.memory_plan(model)
    assert isinstance(plan, MemoryPlan)
    return plan


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(IMAGES).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def least() -> int:
    """The smallest budget, in which convolutions are made again."""
    with pytest.raises(PlanError) as refused:
        planned(network(), 1)
    assert refused.value.least_bytes is not None
    return refused.value.least_bytes


def test_those_that_differ_are_not_made_again_and_the_budget_is_kept(unlike: set[str]) -> None:
    want, budget = gradients(network()), int(1.1 * least())
    first = made_again(planned(network(), budget))
    assert any(name.endswith(".0#0") for name in first), "the test needs a plan that makes convolutions again"
    unlike.add(sorted(name for name in first if name.endswith(".0#0"))[0])
    cudnn_search._REPEATS.clear()
    model = network()
    try:
        plan = planned(model, budget)
    except PlanError as refused:
        assert "torch.backends.cudnn.benchmark = False" in str(refused)
    else:
        assert made_again(plan).isdisjoint(unlike) and plan.peak_bytes <= budget
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), want, strict=True))


def test_where_all_differ_none_is_made_again_or_the_refusal_says_why(unlike: set[str]) -> None:
    smallest = least()
    unlike.update(f"{i}.0#0" for i in range(8))
    cudnn_search._REPEATS.clear()
    with pytest.raises(PlanError, match="8 convolutions have another algorithm") as refused:
        planned(network(), smallest)
    assert refused.value.least_bytes is not None and refused.value.least_bytes > smallest
    plan = planned(network(), refused.value.least_bytes)  # what a refusal names does
    assert plan.policy and made_again(plan).isdisjoint(unlike)


def test_a_convolution_is_tried_once_in_a_process(unlike: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = outcore.capture(network(), (IMAGES,))
    tried: list[str] = []
    monkeypatch.setattr(
        cudnn_search, "_repeats", lambda graph, name, device: bool(tried.append(name)) or name != "3.0#0"
    )
    for _ in range(2):
        assert differing(graph, graph.calls, torch.device("cpu")) == {"3.0#0"}
    assert len(tried) == len(set(tried)) == 8  # and no activation
    assert known_to_differ(graph, torch.device("cpu")) == {"3.0#0"}


def test_policies_by_hand_are_done_and_what_differs_is_said(unlike: set[str]) -> None:
    unlike.add("2.0#0")
    with pytest.warns(UserWarning, match=r"2\.0#0 of the convolutions to be made again have another algorithm"):
        outcore.within(network(), (IMAGES,), memory=None, plan={"2.0#0:out": "recompute"}, quiet=True)


def test_on_a_cpu_every_convolution_repeats_itself() -> None:
    model = network()
    graph = outcore.capture(model, (IMAGES,))
    state = torch.get_rng_state()
    assert differing(graph, graph.calls, torch.device("cpu")) == set()
    assert torch.equal(torch.get_rng_state(), state)


def test_work_is_done_in_backward() -> None:
    seen: list[tuple[bool, threading.Thread]] = []

    def work() -> list[torch.Tensor]:
        seen.append((torch.is_grad_enabled(), threading.current_thread()))
        return [torch.ones(2)]

    with torch.no_grad():
        found = in_backward(work, torch.device("cpu"))
    assert torch.equal(found[0], torch.ones(2)) and seen[0][0] is False
