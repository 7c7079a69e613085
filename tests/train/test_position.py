"""What a run remembers of itself: losses that are no numbers do not spoil the mean of an epoch."""

from __future__ import annotations

import math

import pytest

from outcore.train.position import TrainingPosition


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_step_without_a_finite_loss_counts_as_a_step_but_not_in_the_mean(broken: float) -> None:
    at = TrainingPosition()
    for loss, examples in ((1.0, 2), (broken, 5), (4.0, 4)):
        at.add(loss, examples, 0.5)
    assert (at.step, at.step_in_epoch, at.examples, at.loss_examples) == (3, 3, 11, 6)
    assert at.mean_loss == (1.0 * 2 + 4.0 * 4) / 6 and at.epoch_time_s == 1.5
    at.leave_out()
    assert (at.step, at.step_in_epoch, at.examples) == (4, 4, 11)
    at.end_epoch()
    assert (at.epoch, at.step, at.step_in_epoch, at.epoch_time_s) == (1, 4, 0, 0.0)
    assert math.isnan(at.mean_loss)


def test_the_best_is_the_first_of_equals_and_is_stale_after_so_many_epochs() -> None:
    at = TrainingPosition()
    for value, better in ((2.0, True), (2.0, False), (float("nan"), False), (1.5, True), (1.75, False), (1.6, False)):
        assert at.note_validation("loss", value) is better
        at.end_epoch()
    assert (at.best, at.best_epoch) == (1.5, 3)
    assert at.stale(2) and not at.stale(3) and not at.stale(None)
    higher = TrainingPosition()
    assert (
        higher.note_validation("accuracy", 0.5)
        and higher.note_validation("accuracy", 0.75)
        and not higher.note_validation("accuracy", 0.6)
    )
