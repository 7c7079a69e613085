"""A layer as the function it computes gives the layer's own numbers; what is not known so is left to the layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from outcore.memory.saved_tensors.layer_functions import function_of

LAYERS = {
    "linear": (nn.Linear(6, 5), (3, 6)),
    "linear without a bias": (nn.Linear(6, 5, bias=False), (2, 3, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (2, 4, 9)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding="valid", bias=False), (2, 4, 7, 8)),
    "conv2d, same": (nn.Conv2d(4, 4, 3, padding="same", dilation=2), (2, 4, 7, 8)),
    "conv3d": (nn.Conv3d(2, 3, 2, padding=1), (1, 2, 4, 4, 4)),
    "relu": (nn.ReLU(), (4, 5)),
    "relu in place": (nn.ReLU(inplace=True), (4, 5)),
    "layer norm": (nn.LayerNorm((3, 4), eps=0.1), (2, 3, 4)),
    "layer norm without weights": (nn.LayerNorm(4, elementwise_affine=False), (2, 4)),
    "layer norm without a bias": (nn.LayerNorm(4, bias=False), (2, 4)),
    "dropout": (nn.Dropout(0.3), (40, 40)),
    "dropout that does not train": (nn.Dropout(0.3).eval(), (4, 4)),
    "dropout in place": (nn.Dropout(0.3, inplace=True), (40, 40)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_function_gives_the_layers_numbers(name: str) -> None:
    layer, shape = LAYERS[name]
    x = torch.randn(shape)
    for weight in layer.parameters():
        nn.init.normal_(weight)
    with torch.no_grad():
        torch.manual_seed(1)
        want = layer(x.clone())
        found = function_of(layer)
        assert found is not None
        function, parameters, constants = found
        torch.manual_seed(1)
        given = x.clone()
        got = function(given, *parameters, *constants)
    assert torch.equal(got, want)
    assert (got.data_ptr() == given.data_ptr()) is (layer(y := x.clone()).data_ptr() == y.data_ptr())


def test_what_else_a_layer_does_is_left_to_it() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    moved = nn.Linear(3, 3)
    del moved.weight
    moved.weight = torch.ones(3, 3)  # type: ignore[assignment]
    patched = nn.Linear(3, 3)
    patched.forward = lambda x: 2 * nn.Linear.forward(patched, x)  # type: ignore[method-assign]
    others = [
        Doubled(3, 3),
        patched,
        nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"),
        parametrizations.weight_norm(nn.Linear(3, 3)),
        moved,
        nn.BatchNorm1d(3),
    ]
    assert [function_of(layer) for layer in others] == [None] * len(others)
