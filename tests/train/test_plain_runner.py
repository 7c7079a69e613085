"""A step on one device, without a run around it: updates, what is skipped, and a new plan after memory ran out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from outcore.data import ArraySource, Batch
from outcore.train.examples.feed import MicroBatch
from outcore.train.runners.fitting import FittedModel
from outcore.train.runners.runner import PlainRunner


def runner(**options: Any) -> PlainRunner:
    torch.manual_seed(0)
    return PlainRunner(
        nn.Linear(2, 1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), loss=nn.functional.mse_loss, **options
    )


def batch(scale: float = 1.0) -> MicroBatch:
    return MicroBatch(scale * torch.ones(3, 2), torch.ones(3, 1), ("a", "b", "c"))


def test_a_step_without_a_finite_gradient_updates_nothing_and_says_so() -> None:
    mine = runner(skip_nan=True)
    before = [p.detach().clone() for p in mine.model.parameters()]
    outcome = mine.step([batch(float("inf"))])
    assert not outcome.updated and all(map(torch.equal, mine.model.parameters(), before))
    assert all(p.grad is None for p in mine.model.parameters()) and not mine.optimizer.state  # type: ignore[union-attr]
    outcome = mine.step([batch()])
    assert outcome.updated and outcome.gradient_norm is not None and outcome.gradient_norm > 0
    assert not any(map(torch.equal, mine.model.parameters(), before))


def test_gradients_are_clipped_to_their_norm() -> None:
    free, clipped = runner(), runner(clip=0.01)
    before = [p.detach().clone() for p in free.model.parameters()]
    moved = []
    for one in (free, clipped):
        one.step([batch(5.0)])
        moved.append([p.detach() - b for p, b in zip(one.model.parameters(), before, strict=True)])
    norm = torch.cat([m.flatten() for m in moved[1]]).norm()
    assert float(norm) == pytest.approx(0.1 * 0.01, rel=1e-4)
    assert all(bool((a.sign() == b.sign()).all()) for a, b in zip(*moved, strict=True))


def test_memory_is_counted_in_the_second_step_with_what_is_there_before() -> None:
    mine = runner()
    mine.step([batch()])
    assert mine.peak_bytes() is None
    mine.step([batch()])
    # Weights, momentum and gradients of three numbers each, six inputs, three targets, three outputs.
    assert 4 * (3 * 3 + 6 + 3 + 3) <= mine.peak_bytes() <= 4 * (3 * 3 + 6 + 3 + 3) + 200  # type: ignore[operator]


def test_after_memory_ran_out_the_model_is_what_was_planned_again() -> None:
    smaller = nn.Linear(2, 1)
    mine = runner(refit=lambda: (FittedModel(smaller, True), "tiles of 64"))
    assert mine.replan() == "tiles of 64" and mine.model is smaller and mine.lazy
    mine = runner()
    model = mine.model
    assert mine.replan() is None and mine.model is model and not mine.lazy


@pytest.mark.parametrize("lazy", [False, True])
def test_slides_are_read_whole_unless_the_model_reads_them_itself(lazy: bool) -> None:
    slides = Batch((ArraySource(torch.ones(1, 4, 4, dtype=torch.uint8)),))
    (given,) = runner(lazy=lazy)._arguments(slides)
    assert (given is slides) == lazy
    nested = runner()._arguments([slides, {"a": (torch.ones(1), 2)}])
    assert nested[0].shape == (1, 1, 4, 4) and nested[1]["a"][1] == 2


def test_what_is_saved_goes_on_bit_for_bit(tmp_path: Path) -> None:
    mine = runner(accumulate=2)
    mine.step([batch(), batch(2.0)])
    position = {"position": {"step": 1, "examples": 6}, "more": [1.5]}
    mine.save(tmp_path, position, keep=1)
    drawn = torch.rand(3)
    mine.step([batch(3.0)])
    other = runner(accumulate=2)
    assert other.load(tmp_path)["more"] == [1.5]
    assert torch.equal(torch.rand(3), drawn)
    other.step([batch(3.0)])
    for a, b in zip(mine.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
