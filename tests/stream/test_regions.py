"""What a region needs, against brute force: the inputs on which its gradient is not zero."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import outcore
from outcore.ops.region import (
    AdaptiveWindow,
    InterpolationWindow,
    Region,
    SlidingWindow,
    TransposedWindow,
    clip,
    cover,
    elements,
    inside,
)
from outcore.stream.call import RuleContext
from outcore.stream.execute.execution import GlobalNodes
from outcore.stream.execute.tile_run import run_tile
from outcore.stream.network import RegionNetwork
from outcore.stream.plan.passes import divide
from outcore.stream.plan.tiles import trace
from outcore.stream.rules.border import sliced

from .oracle import any_excess


@pytest.fixture(autouse=True, scope="module", params=[1.0, math.inf], ids=["no excess", "any excess"])
def most(request) -> Iterator[None]:
    with any_excess(request.param):
        yield


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *x):
        return self.function(*x)


def regions(shape: tuple[int, ...], first: int = 2) -> list[Region]:
    """All corners, the middle and single pixels of the dimensions from `first` on."""
    along = [[(0, n)] for n in shape[:first]]
    along += [
        list(dict.fromkeys([(0, 1), (n // 2, n // 2 + 1), (n - 1, n), (0, n), (n // 3, max(n // 3 + 1, 2 * n // 3))]))
        for n in shape[first:]
    ]
    return list(itertools.product(*along))


def check(module: nn.Module, *shapes: tuple[int, ...], exact: bool = True, first: int = 2) -> None:
    """Each region equals the same region of the whole, and depends on no less and (if exact) no more than it says."""
    module = module.double() if isinstance(module, Function) else nn.Sequential(module).double()
    stand_ins = [torch.empty(s, dtype=torch.float64, device="meta") for s in shapes]
    network = RegionNetwork(outcore.capture(module, stand_ins))
    (stage,) = divide(network).stages
    (output,) = network.graph.outputs
    state = {r: network.state(r) for n in stage.nodes for r in n.operands if r.kind != "value"}
    inputs = [torch.rand(s, dtype=torch.float64).requires_grad_() for s in shapes]
    small = GlobalNodes.run(network, stage.globals, {}, ()).outputs
    whole = module(*(x * 1 for x in inputs))
    for out in regions(tuple(whole.shape), first):
        plan = trace(stage.nodes, {output: out}, {output: out})
        crops = {}
        for name, tensor in (*zip(network.graph.inputs, inputs, strict=True), *small.items()):
            region = plan.regions[name]
            assert all(0 <= lo < hi <= n for (lo, hi), n in zip(region, tensor.shape, strict=True)), (out, region)
            crops[name] = sliced(tensor, tuple((0, n) for n in tensor.shape), region)
        got = sliced(run_tile(network, stage, plan, crops, state, RuleContext())[output], plan.regions[output], out)
        expected = sliced(whole, tuple((0, n) for n in whole.shape), out)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        for name, x in zip(network.graph.inputs, inputs, strict=True) if exact else ():
            (touched,) = torch.autograd.grad((expected * torch.rand_like(expected)).sum(), x, retain_graph=True)
            if (at := touched.nonzero()).numel():
                box = tuple((int(a), int(b) + 1) for a, b in zip(at.amin(0), at.amax(0), strict=True))
                assert box == plan.regions[name], out


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "strided": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
    "dilated": lambda: nn.Conv2d(3, 4, 3, dilation=3, padding=2),
    "uneven": lambda: nn.Conv2d(3, 6, (2, 5), stride=(3, 1), padding=(0, 3), dilation=(2, 1), groups=3),
    "same": lambda: nn.Conv2d(3, 4, 4, padding="same"),
    "reflect": lambda: nn.Conv2d(3, 4, 5, padding=2, padding_mode="reflect"),
    "replicate": lambda: nn.Conv2d(3, 4, 5, padding=3, padding_mode="replicate"),
    "wide padding": lambda: nn.Conv2d(3, 4, 2, padding=4),
    "function": lambda: Function(lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3, dtype=x.dtype), stride=2)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_a_convolution_needs_exactly_the_pixels_under_its_windows(name: str) -> None:
    # Where a stride skips pixels between windows, or a dilation inside one, the interval holds more than is touched.
    check(CONVOLUTIONS[name](), (2, 3, 11, 14), exact=name not in ("strided", "dilated", "uneven", "wide padding"))


def test_circular_padding_needs_the_whole_width_at_the_border_only() -> None:
    check(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (1, 3, 9, 8), exact=False)
    network = RegionNetwork(
        outcore.capture(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")), [(1, 3, 9, 8)])
    )
    (node,) = network.nodes.values()
    assert node.rule is not None
    assert node.rule.needs(((0, 1), (0, 4), (0, 2), (3, 4)))[0][2:] == ((0, 9), (2, 5))


@pytest.mark.parametrize("dims", [1, 3])
def test_convolutions_of_one_and_three_dimensions(dims: int) -> None:
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    up = {1: nn.ConvTranspose1d, 3: nn.ConvTranspose3d}[dims]
    size = (9, 6, 7)[:dims]
    check(conv(2, 3, 3, padding=1), (1, 2, *size))
    check(up(2, 3, 3, stride=2, padding=1, output_padding=1), (1, 2, *size), exact=False)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2, "stride": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
        {"kernel_size": 4, "stride": 2, "padding": 1},
        {"kernel_size": 1, "stride": 3},
        {"kernel_size": 3, "stride": 1, "dilation": 2},
        {"kernel_size": 2, "stride": 3, "dilation": 3, "groups": 2, "output_padding": 2},
    ],
)
def test_transposed_convolution(options: dict[str, int]) -> None:
    check(nn.ConvTranspose2d(4, 6, **options), (1, 4, 6, 7), exact=False)


POOLS = {
    "max": lambda: nn.MaxPool2d(3, 2, 1),
    "max with ceil": lambda: nn.MaxPool2d(2, 3, ceil_mode=True),
    "max dilated": lambda: nn.MaxPool2d(2, 1, dilation=2),
    "average": lambda: nn.AvgPool2d(3, 1, 1),
    "average without padding": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "average with ceil": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "average with ceil without padding": lambda: nn.AvgPool2d((3, 2), 3, 1, ceil_mode=True, count_include_pad=False),
    "average by a number": lambda: nn.AvgPool2d(2, divisor_override=3),
    "adaptive": lambda: nn.AdaptiveAvgPool2d((4, 5)),
    "function": lambda: Function(lambda x: F.max_pool2d(x, 2)),
    "average function": lambda: Function(lambda x: F.avg_pool2d(x, 3, stride=1, padding=1)),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str) -> None:
    check(POOLS[name](), (2, 3, 11, 13), exact=name in ("average", "adaptive", "average by a number"))


MODES = [(m, None) for m in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")]
MODES += [("bilinear", True), ("bicubic", True)]


@pytest.mark.parametrize(("mode", "align"), MODES)
@pytest.mark.parametrize("size", [(22, 26), (17, 9), (5, 31)])
def test_interpolation_to_any_size(mode: str, size: tuple[int, int], align: bool | None) -> None:
    check(Function(lambda x: F.interpolate(x, size, mode=mode, align_corners=align)), (1, 2, 11, 13), exact=False)


@pytest.mark.parametrize("factor", [2, 3, 1.5, 0.7])
def test_interpolation_by_a_factor(factor: float) -> None:
    check(nn.Upsample(scale_factor=factor, mode="bilinear"), (1, 2, 9, 8), exact=False)
    check(nn.Upsample(scale_factor=factor), (1, 2, 9, 8), exact=False)


OTHERS = {
    "pixel shuffle": (nn.PixelShuffle(2), 8),
    "pixel unshuffle": (nn.PixelUnshuffle(3), 2),
    "zero padding": (nn.ZeroPad2d((1, 2, 0, 3)), 2),
    "reflection": (nn.ReflectionPad2d((1, 2, 3, 0)), 2),
    "cropping by padding": (Function(lambda x: F.pad(x, (-1, 2, -2, -1))), 2),
    "slices": (Function(lambda x: x[:, 1:, 2:-3, 1::2]), 3),
    "permutation": (Function(lambda x: x.permute(0, 2, 3, 1)), 3),
    "transposition": (Function(lambda x: x.transpose(1, 3)), 3),
    "chunk": (Function(lambda x: x.chunk(2, 1)[1]), 5),
    "split": (Function(lambda x: x.split([1, 3, 2], 1)[1]), 6),
    "channel shuffle": (Function(lambda x: x.view(2, 2, 3, 12, 15)), 6),
    "merging": (Function(lambda x: x.reshape(2, 2, 12, 15)), 2),
    "windows": (Function(lambda x: x.view(2, 3, 4, 3, 3, 5)), 3),
    "softmax": (nn.Softmax(1), 3),
    "layer norm": (nn.LayerNorm(15), 3),
    "linear": (nn.Linear(15, 4), 3),
    "mean over channels": (Function(lambda x: x.mean(1, keepdim=True)), 3),
    "relu": (nn.ReLU(inplace=True), 3),
    "unsqueeze": (Function(lambda x: x.unsqueeze(2)), 3),
    "weights per channel": (nn.PReLU(3), 3),
    "cast to the type of another": (
        Function(lambda x: x.float().to(x) + x.mean(1, keepdim=True).float().type_as(x)),
        3,
    ),
    "one weight without a dimension": (Function(lambda x: F.prelu(x, torch.tensor(0.2).to(x))), 3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations(name: str) -> None:
    module, channels = OTHERS[name]
    network = RegionNetwork(outcore.capture(nn.Sequential(module), [(2, channels, 12, 15)]))
    if name in ("layer norm", "linear"):
        assert [n.kind for n in network.nodes.values()] == ["opaque"]  # it runs along the width
        return
    check(module, (2, channels, 12, 15), exact=False, first=1 if name == "permutation" else 2)


def test_broadcasting_reads_the_same_place_of_each() -> None:
    check(Function(lambda x, y: x * y + 1), (2, 3, 8, 9), (3, 1, 9), first=0, exact=False)
    check(Function(lambda x, y: torch.cat([x, y], 1)), (2, 3, 8, 9), (2, 2, 8, 9))


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.data())
def test_windows_against_enumeration(size, kernel, stride, dilation, low, data) -> None:
    window = SlidingWindow(size, kernel, stride, dilation, low)
    count = (size + 2 * low - dilation * (kernel - 1) - 1) // stride + 1
    if count < 1:
        return
    lo = data.draw(st.integers(0, count - 1))
    hi = data.draw(st.integers(lo + 1, count))
    touched = [i * stride - low + j * dilation for i in range(lo, hi) for j in range(kernel)]
    assert window.reach((lo, hi)) == (min(touched), max(touched) + 1)
    there = [t for t in touched if 0 <= t < size]
    if there:
        assert inside(window.reach((lo, hi)), size, "zeros") == (
            max(0, min(touched)),
            min(size, max(touched) + 1),
        )


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.data())
def test_spreads_against_enumeration(size, kernel, stride, dilation, data) -> None:
    low = data.draw(st.integers(0, dilation * (kernel - 1)))
    spread = TransposedWindow(size, kernel, stride, dilation, low)
    count = (size - 1) * stride - 2 * low + dilation * (kernel - 1) + 1
    if count < 1:
        return
    lo = data.draw(st.integers(0, count - 1))
    hi = data.draw(st.integers(lo + 1, count))
    adds = [i for i in range(size) if any(lo <= i * stride - low + j * dilation < hi for j in range(kernel))]
    a, b = spread.needs((lo, hi))
    assert not adds or (a <= min(adds) and b >= max(adds) + 1)
    assert spread.start((a, b)) <= lo


@given(st.integers(1, 50), st.integers(1, 50), st.data())
def test_bins_against_torch(size, bins, data) -> None:
    index = data.draw(st.integers(0, bins - 1))
    x = torch.rand(1, 1, size, dtype=torch.float64, requires_grad=True)
    F.adaptive_avg_pool1d(x, bins)[0, 0, index].backward()
    at = x.grad.flatten().nonzero()
    assert AdaptiveWindow(size, bins).needs((index, index + 1)) == (int(at.min()), int(at.max()) + 1)


@given(st.integers(2, 30), st.integers(2, 60), st.sampled_from(["linear", "nearest-exact"]), st.booleans(), st.data())
def test_taps_against_torch(size, new_size, mode, align, data) -> None:
    align = align and mode == "linear"
    resample = InterpolationWindow(size, new_size, mode, align, None)
    index = data.draw(st.integers(0, new_size - 1))
    x = torch.rand(1, 1, size, dtype=torch.float64)
    expected = F.interpolate(x, new_size, mode=mode, align_corners=align if mode == "linear" else None)
    got = sum(w * x[0, 0, i] for i, w in resample.taps(index))
    torch.testing.assert_close(got, expected[0, 0, index], rtol=1e-9, atol=1e-9)


@settings(max_examples=20)
@given(st.tuples(st.integers(-5, 20), st.integers(1, 9)), st.integers(1, 12))
def test_what_is_clipped_lies_inside_and_is_something(interval, size) -> None:
    lo, hi = clip((interval[0], interval[0] + interval[1]), size)
    assert 0 <= lo < hi <= size
    region = cover(((lo, hi),), ((0, 1),))
    assert elements(region) == hi
