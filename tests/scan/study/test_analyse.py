"""The analysis of layer chains: counts against real Jacobians, and the verdict."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outcore
from outcore.graph import Graph
from outcore.scan import analyse, jacobian_of
from outcore.scan.study.sparsity import of_layer


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(2, 3, 3, padding=1), (2, 6, 7)),
        (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 0), dilation=(2, 1), groups=2), (4, 9, 6)),
        (nn.Conv1d(2, 3, 3, padding="same"), (2, 9)),
        (nn.Conv3d(1, 2, 2, stride=2), (1, 4, 4, 5)),
        (nn.ReLU(), (2, 3, 3)),
        (nn.AvgPool2d(2), (2, 6, 4)),
        (nn.BatchNorm2d(3).eval(), (3, 4, 4)),
    ],
    ids=str,
)
def test_patterns_are_those_of_the_jacobians(module: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    out = module(x.unsqueeze(0)).shape[1:]
    found = of_layer(type(module).__name__, module.extra_repr(), shape, out, training=False)
    jacobian = jacobian_of(module, x)
    assert found is not None
    assert found.shape == tuple(jacobian.shape)
    assert found.places == jacobian.values().numel()


def test_patterns_of_products_are_those_of_multiplied_jacobians() -> None:
    first, second, third = nn.Conv2d(2, 3, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(3, 2, 3, stride=2, padding=1)
    x = torch.randn(2, 12, 8)
    values = [x, first(x), second(first(x)), third(second(first(x)))]
    layers = (first, second, third)
    patterns = [
        of_layer(type(m).__name__, m.extra_repr(), a.shape, b.shape, training=False)
        for m, a, b in zip(layers, values, values[1:], strict=False)
    ]
    dense = [(jacobian_of(m, v.detach()).to_dense() != 0).double() for m, v in zip(layers, values, strict=False)]
    pattern, real = patterns[0], dense[0]
    for later, matrix in zip(patterns[1:], dense[1:], strict=True):
        assert later is not None
        assert pattern is not None
        multiplications = (matrix @ real.sum(1)).sum()
        pattern, flops = later.after(pattern)
        real = ((matrix @ real) > 0).double()
        assert pattern.places == int(real.sum())
        assert flops == 2 * float(multiplications)


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for size in (16, 0, 32, 0, 64, 64, 0):
        layers += [nn.Conv2d(channels, size, 3, padding=1), nn.ReLU()] if size else [nn.MaxPool2d(2)]
        channels = size or channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def test_a_convolutional_network_is_a_chain_that_does_not_pay() -> None:
    found = analyse(outcore.capture(vgg(), torch.zeros(2, 3, 32, 32)))
    assert len(found.links) == 13
    assert all(link.known for link in found.links)
    conv = found.links[0]
    assert (conv.rows, conv.columns) == (16 * 32 * 32, 3 * 32 * 32)
    assert conv.nonzeros == 16 * 3 * (3 * 32 - 2) ** 2
    assert conv.step_flops == 2 * conv.nonzeros
    assert found.sequential_flops == sum(link.step_flops for link in found.links) == found.alternatives[0]
    assert not found.pays
    worse = found.alternatives[1] / found.sequential_flops
    assert "does not pay" in str(found) and found.verdict in str(found)
    assert f"makes the critical path {worse:.3g}x as long as the 13 steps of back-propagation" in found.verdict
    assert found.steps[1] < found.steps[0]


def test_pruning_makes_jacobians_sparser_and_the_scan_cheaper() -> None:
    graph = outcore.capture(vgg(), torch.zeros(1, 3, 32, 32))
    full, pruned = analyse(graph), analyse(graph, density=0.03)
    assert pruned.total_flops < full.total_flops / 10
    assert pruned.links[0].sparsity > full.links[0].sparsity


def test_a_long_chain_of_small_dense_layers_pays() -> None:
    net = nn.Sequential(*[layer for _ in range(256) for layer in (nn.Linear(4, 4), nn.Tanh())])
    found = analyse(outcore.capture(net, torch.zeros(1, 4)))
    assert found.pays
    assert "could pay" in found.verdict
    ratio = found.sequential_flops / found.critical_flops
    assert f"with {found.tree_levels} levels of products its critical path has {ratio:.2f}x fewer" in found.verdict
    assert found.critical_flops < found.sequential_flops / 2


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, 1, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = F.relu(x + self.second(F.relu(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_a_chain_of_one_link_is_too_short_for_a_scan() -> None:
    found = analyse(outcore.capture(nn.Sequential(nn.Linear(4, 4)), torch.zeros(1, 4)))
    assert not found.pays and found.verdict == "a scan does not pay: 1 links are too few"


def test_a_branch_that_meets_again_is_one_link() -> None:
    found = analyse(outcore.capture(Residual().eval(), torch.zeros(1, 3, 16, 16)))
    names = [link.type for link in found.links]
    assert names[:2] == ["Conv2d", "BatchNorm2d"]
    assert "3 layers" in names
    assert all(link.known for link in found.links)
    branch = found.links[names.index("3 layers")]
    assert branch.nonzeros == 8 * 8 * (3 * 8 - 2) ** 2  # the identity lies within the convolution


def test_a_layer_that_is_not_known_counts_as_dense_and_says_so() -> None:
    found = analyse(outcore.capture(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), torch.zeros(1, 6)))
    assert [link.known for link in found.links] == [True, False]
    assert "taken as dense" in str(found)


def test_a_graph_read_from_a_file_can_be_analysed() -> None:
    graph = outcore.capture(vgg(), torch.zeros(1, 3, 32, 32))
    assert analyse(Graph.from_json(graph.to_json())) == analyse(graph)
