"""Numbers in less memory: without their zeros bit for bit, in eight or four bits to half a step of their group."""

from __future__ import annotations

import pytest
import torch

from outcore.memory.encode import sparse_quantize
from outcore.memory.encode.sparse_quantize import grouped, halved, least_step, without_zeros
from outcore.ops.recompute_encode import GROUP


def relus(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(count).relu().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("count", [0, 1, 8, 1003])
def test_without_zeros_every_bit_comes_back(dtype: torch.dtype, count: int) -> None:
    numbers = (relus(count) * 10).to(dtype)
    if count > 3 and dtype.is_floating_point:
        numbers[:3] = torch.tensor([-0.0, float("nan"), float("-inf")])
    packed, decode = without_zeros(numbers)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    assert torch.equal(decode(*packed).view(words), numbers.view(words))
    nonzero = int((numbers.view(words) != 0).sum())
    assert packed[1].numel() == nonzero, "a zero with a sign is kept"
    assert packed[0].numel() * packed[0].element_size() == -(-count // 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, GROUP - 1, GROUP, 5 * GROUP + 3])
def test_a_group_comes_back_to_half_a_step_of_its_own_range(bits: int, count: int) -> None:
    torch.manual_seed(1)
    numbers = torch.randn(count) * torch.arange(1, count + 1)
    packed, decode = grouped(numbers, bits)
    assert packed[0].numel() == -(-count * bits // 8) and len(packed[1]) == len(packed[2]) == -(-count // GROUP)
    found = decode(*packed)
    for here, back in zip(numbers.split(GROUP), found.split(GROUP), strict=True):
        step = (here.max() - here.min()) / (2**bits - 1)
        assert (here - back).abs().max() <= 0.501 * step + 1e-30
        assert back[here.argmin()] == here.min()


@pytest.mark.parametrize("bits", [8, 4])
def test_where_zero_is_the_least_nothing_else_becomes_zero(bits: int) -> None:
    numbers = relus(4 * GROUP)
    numbers[1] = 1e-6
    packed, decode = grouped(numbers, bits)
    assert torch.equal(decode(*packed) > 0, numbers > 0)
    signed = numbers - 1.0  # where it is not, small ones are rounded to the nearest as all others
    packed, decode = grouped(signed, bits)
    step = (signed[:GROUP].max() - signed[:GROUP].min()) / (2**bits - 1)
    assert (decode(*packed) - signed)[:GROUP].abs().max() <= 0.501 * step


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_group_with_a_number_that_is_none_is_none_and_its_neighbours_are_not(bad: float) -> None:
    numbers = relus(3 * GROUP)
    numbers[GROUP + 5] = bad
    packed, decode = grouped(numbers)
    first, second, third = decode(*packed).split(GROUP)
    assert second.isnan().all() and first.isfinite().all() and third.isfinite().all()


def test_equal_numbers_are_exact_and_the_least_step_is_not_zero() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        same = torch.full((GROUP,), 3.0, dtype=dtype)
        packed, decode = grouped(same)
        assert torch.equal(decode(*packed), same)
        assert float(torch.tensor(least_step(dtype)).to(dtype)) > 0


@pytest.mark.parametrize("bits", [8, 4])
def test_parts_are_joined_without_a_seam(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = relus(7 * GROUP + 5)
    packed, decode = grouped(numbers, bits)
    whole = decode(*packed)
    monkeypatch.setattr(sparse_quantize, "_PART", 2 * GROUP)
    packed, decode = grouped(numbers, bits)
    assert torch.equal(decode(*packed), whole)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_those_of_torch(kind: torch.dtype) -> None:
    numbers = relus(100)
    packed, decode = halved(numbers, kind)
    assert packed[0].dtype is kind and torch.equal(decode(*packed), numbers.to(kind).float())
