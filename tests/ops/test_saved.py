"""The table against what a CPU really keeps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.saved_bytes import kept


class Around(nn.Module):
    """A function between two operations, so that its input needs a gradient and nothing else is kept by others."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.function = function

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.function(x + self.scale, *others)


IMAGE, ROWS = (2, 8, 12, 10), (2, 5, 16)
LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv2d(8, 4, 3), IMAGE),
    (nn.ConvTranspose2d(8, 4, 2, 2), IMAGE),
    (nn.Conv1d(5, 4, 3), ROWS),
    (nn.Linear(16, 7), ROWS),
    (nn.BatchNorm2d(8), IMAGE),
    (nn.BatchNorm2d(8).eval(), IMAGE),
    (nn.LayerNorm(16), ROWS),
    (nn.LayerNorm((5, 16)), ROWS),
    (nn.GroupNorm(4, 8), IMAGE),
    (nn.ReLU(), IMAGE),
    (nn.ReLU(inplace=True), IMAGE),
    (nn.LeakyReLU(), IMAGE),
    (nn.LeakyReLU(inplace=True), IMAGE),
    (nn.GELU(), IMAGE),
    (nn.SiLU(), IMAGE),
    (nn.SiLU(inplace=True), IMAGE),
    (nn.Hardswish(inplace=True), IMAGE),
    (nn.Mish(), IMAGE),
    (nn.Sigmoid(), IMAGE),
    (nn.Tanh(), IMAGE),
    (nn.Softmax(dim=-1), ROWS),
    (nn.LogSoftmax(dim=-1), ROWS),
    (nn.MaxPool2d(2), IMAGE),
    (nn.MaxPool2d(3, stride=2, padding=1), IMAGE),
    (nn.AvgPool2d(2), IMAGE),
    (nn.AdaptiveAvgPool2d(1), IMAGE),
    (nn.AdaptiveAvgPool2d(3), IMAGE),
    (nn.Dropout(0.2), IMAGE),
    (nn.Dropout(0.0), IMAGE),
    (nn.Dropout(0.2).eval(), IMAGE),
    (nn.Upsample(scale_factor=2), IMAGE),
]
FUNCTIONS: list[tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = [
    (F.relu, (IMAGE,)),
    (torch.tanh, (IMAGE,)),
    (F.gelu, (IMAGE,)),
    (torch.add, (IMAGE, IMAGE)),
    (torch.mul, (IMAGE, IMAGE)),
    (torch.matmul, (ROWS, (2, 16, 3))),
    (lambda x, y: torch.cat([x, y], 1), (IMAGE, IMAGE)),
    (lambda x: F.interpolate(x, scale_factor=2.0), (IMAGE,)),
    (lambda x: F.max_pool2d(x, 2), (IMAGE,)),
    (lambda x: F.dropout(x, 0.3, training=True), (IMAGE,)),
    (lambda x: F.dropout(x, 0.3, training=False), (IMAGE,)),
    (lambda x: F.softmax(x, -1), (ROWS,)),
    (F.scaled_dot_product_attention, ((2, 4, 32, 16), (2, 4, 24, 16), (2, 4, 24, 16))),
]


def check(model: nn.Module, args: list[Any], type_: str) -> None:
    graph = outcore.capture(model, args)
    costs = account(graph, "cpu")
    call = next(c for c in costs.calls.values() if c.type == type_)
    real = [s for s in call.saved if s.kind in ("value", "derived") and s.bytes]
    told = kept(graph, call.call, "cpu")
    assert told is not None
    assert {s.of for s in told if s.kind == "value"} == {s.of for s in real if s.kind == "value"}
    assert sum(s.bytes for s in told) == sum(s.bytes for s in real)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda v: repr(v) if isinstance(v, nn.Module) else "")
def test_a_layer_keeps_what_the_table_says(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(Around(torch.neg), layer)
    model.training = layer.training
    check(model, [shape], type(layer).__name__)


@pytest.mark.parametrize(("function", "shapes"), FUNCTIONS)
def test_a_function_keeps_what_the_table_says(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]
) -> None:
    model = Around(function)
    graph = outcore.capture(model, list(shapes))
    type_ = list(graph.blocks.values())[-1].type
    check(model, list(shapes), type_)


def test_an_embedding_keeps_its_indices() -> None:
    check(nn.Sequential(nn.Embedding(10, 4)), [torch.zeros(2, 3, dtype=torch.long)], "Embedding")


def test_cross_entropy_keeps_the_logarithms_and_the_targets() -> None:
    check(Around(F.cross_entropy), [torch.randn(4, 10), torch.zeros(4, dtype=torch.long)], "cross_entropy")


def test_dropout_keeps_a_byte_per_element_on_a_gpu_and_a_number_on_a_cpu() -> None:
    graph = outcore.capture(nn.Sequential(Around(torch.neg), nn.Dropout(0.5)), [IMAGE])
    on = {kind: kept(graph, "1#0", kind) or () for kind in ("cpu", "cuda")}
    assert [s.bytes for s in on["cpu"]] == [4 * 2 * 8 * 12 * 10]
    assert [s.bytes for s in on["cuda"]] == [2 * 8 * 12 * 10]


def test_a_gpu_that_is_not_here_is_accounted_by_the_table() -> None:
    graph = outcore.capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5)), [(1, 3, 12, 12)])
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    costs = account(graph, "cuda")
    assert costs.device_kind == "cuda"
    assert [s.bytes for s in costs["1#0"].saved] == [8 * 10 * 10]
