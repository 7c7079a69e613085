"""Real processes that raise, hang and are killed: all end in bounded time, with the one message."""

from __future__ import annotations

import pytest

from tests.run.failing import fail
from tests.run.pool import Pool


@pytest.mark.parametrize(
    ("how", "doing", "cause"),
    [("raise", "forward", "the layer is broken"), ("backward", "backward", "no gradient today")],
)
def test_an_exception_ends_all_ranks_with_its_place_and_cause(ranks: Pool, how: str, doing: str, cause: str) -> None:
    outcomes = ranks.outcomes(fail, 3, how, 1, 2)
    for good, text in outcomes:
        assert not good
        message = text.splitlines()[0]
        assert message.startswith("EngineError: rank 1, stage 1"), text
        assert f"({doing} of micro-batch 0, step 2)" in message and cause in message
    if how == "raise":
        assert "block b." in outcomes[0][1]


@pytest.mark.parametrize("how", ["kill", "between steps"])
def test_a_killed_rank_is_named_by_the_others(ranks: Pool, how: str) -> None:
    outcomes = ranks.outcomes(fail, 3, how, 1, 2)
    for rank in (0, 2):
        assert "EngineError: rank 1" in outcomes[rank][1] and "ended without a word" in outcomes[rank][1]


def test_a_rank_that_closes_early_is_named_by_the_others(ranks: Pool) -> None:
    outcomes = ranks.outcomes(fail, 3, "leave", 1, 2)
    assert outcomes[1] == (True, 0.0)
    for rank in (0, 2):
        assert "EngineError: rank 1" in outcomes[rank][1], outcomes[rank][1]
        assert "it has left: its engine was closed while others went on" in outcomes[rank][1]


@pytest.mark.slow  # a stopped rank is waited for
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_whoever_it_is(ranks: Pool, stopped: int) -> None:
    outcomes = ranks.outcomes(fail, 3, "stop", stopped, 2, grace_s=5.0, silent_after_s=12.0)
    for rank in {0, 1, 2} - {stopped}:
        assert f"EngineError: rank {stopped}" in outcomes[rank][1], outcomes[rank][1]
        assert "stopped" in outcomes[rank][1]


@pytest.mark.slow  # its short timeout may strike a rank that is merely slow, on a busy machine
def test_a_stuck_rank_is_named_and_ended(ranks: Pool) -> None:
    outcomes = ranks.outcomes(fail, 3, "hang", 1, 2, timeout_s=15.0, grace_s=5.0)
    texts = [text for good, text in outcomes if not good]
    assert len(texts) == 3 and not any("no answer within" in text for text in texts)
    assert any("EngineError: rank 1, stage 1, block b." in text and "stuck" in text for text in texts)
