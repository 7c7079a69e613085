"""Streaming on a GPU: gradients against plain, the fused kernel included, bytes against the allocator's."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.data import ArraySource, Batch
from outcore.program.plan.document import Plan
from outcore.program.policies import OFFLOAD, RECOMPUTE, Policy, policies_to_json
from outcore.stream import stream
from outcore.stream.execute.untiled_tail import UntiledTail
from outcore.stream.plan.prepared import bound, divided
from outcore.stream.plan.step_document import StreamedStep
from outcore.stream.plan.tile_memory import predict_bytes

from .oracle import any_excess, with_statistics

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def residual() -> nn.Module:
    class Block(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
            self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            out = self.relu(self.norm1(self.conv1(x)))
            out = self.norm2(self.conv2(out))
            out += x
            return self.relu(out)

    stem = [nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    net = nn.Sequential(*stem, Block(32), Block(32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3))
    return with_statistics(net).eval()


@pytest.mark.parametrize("most", [1.06, math.inf])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_gradients_are_those_of_plain(dtype: torch.dtype, tolerance: float, most: float) -> None:
    net = residual().cuda().to(dtype).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(net)
    x = torch.randn(1, 3, 257, 301, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    plain(x).square().sum().backward()
    with any_excess(most):
        stream(net, tile=64)(x).square().sum().backward()
    largest = max(p.grad.abs().max() for p in plain.parameters())
    for (name, mine), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() <= tolerance * largest, name


def test_half_precision_is_as_close_as_plain_is() -> None:
    net = residual().cuda().to(memory_format=torch.channels_last)
    exact, plain = copy.deepcopy(net).double(), copy.deepcopy(net)
    x = torch.randn(1, 3, 257, 301, device="cuda")
    exact(x.double()).square().sum().backward()
    with torch.autocast("cuda", torch.bfloat16):
        loss, ours = plain(x).float().square().sum(), stream(net, tile=64)(x).float().square().sum()
    loss.backward()
    ours.backward()
    largest = max(p.grad.abs().max() for p in exact.parameters())
    for mine, other, right in zip(net.parameters(), plain.parameters(), exact.parameters(), strict=True):
        error = (mine.grad.double() - right.grad).abs().max() / largest
        assert error <= 3 * (other.grad.double() - right.grad).abs().max() / largest + 1e-2


def test_the_allocator_stays_near_the_prediction() -> None:
    net = residual().cuda()
    x = torch.randn(1, 3, 2048, 2048, device="cuda")
    streamed = stream(net, tile=512)
    predicted = predict_bytes(streamed.prepare(torch.empty(x.shape, device="meta")))
    streamed(x).sum().backward()
    net.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    streamed(x).sum().backward()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    assert measured <= 1.3 * (predicted.peak - predicted.parameters)


def assert_same_gradients(net: nn.Module, plain: nn.Module, tolerance: float = 1e-10) -> None:
    largest = max(p.grad.abs().max() for p in plain.parameters())
    for (name, mine), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() <= tolerance * largest, name


def test_within_streams_a_lazy_image_and_keeps_the_budget() -> None:
    net = residual().cuda()
    plain = copy.deepcopy(net)
    image = Batch((ArraySource(torch.randint(0, 256, (3, 1500, 1300), dtype=torch.uint8)),))
    whole = image.prepare(image.read([(0, n) for n in image.shape]).cuda())
    torch.cuda.reset_peak_memory_stats()
    plain(whole).square().sum().backward()
    budget = torch.cuda.max_memory_allocated() // 3
    del whole
    outcore.within(net, (image,), memory=budget, optimizer=0.0, measure_s=3, quiet=True)
    step = outcore.memory_plan(net)
    assert isinstance(step, StreamedStep)
    net(image).square().sum().backward()
    assert_same_gradients(net, plain, 2e-4)
    del plain
    net.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    state = sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))
    libraries = torch.cuda.memory_allocated() - state  # held since plain ran, so not seen by measuring
    torch.cuda.reset_peak_memory_stats()
    net(image).square().sum().backward()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - libraries
    print(f"budget {budget:,} predicted {step.peak_bytes:,} measured {measured:,} libraries {libraries:,}")
    assert measured <= budget


def test_maps_between_passes_may_lie_on_the_host() -> None:
    net = residual().cuda().double().train()
    plain = copy.deepcopy(net)
    x = torch.randn(1, 3, 129, 161, device="cuda", dtype=torch.float64)
    plain(x).square().sum().backward()
    streamed = stream(net, tile=48, statistics=True, keep=("0#0:out", "4.conv1#0:out"), maps_on_host=True)
    streamed(x).square().sum().backward()
    assert_same_gradients(net, plain)


@pytest.mark.parametrize("policy", [RECOMPUTE, OFFLOAD], ids=["recompute", "offload"])
def test_what_follows_the_boundary_may_run_under_policies(policy: Policy) -> None:
    net = residual().cuda().double()
    plain = copy.deepcopy(net)
    x = torch.randn(1, 3, 257, 301, device="cuda", dtype=torch.float64)
    plain(x).square().sum().backward()
    graph = outcore.capture(net, (x,))
    rest = UntiledTail(divided(bound(graph, folded=True), tile=64, boundary=("3",)))
    rest.plan(None, None)
    assert rest.managed_forward is not None
    keeping = rest.managed_forward.plan.keeping
    chosen = {b.name: policy for b in keeping.buffers.values() if b.savers and policy in keeping.choices(b)}
    assert chosen
    plan = Plan(graph.fingerprint, (("",),), stream={"tile": 64, "boundary": "3", "rest": policies_to_json(chosen)})
    outcore.within(net, (x,), memory=None, plan=plan, costs=by_bytes(account(graph), 1e12), quiet=True)
    for _ in range(2):
        net.zero_grad(set_to_none=True)
        net(x).square().sum().backward()
        assert_same_gradients(net, plain)
    outcore.release(net)
