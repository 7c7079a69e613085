"""Images too large to be trained twice are cropped, and the plan is the one for the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outcore
from outcore.cost import cropped_job
from outcore.cost.cropped_job import crop_batch, fitting_side
from outcore.errors import OutcoreError
from outcore.verification import verify_job

CPU = torch.device("cpu")


def job(side: int = 128, batch: int = 2) -> outcore.Job:
    def body() -> nn.Module:
        layers = [m for _ in range(4) for m in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
        return nn.Sequential(nn.Conv2d(3, 4, 1), *layers)

    return outcore.Job(
        body,
        lambda size: (torch.randn(size, 3, side, side), torch.randint(0, 4, (size, side, side))),
        loss=nn.functional.cross_entropy,
        size=batch,
    )


def test_inputs_and_targets_are_cropped_alike_around_the_middle() -> None:
    image, mask, label = torch.arange(64.0).reshape(1, 1, 8, 8), torch.arange(64).reshape(1, 8, 8), torch.tensor([3])
    (cropped,), _, (inner, same) = crop_batch(((image,), {}, (mask, label)), 4)
    assert torch.equal(cropped[0, 0], image[0, 0, 2:6, 2:6]) and torch.equal(inner[0], mask[0, 2:6, 2:6])
    assert same is label
    with pytest.raises(OutcoreError, match="shape of an image"):
        crop_batch(((torch.zeros(2, 3),), {}, None), 4)


def test_what_is_small_enough_stays_whole() -> None:
    small = job()
    assert fitting_side(small, small.capture(), None, CPU) is None
    verdict = verify_job(small, steps=1, device="cpu")
    assert verdict.crop is None and verdict.whole_plain_bytes is None and "crop" not in verdict.peaks


def test_a_plan_for_the_whole_is_verified_on_a_crop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cropped_job._MOST_BYTES, "cpu", 2**20)
    verdict = verify_job(job(), steps=1, device="cpu")
    assert verdict.crop == (32, 128) and verdict.grade == "bitwise equal"
    assert verdict.planned_bytes < verdict.plain_bytes <= 2**20
    plain = outcore.memory_plan(
        outcore.within(job().build(), (torch.randn(2, 3, 128, 128),), memory=None, quiet=True)
    ).plain_bytes
    asked = verify_job(job(), memory=int(0.7 * plain), image=64, steps=1, device="cpu")
    assert asked.crop == (64, 128) and asked.grade == "bitwise equal"
    whole_plan, whole_plain = asked.whole_planned_bytes, asked.whole_plain_bytes
    assert whole_plan is not None and whole_plain is not None
    assert asked.planned_bytes < asked.plain_bytes < whole_plan <= 0.7 * plain < whole_plain
    assert asked.peaks.startswith("whole images: plan ") and "; the crop: " in asked.peaks


def test_a_model_that_takes_one_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cropped_job._MOST_FLOPS, "cpu", 1e3)
    fixed = outcore.Job(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2)), lambda size: (torch.randn(size, 3, 8, 8), None)
    )
    with pytest.raises(OutcoreError, match="give a smaller batch"):
        verify_job(fixed, size=64, device="cpu")
