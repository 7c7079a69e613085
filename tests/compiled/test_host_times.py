"""What a compiled step takes on the host, counted by hand."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch

from outcore.compiled.joint_graph import JointGraph
from outcore.compiled.lifetimes import step_of
from outcore.compiled.times.host_times import (
    BUFFER,
    ENTER,
    LAUNCH,
    PARAMETER,
    WAY,
    host_and_device_s,
    library_work,
    simple_operation_s,
)
from tests.compiled.oracle import LINK
from tests.compiled.test_search import LAYERS, joint, named


def hosted(unit_s: float) -> JointGraph:
    """A chain of linear layers on a device, and a host that takes so long for a simple operation."""
    graph = copy.copy(joint())
    graph.rates = replace(graph.rates, host_s=unit_s)
    return graph


def test_launches_calls_and_buffers_are_counted() -> None:
    graph = hosted(1.0)
    step = step_of(graph, named(graph, "tanh"))
    product = library_work(torch.ops.aten.mm.default)
    # Each layer has a product and an activation in the forward; in the backward the gradient of the activation and of
    # the weight, and all but the first that of the input.
    kernels, products = 2 * LAYERS, LAYERS + 2 * LAYERS - 1
    work = ENTER + PARAMETER * LAYERS + kernels * (LAUNCH + BUFFER) + products * product
    assert step.host_s == pytest.approx(work)
    assert step.seconds == pytest.approx(work)  # against which such small kernels are nothing
    again = step_of(graph, [])
    assert again.host_s >= step.host_s + (LAYERS - 1) * product


def test_a_device_that_takes_longer_hides_the_host() -> None:
    alone = step_of(hosted(0.0), named(joint(), "tanh"))
    beside = step_of(hosted(1e-3 * alone.seconds / 100), named(joint(), "tanh"))
    assert alone.host_s == 0 and alone.seconds == alone.device_s
    assert beside.device_s == alone.device_s and beside.seconds == pytest.approx(alone.seconds, rel=1e-3)


def test_a_slow_host_gives_copies_more_time() -> None:
    saved = named(joint(), "tanh")
    times = []
    for unit_s in (0.0, 1e-3):
        graph = hosted(unit_s)
        graph.rates = replace(graph.rates, link=LINK)
        kept, sent = step_of(graph, saved), step_of(graph, saved, offloaded=frozenset(saved[:4]))
        assert len(sent.ways) == 4
        assert sent.host_s == pytest.approx(kept.host_s + 4 * WAY * unit_s)
        times.append(sent.seconds - host_and_device_s(sent.host_s, sent.device_s))
    assert times[0] > 0 and times[1] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_a_step_takes_the_longer_of_both_or_a_little_more(seed: int) -> None:
    draw = random.Random(seed)
    host, device = draw.random(), draw.random()
    both = host_and_device_s(host, device)
    assert max(host, device) <= both <= 1.1 * max(host, device)
    assert both == host_and_device_s(device, host) < host_and_device_s(1.01 * host, device)
    assert host_and_device_s(0.0, device) == device


@pytest.mark.gpu
def test_a_simple_operation_takes_microseconds_to_issue() -> None:
    taken = simple_operation_s(torch.device("cuda", torch.cuda.current_device()))
    assert 1e-7 < taken < 1e-3
