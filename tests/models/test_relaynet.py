import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.models import ReLayNet
from outcore.models.relaynet import Decoder, Encoder


def test_unpool_puts_values_back_to_where_they_came_from() -> None:
    torch.manual_seed(0)
    encoder, decoder = Encoder(2, 5, (7, 3)), Decoder(5, 5, (7, 3))
    pooled, positions, skip = encoder(torch.randn(2, 2, 16, 24))
    restored = decoder.unpool(pooled, positions)
    windows = F.interpolate(pooled, scale_factor=2, mode="nearest")
    assert torch.equal(restored, torch.where(skip == windows, skip, 0.0))
    assert torch.equal(F.max_pool2d(restored, 2), pooled)
    # A window of zeros after the ReLU leaves nothing behind; every other one leaves exactly one value.
    assert restored.count_nonzero() == pooled.count_nonzero()


def test_positions_travel_as_integers_from_each_encoder_to_its_decoder() -> None:
    net = ReLayNet(width=4)
    produced: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    consumed: dict[str, tuple[Tensor, ...]] = {}

    def produce(name: str, output: tuple[Tensor, Tensor, Tensor]) -> None:
        produced[name] = output

    def consume(name: str, args: tuple[Tensor, ...]) -> None:
        consumed[name] = args

    for level in "123":
        encoder, decoder = net.get_submodule(f"encoder{level}"), net.get_submodule(f"decoder{level}")
        encoder.register_forward_hook(lambda m, args, output, level=level: produce(level, output))
        decoder.register_forward_pre_hook(lambda m, args, level=level: consume(level, args))
    net(torch.randn(1, 1, 24, 16))
    for level in "123":
        _, positions, skip = produced[level]
        assert positions.dtype == torch.int64 and not positions.requires_grad
        assert consumed[level][1] is positions and consumed[level][2] is skip


def test_parameters_match_the_closed_form() -> None:
    channels, classes, width, kernel = 2, 5, 6, (5, 3)

    def convolution(inputs: int) -> int:
        return kernel[0] * kernel[1] * inputs * width + width + 2 * width

    expected = convolution(channels) + 3 * convolution(width) + 3 * convolution(2 * width)
    expected += width * classes + classes
    net = ReLayNet(channels, classes, width=width, kernel=kernel)
    assert sum(p.numel() for p in net.parameters()) == expected


def test_indivisible_image_is_refused_with_the_padding_that_helps() -> None:
    net = ReLayNet(width=2)
    image = torch.randn(1, 1, 20, 33)
    with pytest.raises(ValueError, match=r"20x33 pixels .* pad it to 24x40 with .*\(0, 7, 0, 4\)"):
        net(image)
    assert net(F.pad(image, (0, 7, 0, 4))).shape == (1, 10, 24, 40)


def test_even_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernel=\(4, 3\)"):
        ReLayNet(kernel=(4, 3))


def test_blocks_stand_in_the_order_of_their_calls() -> None:
    net = ReLayNet(width=2)
    called: list[nn.Module] = []
    for child in net.children():
        child.register_forward_pre_hook(lambda module, args: called.append(module))
    net(torch.randn(2, 1, 8, 8))
    assert called == list(net.children())
