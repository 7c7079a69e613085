"""The network for slides: norms over channels as `LayerNorm` computes them, blocks with a way around."""

import torch
from torch import nn

from outcore.models.slidenet import PixelNorm, _Block


def test_a_norm_over_the_channels_is_layer_norm_of_every_pixel() -> None:
    norm, plain = PixelNorm(6).double(), nn.LayerNorm(6, eps=PixelNorm(6).eps).double()
    nn.init.uniform_(norm.weight), nn.init.uniform_(norm.bias)
    plain.load_state_dict(norm.state_dict())
    x = torch.randn(2, 6, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(norm(x), plain(x.movedim(1, -1)).movedim(-1, 1), rtol=0, atol=1e-12)


def test_a_block_adds_its_convolutions_to_its_input() -> None:
    block, x = _Block(4), torch.randn(1, 4, 6, 6)
    expected = x + block.conv2(torch.relu(block.conv1(block.norm(x))))
    torch.testing.assert_close(block(x), expected)
    nn.init.zeros_(block.conv2.weight), nn.init.zeros_(block.conv2.bias)
    assert torch.equal(block(x), x)
