"""The kernels of the encodings against the same in plain torch, on a GPU or on Triton's interpreter.

`make kernels` runs them on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from outcore.kernels.pool_window import PoolWindow
from outcore.memory.encode import bitmask, pool_positions, sparse_quantize
from outcore.ops.recompute_encode import GROUP
from tests.foreign.sample import one_in

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# The interpreter casts what is no number by numpy, which warns of it.
CAST = pytest.mark.filterwarnings("ignore::RuntimeWarning")
pytestmark = [pytest.mark.kernel, CAST] if INTERPRETED else [pytest.mark.gpu, NO_GPU]
COUNTS = (1, 7, 8, 255, 256, 257, 4095, 4096, 4097, 20_003)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    yield


def numbers(kind: str, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    flat = torch.randn(count)
    if kind == "half zero":
        flat = flat.clamp_min(0)
    elif kind == "half tiny":
        flat = flat.clamp_min(0) * 1e-39
    elif kind == "half broken":
        flat = flat.clamp_min(0)
        flat[count // 2] = float("inf")
    elif kind == "zeros":
        flat.zero_()
    elif kind == "equal":
        flat.fill_(-3.25)
    elif kind == "tiny":
        flat *= 1e-39
    elif kind == "broken":
        flat[::3] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0]).repeat(count)[: flat[::3].numel()]
    elif kind == "one broken":
        flat[count // 2] = float("nan")
    return flat.to(dtype)


KINDS = ("random", "half zero", "half tiny", "half broken", "zeros", "equal", "tiny", "broken", "one broken")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; what is no number may be any such."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.cpu(), b.cpu()
    differ = a.view(whole) != b.view(whole)
    return a.dtype is b.dtype and not bool((differ & ~(a.isnan() & b.isnan())).any())


@pytest.mark.parametrize(("kind", "dtype", "width"), one_in(2, product(KINDS, DTYPES, [8, 4])))
def test_eight_or_four_bits_in_groups(kind: str, dtype: torch.dtype, width: int) -> None:
    from outcore.kernels.sparse_quantize import dequantise, quantise

    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off instead of rounding")
    for count in COUNTS:
        flat = numbers(kind, count, dtype)
        groups, per_byte, levels = -(-count // GROUP), 8 // width, 2**width - 1
        want = (torch.empty(-(-count // per_byte), dtype=torch.uint8), torch.empty(groups), torch.empty(groups))
        got = tuple(torch.empty_like(t, device=DEVICE) for t in want)
        sparse_quantize._to_levels(flat, *want, levels)
        quantise(flat.to(DEVICE), *got, levels=levels, group=GROUP, tiny=sparse_quantize.least_step(dtype))
        assert torch.equal(got[1].cpu().nan_to_num(7), want[1].nan_to_num(7)) and same(got[2], want[2]), count
        there = (want[1] + want[2]).isfinite().repeat_interleave(GROUP)[:count:per_byte]
        assert torch.equal(got[0].cpu()[there], want[0][there]), count
        whole, back = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype, device=DEVICE)
        sparse_quantize._from_levels(*want, whole, levels)
        dequantise(*got, back, levels=levels, group=GROUP)
        assert same(back, whole), count


@pytest.mark.parametrize("kind", KINDS)
def test_halves_become_whole_again(kind: str) -> None:
    from outcore.kernels.sparse_quantize import widen

    for small, whole in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float64),
    ):
        for count in COUNTS:
            if INTERPRETED and small is torch.bfloat16 and kind.endswith("tiny"):
                continue  # the interpreter has no such numbers in bfloat16
            flat = numbers(kind, count, small)
            out = torch.empty(count, dtype=whole, device=DEVICE)
            widen(flat.to(DEVICE), out)
            assert same(out, flat.to(whole)), (small, count)


@pytest.mark.parametrize(("kind", "dtype"), one_in(2, product(KINDS, [*DTYPES, torch.float64, torch.uint8])))
def test_without_zeros(kind: str, dtype: torch.dtype) -> None:
    for count in COUNTS:
        flat = numbers(kind, count, torch.float32).nan_to_num(1).mul(9).to(dtype) if dtype is torch.uint8 else None
        flat = numbers(kind, count, dtype) if flat is None else flat
        if count > 4:
            flat[3] = -0.0
        words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        (want_bits, want_values), _ = sparse_quantize.without_zeros(flat)
        survey = sparse_quantize.NonZeros.of(flat.to(DEVICE))
        payload, decode = sparse_quantize._gathered(words.to(DEVICE), dtype, survey)
        assert torch.equal(payload[0].cpu(), want_bits) and torch.equal(payload[1].cpu(), want_values), count
        back = decode(*payload)
        assert back.dtype is dtype and torch.equal(back.cpu().view(words.dtype), words), count


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.bool])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_back(kind: str, dtype: torch.dtype) -> None:
    from outcore.kernels.bitmask import pack, unpack

    if INTERPRETED and dtype is torch.bfloat16 and kind.endswith("tiny"):
        pytest.skip("the interpreter has no such numbers in bfloat16")
    for count in COUNTS:
        flat = numbers(kind, count, dtype)
        want = bitmask.pack_bits(flat)
        got = torch.empty_like(want, device=DEVICE)
        pack(flat.to(DEVICE), got)
        assert torch.equal(got.cpu(), want), count
        level = torch.full((), 1.25).to(dtype)
        back = torch.empty(count, dtype=dtype, device=DEVICE)
        unpack(got, back, level.to(DEVICE))
        assert torch.equal(back.cpu(), bitmask.unpack_bits(want, count, level)), count


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_relu_with_its_bits_is_that_of_torch_on_the_same_device(kind: str, dtype: torch.dtype) -> None:
    from outcore.kernels.bitmask import rectify, through

    if INTERPRETED and (kind == "broken" or kind == "tiny"):
        pytest.skip("torch's own gives zeros of either sign on a CPU")
    if INTERPRETED and dtype is torch.bfloat16 and kind == "half tiny":
        pytest.skip("the interpreter has no such numbers in bfloat16")
    for count in COUNTS:
        flat = numbers(kind, count, dtype).to(DEVICE)
        want, got = torch.relu(flat), torch.empty_like(flat)
        signs = torch.empty(-(-count // 8), dtype=torch.uint8, device=DEVICE)
        rectify(flat, got, signs)
        assert same(got, want), count
        gradient = numbers("broken", count, dtype).to(DEVICE)
        back = torch.empty_like(gradient)
        through(gradient, signs, back)
        assert same(back, torch.ops.aten.threshold_backward(gradient, want, 0)), count
        rectify(flat, flat, signs)
        assert same(flat, want), count


POOLINGS = [(2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 1, 1, 1, False), (3, 2, 0, 2, True), (5, 3, 2, 1, True)]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "ceil"), POOLINGS)
def test_positions_in_a_window(kernel: int, stride: int, padding: int, dilation: int, ceil: bool, last: bool) -> None:
    from outcore.kernels.bitmask import to_indices, to_positions

    for shape in ((2, 3, 37, 41), (3, 5, 9, 8), (2, 3, 6, 7, 9)):
        images, dims = torch.randn(shape), len(shape) - 2
        if last:
            images = images.contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
        pool = F.max_pool2d if dims == 2 else F.max_pool3d
        _, found = pool(images, kernel, stride, padding, dilation, ceil_mode=ceil, return_indices=True)
        indices = found.to(DEVICE)
        window = PoolWindow(*((n,) * dims for n in (kernel, stride, padding, dilation)), shape[2:])
        found[1, 2], indices[1, 2] = 0, 0  # as torch has it where all is minus infinity: in few of these windows
        small = torch.empty_like(indices, dtype=torch.uint8)
        to_positions(indices, small, window)
        assert torch.equal(small.cpu(), pool_positions.positions_of(found, window))
        back = torch.empty_like(small, dtype=torch.int64)
        to_indices(small, back, window)
        assert torch.equal(back.cpu(), found) and back.stride() == indices.stride()


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too much for an interpreter")
def test_more_numbers_than_32_bits_can_count() -> None:
    from outcore.memory.encode.codecs import encode

    count = 2**31 + 4399  # each of the numbers in a group of its own
    flat = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    places = torch.tensor([0, 300, 2**31 - 1, 2**31, 2**31 + 4096, count - 1], device="cuda")
    flat[places] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.bfloat16, device="cuda")
    for codec in ("sparse", "int8", "int4"):
        back = encode(codec, flat).decoded()
        assert torch.equal(back[places], flat[places]) and int((back != 0).sum()) == 6
        del back
    back = encode("sign", flat).decoded()
    assert int(back.sum()) == 6 and bool(back[places].all())


@pytest.mark.parametrize(
    ("pooling", "dtype", "last"),
    one_in(2, product(POOLINGS, [torch.float32, torch.bfloat16, torch.float64], [False, True])),
)
def test_a_pool_by_positions_is_that_of_torch_on_the_same_device(
    pooling: tuple[int, int, int, int, bool], dtype: torch.dtype, last: bool
) -> None:
    from outcore.kernels.byte_index_pool import pool, unpool

    kernel, stride, padding, dilation, ceil = pooling

    if INTERPRETED and dtype is torch.bfloat16:
        pytest.skip("the interpreter cuts bfloat16 off instead of rounding")
    for shape in ((2, 3, 37, 41), (3, 5, 9, 8)):
        images = torch.randn(shape).clamp_min(0).to(DEVICE, dtype)
        images[0, 0, 3:5, 4:6] = float("nan")
        # Nothing else in a window: on a GPU with channels last torch takes pixel 0 then, on a CPU the window's first.
        images[1, 1, : 1 if last and INTERPRETED else 4] = float("-inf")
        if last:
            images = images.contiguous(memory_format=torch.channels_last)
        images.requires_grad_()
        want, indices = F.max_pool2d(images, kernel, stride, padding, dilation, ceil_mode=ceil, return_indices=True)
        window = PoolWindow(*((n,) * 2 for n in (kernel, stride, padding, dilation)), shape[2:])
        got, positions = torch.empty_like(want), torch.empty_like(want, dtype=torch.uint8)
        pool(images.detach(), got, positions, window, last=last)
        assert same(got, want.detach())
        assert torch.equal(pool_positions.indices_of(positions.cpu(), window), indices.cpu())
        gradient = torch.randn_like(want)
        back = torch.empty_like(images)
        unpool(gradient, positions, back.detach(), window, last=last)
        assert same(back.detach(), torch.autograd.grad(want, images, gradient)[0])


@pytest.mark.parametrize("levels", [255, 15])
@pytest.mark.parametrize("count", [1, GROUP - 1, GROUP + 1, 3 * GROUP - 7])
def test_numbers_are_written_to_their_end_and_not_beyond(levels: int, count: int) -> None:
    from outcore.kernels.sparse_quantize import dequantise, quantise

    groups, width = -(-count // GROUP), -(-count // (2 if levels == 15 else 1))
    flat = torch.rand(count, device=DEVICE)
    codes = torch.full((width + 2,), 77, dtype=torch.uint8, device=DEVICE)
    low, scale, out = (torch.full((size + 2,), -9.0, device=DEVICE) for size in (groups, groups, count))
    quantise(flat, codes[:width], low[:groups], scale[:groups], levels=levels, group=GROUP, tiny=1e-30)
    dequantise(codes[:width], low[:groups], scale[:groups], out[:count], levels=levels, group=GROUP)
    assert codes[width:].tolist() == [77, 77]
    for written, size in ((low, groups), (scale, groups), (out, count)):
        assert written[size:].tolist() == [-9.0, -9.0]
    assert float((out[:count] - flat).abs().max()) <= 0.51 / levels
