"""The memory engine on a GPU: the same numbers, the budget kept."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import outcore
from outcore.kernels.pool_window import PoolWindow
from outcore.memory.encode.bitmask import pack_bits, unpack_bits
from outcore.memory.encode.codecs import encode
from outcore.memory.offload.backends import HostBackend
from outcore.memory.op_fusion.batch_norm_relu import _Fused

from .oracle import policies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def network() -> nn.Module:
    torch.manual_seed(0)

    def block(i: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(i, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))

    layers = [block(3), block(32), nn.MaxPool2d(3, 2, 1), block(32), nn.Dropout(0.2), *(block(32) for _ in range(16))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4)).cuda()


def gradients(model: nn.Module, images: torch.Tensor, *, bf16: bool) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        loss = model(images).square().sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("share", [0.9, 0.7, 0.55])
def test_gradients_are_those_of_plain_training_and_the_budget_holds(share: float, bf16: bool) -> None:
    images = torch.randn(8, 3, 256, 256, device="cuda")
    model = network()
    if bf16:
        model, images = (t.to(memory_format=torch.channels_last) for t in (model, images))
    twin = copy.deepcopy(model)
    want = gradients(twin, images, bf16=bf16)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        outcore.within(model, (images,), memory=None, optimizer=0.0, quiet=True)
        plan = outcore.memory_plan(model)
        budget = int(share * plan.plain_bytes)
        outcore.within(model, (images,), memory=budget, optimizer=0.0, costs=plan.keeping.costs, quiet=True)
    gradients(model, images, bf16=bf16)
    for buffer, other in zip(model.buffers(), network().to("cuda").buffers(), strict=True):
        buffer.copy_(other)
    del twin
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = gradients(model, images, bf16=bf16)
    peak = torch.cuda.max_memory_allocated()
    plan = outcore.memory_plan(model)
    sizes = {"peak": peak, "predicted": plan.peak_bytes, "budget": budget, "before": before}
    print(f"share {share}:", *(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items()))
    print(plan.policy)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    extra = sum(t.nbytes for t in want)  # the gradients held by this test
    assert peak - extra <= budget


@pytest.mark.parametrize("bf16", [False, True])
def test_peaks_of_mixtures_are_predicted(bf16: bool) -> None:
    images, model = torch.randn(8, 3, 256, 256, device="cuda"), network()
    if bf16:
        model, images = (t.to(memory_format=torch.channels_last) for t in (model, images))
    missed = []
    for seed in range(8):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            if not seed:
                outcore.within(model, (images,), memory=None, optimizer=0.0, quiet=True)
                keeping = outcore.memory_plan(model).keeping
            by_hand, costs = policies(keeping, "mixture", seed), keeping.costs
            outcore.within(model, (images,), memory=None, plan=by_hand, optimizer=0.0, costs=costs, quiet=True)
        gradients(model, images, bf16=bf16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gradients(model, images, bf16=bf16)
        missed.append(torch.cuda.max_memory_allocated() / outcore.memory_plan(model).peak_bytes - 1)
    print("measured over predicted peaks:", *(f"{share:+.1%}" for share in missed))
    assert max(map(abs, missed)) < 0.05


def two_norms(last: bool) -> tuple[nn.Module, torch.Tensor]:
    """In double precision: a network of two norms with ReLU, and images for it."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 20, 3), nn.BatchNorm2d(20), nn.ReLU(inplace=True), nn.Conv2d(20, 70, 3)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(70), nn.ReLU(inplace=True), nn.Conv2d(70, 4, 3)).cuda().double()
    for p in model.parameters():
        nn.init.normal_(p, 0.1, 0.3)
    images = torch.randn(3, 3, 101, 67, device="cuda", dtype=torch.float64)
    if last:
        model, images = (t.to(memory_format=torch.channels_last) for t in (model, images))
    return model, images


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_and_relu_as_one_operation(dtype: torch.dtype, last: bool) -> None:
    model, images = two_norms(last)
    model, images = model.to(dtype), images.to(dtype)
    want = gradients(copy.deepcopy(model).double(), images.double(), bf16=False)
    plain = gradients(copy.deepcopy(model), images, bf16=False)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.05}[dtype]
    for plan in (None, {"1#0:out": "recompute", "4#0:out": "recompute"}):
        mine = outcore.within(copy.deepcopy(model), (images,), memory=None, plan=plan, exact="reassociated", quiet=True)
        for got, torchs, exact in zip(gradients(mine, images, bf16=False), plain, want, strict=True):
            largest = max(exact.abs().max(), want[0].abs().max())
            # The second norm makes sums of gradients zero, of which half precision leaves what it rounds: torch's too.
            allowed = tolerance * largest + 2 * (torchs.double() - exact).abs().max()
            assert (got.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 20, 99, 65), (2, 70, 9, 11)])
def test_a_fused_norm_rounds_only_what_it_writes(
    shape: tuple[int, ...], dtype: torch.dtype, relu: bool, last: bool
) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(shape[1]).cuda()
    for p in norm.parameters():
        nn.init.normal_(p, 0.1, 0.3)
    norm = norm.to(dtype)
    x, gradient = (torch.randn(shape, device="cuda").add(0.3).to(dtype) for _ in range(2))
    if last:
        x, gradient = (t.to(memory_format=torch.channels_last) for t in (x, gradient))
    results = []
    for module, wide in ((norm, False), (copy.deepcopy(norm).double(), True)):
        given = (x.double() if wide else x.clone()).requires_grad_()
        y = (module(given).relu() if relu else module(given)) if wide else _Fused(module, relu)(given)
        y.backward(gradient.to(y.dtype))
        made = (y.detach(), given.grad, module.weight.grad, module.bias.grad, module.running_mean, module.running_var)
        results.append([t.double() for t in made])
    half_a_bit = torch.finfo(dtype).eps / 2
    for got, exact in zip(*results, strict=True):
        assert ((got - exact).abs() <= 1.01 * half_a_bit * exact.abs() + 3e-6 * exact.abs().max()).all()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_made_again_in_the_order_of_its_library(dtype: torch.dtype, last: bool) -> None:
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(32), nn.Conv2d(32, 4, 3)).cuda()
    for p in model.parameters():
        nn.init.normal_(p, 0.1, 0.3)
    images = torch.randn(3, 3, 101, 67, device="cuda")
    if last:
        model, images = (t.to(memory_format=torch.channels_last) for t in (model, images))
    bf16 = dtype is torch.bfloat16
    want = gradients(copy.deepcopy(model), images, bf16=bf16)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        plan = {"1#0:out": "recompute", "4#0:out": "recompute"}
        outcore.within(model, (images,), memory=None, plan=plan, quiet=True)
    got = gradients(model, images, bf16=bf16)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    (entry,) = model.__dict__["forward"].admitted.values()
    print(f"orders of rounding, {dtype}, channels last {last}: {entry.table.renorm.orders}")


@pytest.mark.parametrize("mode", ["recompute", "offload", "encode", "mixture"])
def test_graphs_give_the_same_gradients(mode: str) -> None:
    images = torch.randn(8, 3, 64, 64, device="cuda")
    model = nn.Sequential(*(m for m in network() if not isinstance(m, nn.Dropout)))
    twin = copy.deepcopy(model)
    outcore.within(model, (images,), memory=None, optimizer=0.0, quiet=True, measure_s=1.0)
    keeping = outcore.memory_plan(model).keeping
    by_hand, costs = policies(keeping, mode), keeping.costs
    outcore.within(model, (images,), memory=None, plan=by_hand, optimizer=0.0, costs=costs, graphs=True, quiet=True)
    for _ in range(3):
        batch = torch.randn_like(images)
        want, got = gradients(twin, batch, bf16=False), gradients(model, batch, bf16=False)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    entries = [e for e in model.__dict__["forward"].admitted.values() if e.graphed and e.graphed.graphs is not None]
    assert entries and all(e.compiled.births or e.compiled.instead for e in entries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_bits(dtype: torch.dtype) -> None:
    flat = (torch.randn(100_003, device="cuda") > 0.3).to(dtype)
    back = unpack_bits(pack_bits(flat), flat.numel(), torch.ones((), dtype=dtype, device="cuda"))
    assert back.dtype is dtype and torch.equal(back, flat)


@pytest.mark.parametrize("last", [False, True])
def test_positions_in_a_window(last: bool) -> None:
    images = torch.randn(2, 5, 37, 41, device="cuda")
    if last:
        images = images.to(memory_format=torch.channels_last)
    _, indices = nn.functional.max_pool2d(images, 3, 2, 1, return_indices=True)
    window = PoolWindow((3, 3), (2, 2), (1, 1), (1, 1), (37, 41))
    coded = encode("window", indices, indices=indices, window=window)
    back = coded.decoded()
    assert coded.payload[0].dtype is torch.uint8 and torch.equal(back, indices) and back.stride() == indices.stride()


def test_a_full_arena_has_room_for_odd_sizes() -> None:
    tier = HostBackend(torch.device("cuda", 0), 512 + 1000)
    buffers = [torch.arange(size, device="cuda").to(torch.uint8) for size in (300, 1000)]
    trips = [tier.evict(b) for b in buffers]
    assert all(torch.equal(trip.bytes_back(), b) for trip, b in zip(trips, buffers, strict=True))
    del trips
    tier.close()


def test_memory_that_was_fetched_for_nothing_is_not_written_later() -> None:
    """A backward that goes only through a part of the graph drops what was already on its way."""
    tier = HostBackend(torch.device("cuda", 0), 2**29)
    trip = tier.evict(torch.zeros(2**29, dtype=torch.uint8, device="cuda"))
    trip.wait_out()
    trip.fetch()
    del trip
    ones = torch.ones(2**29, dtype=torch.uint8, device="cuda")  # in the same place, while the copy would still run
    torch.cuda.synchronize()
    assert bool(ones.all())
    tier.close()


@pytest.mark.parametrize("mode", ["recompute", "offload", "encode"])
def test_a_recurrent_layer_whose_weights_autocast_has_laid_out_anew(mode: str) -> None:
    """cuDNN's weights are then parts of one piece of memory, and each counts its versions for itself."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(64, 256), nn.Linear(512, 8)
            self.layer = nn.LSTM(256, 256, batch_first=True, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.layer(torch.tanh(self.inner(x)))[0]).mean(1)

    torch.manual_seed(0)
    model, x = Reads().cuda(), torch.randn(32, 128, 64, device="cuda")
    want = gradients(model, x, bf16=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        outcore.within(model, (x,), memory=None, optimizer=0.0, quiet=True)
        keeping = outcore.memory_plan(model).keeping
        by_hand = policies(keeping, mode)
        outcore.within(model, (x,), memory=None, plan=by_hand, optimizer=0.0, costs=keeping.costs, quiet=True)
    got = gradients(model, x, bf16=True)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
