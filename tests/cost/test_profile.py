"""A profile of a job: with its loss and optimizer, over batch and image sizes, as a picture."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.profile import largest_batch, profile, scale
from outcore.cost.training_network import capture_training, with_loss
from outcore.errors import OutcoreError
from outcore.machine import parse
from outcore.report.profile_svg import profile_svg

DEVICE = parse("t4").devices[0]


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 3, 128, 128), torch.randint(5, (size,))


JOB = outcore.Job(net, batch, loss=F.cross_entropy, optimizer=torch.optim.Adam, size=4)


def test_the_loss_is_part_of_the_graph_and_blocks_keep_their_names() -> None:
    graph, plain = capture_training(JOB), JOB.capture()
    assert set(plain.calls) < set(graph.calls)
    assert any(graph.blocks[c.block].type == "cross_entropy" for c in graph.calls.values())
    assert graph.model == plain.model
    assert graph.values[graph.outputs[0]].shape == ()


def test_a_loss_in_place_computes_what_the_loss_does() -> None:
    torch.manual_seed(0)
    model, (x, target) = net(), batch(4)
    expected = F.cross_entropy(model(x), target)
    torch.testing.assert_close(with_loss(model, F.cross_entropy)(x, target=target), expected)


def test_a_job_without_a_loss_and_one_whose_loss_cannot_be_recorded_are_profiled_without_it() -> None:
    def reads(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum() if float(output.sum()) > 0 else output.mean()

    for loss in (None, reads):
        found = capture_training(outcore.Job(net, batch, loss=loss, size=2))
        assert {"0#0", "5#0"} <= set(found.calls)


def test_the_optimizer_is_part_of_an_estimated_step() -> None:
    with_adam = profile(JOB, DEVICE)
    without = profile(outcore.Job(net, batch, loss=F.cross_entropy, size=4), DEVICE)
    assert with_adam.step.optimizer_s > 0 and without.step.optimizer_s == 0
    assert with_adam.step.source == "analytic"
    low, high = with_adam.step.interval_s
    assert low <= with_adam.step.step_s <= high


def test_shares_of_the_peak_follow_from_the_flops() -> None:
    found = profile(JOB, DEVICE)
    (only,) = found.precisions
    assert only.flops == found.flops
    assert only.peak_share == pytest.approx(found.flops / found.step.step_s / DEVICE.rate(only.name))
    assert only.busy_peak_share > only.peak_share
    bf16 = profile(JOB, parse("h200").devices[0])
    assert [p.name for p in bf16.precisions] == ["tf32"]
    assert 0 < bf16.matrix_unit_share < 1


def test_memory_over_the_batch_is_a_line_and_the_largest_is_the_largest() -> None:
    found = scale(JOB, DEVICE, sizes=(1, 4))
    assert found.knees("peak_bytes") == []
    largest = largest_batch(JOB, DEVICE)
    assert largest == found.largest
    assert profile(JOB, DEVICE, size=largest).fits
    assert not profile(JOB, DEVICE, size=round(largest * 1.05)).fits


def test_beyond_what_was_sampled_time_grows_with_the_batch() -> None:
    sizes = (2048, 4096, 8192)
    steps = [profile(JOB, parse("h200").devices[0], size=size).step.step_s for size in sizes]
    assert steps[2] / steps[1] == pytest.approx(2, rel=0.1)


def test_image_sizes_change_inputs_and_targets_alike() -> None:
    def masks(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 3, 16, 32), torch.randint(2, (size, 16, 32))

    job = outcore.Job(lambda: nn.Conv2d(3, 2, 3, padding=1), masks, loss=F.cross_entropy, size=1)
    graph = capture_training(job, image=64)
    assert graph.values["input"].shape == (1, 3, 32, 64)
    found = scale(job, DEVICE, along="image", sizes=(64, 128), limit=128)
    assert [p.size for p in found.points] == [64, 128]
    assert 3.5 < found.points[1].peak_bytes / found.points[0].peak_bytes < 4.5


def test_image_sizes_of_a_job_without_images_are_refused() -> None:
    job = outcore.Job(lambda: nn.Linear(4, 2), lambda size: (torch.randn(size, 4), None))
    with pytest.raises(OutcoreError, match="shape of an image"):
        capture_training(job, image=64)


def test_the_picture_has_every_block_as_wide_as_its_time() -> None:
    found = profile(JOB, DEVICE)
    root = ET.fromstring(profile_svg(found))
    hints = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    whole = found.costs.total().time_s
    for path, total in found.costs.by_depth(1).items():
        (hint,) = [h for h in hints if h.startswith(f"{path}, ")]
        assert re.search(rf"{total.time_s / whole:.1%}$", hint)
