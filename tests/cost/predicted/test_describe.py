"""A recorded call is described by the sizes that its time depends on; what runs no kernel is nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outcore
from outcore.cost.predicted.describe import describe
from outcore.cost.predicted.operation import Operation

IMAGE, ROWS, WORDS = (2, 6, 12, 8), (4, 5, 16), torch.tensor([[1, 2, 3], [3, 2, 1]])


class Called(nn.Module):
    """A function or layer between a layer that makes its input want a gradient and the end."""

    def __init__(self, run: Callable[[Any], Any], first: bool = False) -> None:
        super().__init__()
        self.layer, self.run, self.first = run if isinstance(run, nn.Module) else None, run, first
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return (self.layer or self.run)(x if self.first or not x.is_floating_point() else x * self.scale)


def described(run: Any, x: Tensor, *, first: bool = False) -> list[Operation | None]:
    """What each call is but that which scales the input."""
    graph = outcore.capture(Called(run, first), (x,))
    steps = [step for step in graph.recording.steps if not step.name.startswith("mul()")]
    return [
        describe(graph, step, lambda dtype: {"float32": "fp32", "bfloat16": "bf16"}.get(dtype, dtype)) for step in steps
    ]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (
            nn.Conv2d(6, 4, (3, 5), (2, 1), (1, 2), (1, 2), groups=2, bias=False),
            Operation("conv", 2, 6, 4, (12, 8), (3, 5), (2, 1), (1, 2), (1, 2), groups=2, bias=False),
        ),
        (
            nn.Conv2d(6, 4, 3, padding="same"),
            Operation("conv", 2, 6, 4, (12, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
        ),
        (
            nn.Conv2d(6, 4, 3, padding="valid"),
            Operation("conv", 2, 6, 4, (12, 8), (3, 3), (1, 1), (0, 0), (1, 1)),
        ),
        (
            nn.ConvTranspose2d(6, 4, 3, 2, 1, output_padding=1),
            Operation("conv_transpose", 2, 6, 4, (12, 8), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1)),
        ),
        (nn.BatchNorm2d(6), Operation("norm", 2, 6, size=(12, 8), variant="batch")),
        (nn.InstanceNorm2d(6), Operation("norm", 2, 6, size=(12, 8), variant="instance")),
        (nn.GroupNorm(3, 6), Operation("norm", 2, 6, size=(12, 8), groups=3, variant="group")),
        (nn.LayerNorm(8), Operation("norm", 2 * 6 * 12, 8, variant="layer")),
        (nn.MaxPool2d(3, 2, 1), Operation("pool", 2, 6, 0, (12, 8), (3, 3), (2, 2), (1, 1), variant="max")),
        (nn.AvgPool2d((3, 2)), Operation("pool", 2, 6, 0, (12, 8), (3, 2), (3, 2), (0, 0), variant="avg")),
        (lambda x: F.max_pool2d(x, 2), Operation("pool", 2, 6, 0, (12, 8), (2, 2), (2, 2), (0, 0), variant="max")),
        (
            nn.AdaptiveAvgPool2d((3, 4)),
            Operation("pool", 2, 6, 0, (12, 8), (4, 2), (4, 2), (0, 0), variant="avg"),
        ),
        (nn.ReLU(), Operation("elementwise", 2, 6, size=(12, 8), variant="relu")),
        (nn.GELU(), Operation("elementwise", 2, 6, size=(12, 8), variant="gelu")),
        (torch.tanh, Operation("elementwise", 2, 6, size=(12, 8), variant="sigmoid")),
        (lambda x: x + x, Operation("elementwise", 2, 6, size=(12, 8), variant="add")),
        (lambda x: x + 1, Operation("elementwise", 2, 6, size=(12, 8), variant="relu")),
        (lambda x: x / 2, Operation("elementwise", 2, 6, size=(12, 8), variant="relu")),
        (nn.Dropout(0.5), Operation("elementwise", 2, 6, size=(12, 8), variant="dropout")),
        (nn.Upsample(scale_factor=2), Operation("copy", 2, 6, size=(24, 16))),
    ],
)  # fmt: skip
def test_calls_on_images_are_described_by_their_sizes(run: Any, expected: Operation | None) -> None:
    (found,) = described(run, torch.randn(IMAGE))
    assert found == expected


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None, :3], x[:, None, :3, :7], is_causal=True)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (nn.Linear(16, 3), Operation("linear", 20, 16, 3)),
        (nn.RMSNorm(16), Operation("norm", 20, 16, variant="rms")),
        (nn.Softmax(-1), Operation("softmax", 20, 16)),
        (lambda x: F.log_softmax(x, -1), Operation("softmax", 20, 16)),
        (lambda x: x @ x.transpose(1, 2), Operation("matmul", 4, 16, 5, (5,))),
        (lambda x: torch.bmm(x[:, :2], x.mT), Operation("matmul", 4, 16, 5, (2,))),
        (lambda x: torch.baddbmm(x[:, :2, :5], x[:, :2], x.mT), Operation("matmul", 4, 16, 5, (2,))),
        (attention, Operation("attention", 4, 16, 7, (5, 3), variant="causal")),
        (lambda x: x.transpose(1, 2).contiguous(), Operation("copy", 4, 16, size=(5,), variant="layout")),
        (lambda x: x.transpose(0, 1).contiguous(), Operation("copy", 5, 4, size=(16,))),
        (lambda x: torch.cat([x, x], 1), Operation("copy", 4, 10, size=(16,))),
    ],
)  # fmt: skip
def test_calls_on_rows_are_described_by_their_sizes(run: Any, expected: Operation) -> None:
    assert [found for found in described(run, torch.randn(ROWS)) if found] == [expected]


def test_an_embedding_is_described_by_its_table() -> None:
    (found,) = described(nn.Embedding(9, 16), WORDS)
    assert (found.kind, found.batch, found.in_channels, found.out_channels) == ("embedding", 6, 9, 16)


@pytest.mark.parametrize(
    "run",
    [nn.Identity(), nn.Dropout(0.0), nn.Flatten(), lambda x: x.transpose(1, 2), lambda x: x.reshape(2, -1),
     lambda x: F.dropout(x, 0.5, training=False), lambda x: F.dropout(x, 0.0), lambda x: x.contiguous()],
)  # fmt: skip
def test_what_only_looks_at_its_input_in_another_way_is_nothing(run: Any) -> None:
    assert set(described(run, torch.randn(IMAGE))) <= {None}


def test_format_precision_and_wanted_gradients_are_told() -> None:
    image = torch.randn(IMAGE)
    (plain,) = described(nn.Conv2d(6, 4, 1), image)
    (last,) = described(nn.Conv2d(6, 4, 1), image.to(memory_format=torch.channels_last))
    (first,) = described(nn.Conv2d(6, 4, 1), image, first=True)
    (half,) = described(nn.ReLU(), image.bfloat16(), first=True)
    assert (plain.channels_last, last.channels_last) == (False, True)
    assert (plain.input_grad, first.input_grad) == (True, False)
    assert (plain.dtype, half.dtype) == ("fp32", "bf16")
