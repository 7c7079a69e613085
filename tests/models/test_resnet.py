import pytest
import torch
from torch import nn

from outcore.models import ResNet110V2


def convolution(kernel: int, inputs: int, outputs: int) -> int:
    return kernel * kernel * inputs * outputs + outputs


def norm(channels: int) -> int:
    return 2 * channels


def parameters(blocks: int, classes: int, channels: int) -> int:
    """The count in closed form, stage by stage."""
    total = convolution(3, channels, 16) + norm(16)
    for inputs, middle, outputs in ((16, 16, 64), (64, 64, 128), (128, 128, 256)):
        inner = norm(middle) + convolution(3, middle, middle) + norm(middle) + convolution(1, middle, outputs)
        total += convolution(1, inputs, middle) + inner + convolution(1, inputs, outputs)
        total += (blocks - 1) * (norm(outputs) + convolution(1, outputs, middle) + inner)
    # The first block of the second and third stage normalises its input, that of the first does not.
    return total + norm(64) + norm(128) + norm(256) + 256 * classes + classes


@pytest.mark.parametrize(("depth", "classes", "channels"), [(11, 10, 3), (29, 2, 1), (110, 10, 3), (164, 100, 3)])
def test_parameters_match_the_closed_form(depth: int, classes: int, channels: int) -> None:
    with torch.device("meta"):
        net = ResNet110V2(classes, depth=depth, channels=channels)
    assert sum(p.numel() for p in net.parameters()) == parameters((depth - 2) // 9, classes, channels)


@pytest.mark.parametrize("depth", [11, 110])
def test_depth_counts_the_layers_beside_the_projections(depth: int) -> None:
    with torch.device("meta"):
        net = ResNet110V2(depth=depth)
    layers = [n for n, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and not n.endswith("skip")]
    assert len(layers) == depth


@pytest.mark.parametrize(("choice", "kind"), [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm)])
def test_named_normalisation_is_used_everywhere(choice: str, kind: type[nn.Module]) -> None:
    net = ResNet110V2(depth=11, norm=choice)  # type: ignore[arg-type]
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]
    # Stem, two in the bare first block, three in each of the others, head.
    assert len(norms) == 1 + 2 + 3 + 3 + 1
    assert all(isinstance(m, kind) for m in norms)


def test_no_normalisation_leaves_no_trace_in_the_state() -> None:
    net = ResNet110V2(depth=11, norm="none")
    assert {type(m) for m in net.modules() if next(m.parameters(recurse=False), None) is not None} == {
        nn.Conv2d,
        nn.Linear,
    }
    assert net(torch.randn(1, 3, 8, 8)).shape == (1, 10)


def test_normalisation_can_be_a_function_of_the_channels() -> None:
    net = ResNet110V2(depth=11, norm=lambda channels: nn.InstanceNorm2d(channels, affine=True))
    assert any(isinstance(m, nn.InstanceNorm2d) for m in net.modules())
    assert net(torch.randn(1, 3, 16, 16)).shape == (1, 10)


def test_group_normalised_samples_do_not_depend_on_their_batch() -> None:
    torch.manual_seed(0)
    net = ResNet110V2(depth=11, norm="group").double()
    x = torch.randn(3, 3, 13, 9, dtype=torch.float64)
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]), rtol=0, atol=1e-12)


def test_impossible_depth_is_refused_with_one_that_works() -> None:
    with pytest.raises(ValueError, match=r"depth=100 is not 9n \+ 2 .* try depth=92"):
        ResNet110V2(depth=100)


def test_unknown_normalisation_is_refused() -> None:
    with pytest.raises(ValueError, match="norm='layer' is not known: give 'batch'"):
        ResNet110V2(depth=11, norm="layer")  # type: ignore[arg-type]
