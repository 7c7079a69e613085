"""Costs by shapes alone: every call described, every number with its origin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.describe import describe
from outcore.cost.predicted.estimate import estimate_optimizer
from outcore.cost.predicted.memory_traffic import MemoryTraffic
from outcore.cost.predicted.step_memory import memory_curve
from outcore.machine import parse
from outcore.models import ResNet110V2, UNet


def fp32(_: str) -> str:
    return "fp32"


NETWORKS = {
    "unet": (lambda: UNet(width=4, depth=2), (2, 3, 33, 35)),
    "unet3d": (lambda: UNet(width=4, depth=2, dims=3), (1, 3, 16, 16, 16)),
    "resnet": (lambda: ResNet110V2(depth=11), (2, 3, 16, 16)),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2),
        (2, 9, 16),
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", NETWORKS)
def test_described_matrix_work_equals_torchs_count(name: str) -> None:
    build, shape = NETWORKS[name]
    graph = outcore.capture(build(), [shape])
    costs = account(graph)
    steps = [s for s in graph.recording.steps if s.kind != "guard"]
    described = 0
    for step in steps:
        operation = describe(graph, step, fp32)
        described += operation.flops if operation is not None else 0
    assert described == costs.total().flops_forward


def test_every_call_has_a_time_and_says_how_far_to_trust_it() -> None:
    graph = outcore.capture(UNet(width=8, depth=2), [(1, 3, 64, 64)])
    costs = outcore.estimate(graph, parse("h200"))
    assert all(c.time_source == "analytic" and c.forward is not None for c in costs.calls.values())
    scaled = outcore.estimate(graph, parse("v100"))
    assert any("scaled" in c.reason for c in scaled.calls.values())


def test_larger_images_take_longer_and_nothing_is_run() -> None:
    with torch.device("meta"):
        net = UNet()
    small, large = (outcore.capture(net, [(1, 3, n, n)]) for n in (1_024, 100_000))
    times = [outcore.estimate(g, parse("h200")).total().time_s for g in (small, large)]
    assert times[1] > 1_000 * times[0]


def test_dropout_that_drops_nothing_takes_no_time() -> None:
    graph = outcore.capture(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.0), nn.Dropout(0.5)), [(4096, 64)])
    costs = outcore.estimate(graph, parse("h200"))
    assert costs["1#0"].time_s == 0.0 < costs["2#0"].time_s


def test_a_part_of_a_tensor_is_free_and_its_gradient_is_not() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)[:, :8]

    graph = outcore.capture(Part(), [(65536, 64)])
    (call,) = [c for c in outcore.estimate(graph, parse("h200")).calls.values() if c.type == "getitem"]
    assert call.forward is not None and call.forward.median_s == 0.0
    whole, part = 65536 * 64 * 4, 65536 * 8 * 4
    bandwidth = parse("h200").devices[0].bandwidth_bytes_per_s
    assert call.backward is not None and call.backward.median_s > (whole + 2 * part) / bandwidth


def test_an_optimizer_takes_what_its_traffic_takes() -> None:
    device = parse("h200").devices[0]
    graph = outcore.capture(nn.Linear(8192, 8192), [(1, 8192)])
    costs = outcore.estimate(graph, device)
    timing = estimate_optimizer(costs, device, torch.optim.Adam)
    # Adam over lists of tensors makes 19 passes (lerp 3, mul 2, addcmul 4, sqrt, div and add 2 each, addcdiv 4).
    passes = timing.median_s * device.bandwidth_bytes_per_s / sum(costs.parameters.values())
    assert 19 < passes < 19 / 0.6


def test_what_autograd_keeps_does_not_depend_on_where_it_is_estimated() -> None:
    graph = outcore.capture(ResNet110V2(depth=11), [(2, 3, 32, 32)])
    estimated = outcore.estimate(graph, parse("h200"))
    assert memory_curve(graph, estimated).peak_bytes > 0
    assert estimated.total().saved_bytes == account(graph, "cuda").total().saved_bytes


def test_inputs_that_cannot_be_folded_are_copied_before_a_product() -> None:
    class Heads(nn.Module):
        def __init__(self, turned: bool) -> None:
            super().__init__()
            self.project, self.turned = nn.Linear(64, 64), turned

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.project(x).unflatten(-1, (4, 16))
            y = y.transpose(1, 2) if self.turned else y
            return y @ y.transpose(-1, -2)

    def copied(turned: bool) -> int:
        graph = outcore.capture(Heads(turned), [(512, 64, 64)])
        moves = MemoryTraffic(graph, account(graph, "cuda"), {s.name: s for s in graph.recording.steps})
        (name,) = [n for n, c in graph.calls.items() if graph.blocks[c.block].type == "matmul"]
        return moves.bytes_of(name)[0]

    both = 2 * 2 * 512 * 64 * 64 * 4
    assert copied(turned=True) == both
    assert copied(turned=False) == 0


def moved(net: nn.Module, shape: tuple[int, ...], kind: str) -> tuple[int, int]:
    """Bytes that the first call of a kind moves beside its work, forward and backward."""
    graph = outcore.capture(net, (torch.randn(shape, requires_grad=True),))
    moves = MemoryTraffic(graph, account(graph, "cuda"), {s.name: s for s in graph.recording.steps})
    return moves.bytes_of(next(n for n, c in graph.calls.items() if graph.blocks[c.block].type == kind))


def test_a_gradient_that_arrives_turned_is_copied_by_what_cannot_use_it_so() -> None:
    class Turned(nn.Module):
        def __init__(self, turned: bool) -> None:
            super().__init__()
            self.norm, self.turned = nn.LayerNorm(16), turned

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x.view(8, 4, 16))
            y = y.transpose(0, 1).contiguous() if self.turned else y
            return torch.square(y)

    assert moved(Turned(True), (32, 16), "LayerNorm") == (0, 2 * 32 * 16 * 4)
    assert moved(Turned(False), (32, 16), "LayerNorm") == (0, 0)


def test_a_roll_is_a_slow_copy_for_every_dimension() -> None:
    class Rolled(nn.Module):
        def __init__(self, *dims: int) -> None:
            super().__init__()
            self.dims = dims

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.roll(x, [1] * len(self.dims), list(self.dims)).square()

    once, twice = (moved(Rolled(*dims), (8, 8, 4), "roll")[0] for dims in ((0,), (0, 1)))
    assert twice == 3 * once == 6 * 8 * 8 * 4 * 4


def test_a_bias_is_added_by_itself_where_the_rows_cannot_be_folded() -> None:
    class Turned(nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 24, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.transpose(0, 1))

    with_bias, without = (moved(Turned(bias), (8, 4, 16), "Linear")[0] for bias in (True, False))
    assert with_bias - without == 2 * 8 * 4 * 24 * 4
