import pytest
import torch
from torch import nn

from outcore.models import BasicCNN, LeNet, Net2, TwelveConvs


@pytest.mark.parametrize(
    ("network", "expected"),
    [(LeNet, 62_006), (BasicCNN, 21_840), (Net2, 278_719_034), (TwelveConvs, 1_880_042)],
)
def test_parameters_match_the_known_counts(network: type[nn.Module], expected: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in network().parameters()) == expected


def test_lenet_registers_its_layers_in_the_known_order() -> None:
    names = [name for name, _ in LeNet().named_children()]
    assert names == ["conv1", "pool1", "pool2", "conv2", "fc1", "fc2", "fc3"]


def test_basic_cnn_drops_in_training_only() -> None:
    torch.manual_seed(0)
    net, x = BasicCNN(), torch.randn(2, 1, 28, 28)
    assert not torch.equal(net.train()(x), net(x))
    assert torch.equal(net.eval()(x), net(x))
    torch.testing.assert_close(net(x).exp().sum(1), torch.ones(2))


def test_net2_never_calls_its_last_layer() -> None:
    net = Net2(features=6 * 8 * 8)
    called: list[str] = []
    for name, child in net.named_children():
        child.register_forward_pre_hook(lambda module, args, name=name: called.append(name))
    net(torch.randn(1, 3, 8, 8))
    assert called == ["conv1", "conv2", "conv3", "conv4", "fc1"]
    assert "fc2" in dict(net.named_children())


def test_twelve_convolutions_vary_in_channels_and_kernel() -> None:
    convolutions = [m for m in TwelveConvs().layers if isinstance(m, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size[0]) for c in convolutions] == [
        (3, 32, 3),
        (32, 32, 3),
        (32, 32, 5),
        (32, 32, 7),
        (32, 64, 3),
        (64, 64, 3),
        (64, 64, 5),
        (64, 64, 7),
        (64, 128, 3),
        (128, 128, 3),
        (128, 128, 5),
        (128, 128, 7),
    ]


def test_twelve_convolutions_give_log_probabilities() -> None:
    out = TwelveConvs()(torch.randn(2, 3, 8, 13))
    torch.testing.assert_close(out.exp().sum(1), torch.ones(2))
