import pytest
import torch
from torch import Tensor, nn

from outcore.models import AmoebaNetD
from outcore.models.amoebanet import FactorizedReduction


@pytest.mark.parametrize(
    ("cells", "filters", "millions"),
    [(18, 208, 81.5), (18, 416, 319.0), (18, 544, 542.7), (36, 544, 1055.8), (72, 512, 1844.9)],
)
def test_parameters_match_the_published_counts(cells: int, filters: int, millions: float) -> None:
    with torch.device("meta"):
        net = AmoebaNetD(classes=1000, cells=cells, filters=filters)
    count = sum(p.numel() for p in net.parameters())
    # GPipe and torchgpipe print 82M / 81.5M, 318M / 319M, -- / 542.7M, 1.05B / 1.06B and 1.80B / 1.84B.
    assert round(count / 1e6, 1) == millions


def test_cells_and_reductions_are_the_blocks_of_the_network() -> None:
    with torch.device("meta"):
        net = AmoebaNetD(cells=6, filters=8)
    assert [name for name, _ in net.named_children()] == [
        "stem",
        "stem_reduction1",
        "stem_reduction2",
        "cell1",
        "cell2",
        "reduction1",
        "cell3",
        "cell4",
        "reduction2",
        "cell5",
        "cell6",
        "classifier",
    ]


def test_every_cell_takes_the_outputs_of_the_two_blocks_before_it() -> None:
    net = AmoebaNetD(cells=3, filters=8).eval()
    outputs: list[Tensor] = []
    inputs: list[tuple[Tensor, ...]] = []

    def record(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args)
        outputs.append(output)

    for child in net.children():
        child.register_forward_hook(record)
    net(torch.randn(1, 3, 64, 64))
    assert inputs[1][0] is outputs[0] and inputs[1][1] is outputs[0]
    for i in range(2, len(outputs) - 1):
        assert inputs[i][0] is outputs[i - 1] and inputs[i][1] is outputs[i - 2]
    assert inputs[-1][0] is outputs[-2]


@pytest.mark.parametrize("size", [64, 65, 95, 127])
def test_each_reduction_halves_and_rounds_up(size: int) -> None:
    with torch.device("meta"):
        net = AmoebaNetD(cells=3, filters=8)
        sizes: list[int] = []
        for name in ("stem", "stem_reduction1", "stem_reduction2", "reduction1", "reduction2", "cell3"):
            hook = net.get_submodule(name).register_forward_hook(lambda m, a, out: sizes.append(out.shape[-1]))
            assert hook is not None
        net(torch.empty(2, 3, size, size + 1))
    expected = [size + 1]
    for _ in range(5):
        expected.append(-(-expected[-1] // 2))
    assert sizes == [*expected[1:], expected[-1]]


def test_a_whole_slide_of_100000_pixels_has_a_shape() -> None:
    with torch.device("meta"):
        assert AmoebaNetD(classes=2)(torch.empty(1, 3, 100_000, 100_000)).shape == (1, 2)


@pytest.mark.parametrize("size", [6, 7])
def test_factorized_reduction_sees_the_pixels_that_a_stride_skips(size: int) -> None:
    reduction = FactorizedReduction(1, 2).eval()
    nn.init.ones_(reduction.even.weight)
    nn.init.ones_(reduction.odd.weight)
    reduction.norm.eps = 0.0
    x = torch.arange(1.0, size * size + 1).view(1, 1, size, size)
    even, odd = reduction(x)[0]
    assert torch.equal(even, x[0, 0, ::2, ::2])
    inner = x[0, 0, 1::2, 1::2]
    assert torch.equal(odd[: inner.shape[0], : inner.shape[1]], inner)
    assert odd.count_nonzero() == inner.numel()


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [({"cells": 7}, "cells=7 .* try cells=6"), ({"filters": 20}, "filters=20 .* try filters=16")],
)
def test_arguments_that_do_not_divide_are_refused_with_ones_that_do(arguments: dict[str, int], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        AmoebaNetD(**arguments)
