"""Who is named when a connection breaks or a wait does not end: read off the heartbeats alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from outcore.run.ranks import faults
from outcore.run.ranks.current_work import CurrentWork
from outcore.run.ranks.faults import FaultMonitor


class Heard(FaultMonitor):
    """Rank 0 of some, which hears these heartbeats; a rank without a number of its own beats on and on."""

    def __init__(self, *others: dict[str, Any], store_rank: int | None = None) -> None:
        self.rank, self.size, self.place = 0, 1 + len(others), CurrentWork()
        self._others, self._asked, self._report, self._store_rank = others, 0, None, store_rank
        self._answered = time.monotonic()
        self._looks, self._looked, self._suspects = 0, 0.0, {}

    @property
    def _heartbeats(self) -> dict[int, tuple[float, dict[str, Any]]]:  # type: ignore[override]
        self._asked += 1
        rows = ({"doing": "forward", "waiting": True}, *self._others)
        return {rank: (0.0, {"beat": self._asked} | row) for rank, row in enumerate(rows)}


@pytest.fixture(autouse=True)
def _in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "BEAT_S", 0.002)
    monkeypatch.setattr(faults, "DEAD_AFTER_S", 0.008)


WAITING = {"doing": "backward", "waiting": True}
STUCK = {"doing": "forward", "waiting": False, "stage": 2, "micro_batch": 1, "call": "layer#0", "step": 7}


@pytest.mark.parametrize(
    ("others", "rank", "said"),
    [
        ([WAITING, STUCK], 2, "it has been stuck there while the others waited"),
        ([STUCK, WAITING], 1, "it has been stuck there while the others waited"),
        ([WAITING, STUCK | {"doing": "step"}, STUCK], 3, "it has been stuck there while the others waited"),
        ([STUCK, STUCK | {"beat": 5}], 2, "it has ended without a word (killed, or out of memory?)"),
        ([WAITING, {"left": True, "beat": -1}], 2, "it has left: its engine was closed while others went on"),
        ([WAITING, WAITING], 0, "RuntimeError: Connection closed by peer"),
    ],
    ids=["behind one that waits", "before", "two", "silent", "left", "nobody"],
)
def test_the_rank_that_the_others_wait_for_is_named(others: list[dict[str, Any]], rank: int, said: str) -> None:
    found = Heard(*others)._find_culprit(RuntimeError("Connection closed by peer\nmore"), CurrentWork())
    assert found.rank == rank and found.cause.startswith(said)
    if "stuck" in said:
        assert str(found).startswith(f"rank {rank}, stage 2, block layer (forward of micro-batch 1, step 7): it has")


def test_one_that_goes_on_computing_is_not_stuck() -> None:
    class Computing(Heard):
        @property
        def _heartbeats(self) -> dict[int, tuple[float, dict[str, Any]]]:  # type: ignore[override]
            found = super()._heartbeats
            found[1][1]["micro_batch"] = self._asked
            return found

    assert Computing(STUCK)._find_culprit(TimeoutError(), CurrentWork()).cause == "TimeoutError"


def test_a_store_that_does_not_answer_is_the_fault_of_the_rank_that_runs_it() -> None:
    heard = Heard(STUCK, WAITING, store_rank=2)
    heard._answered -= 1.0
    found = heard._find_culprit(RuntimeError("gone"), CurrentWork())
    assert found.rank == 2 and "does not answer" in found.cause
    with pytest.raises(ConnectionError, match="rank 2 is silent"):
        heard._answered -= faults.SILENT_AFTER_S
        heard.look()


def test_one_that_has_left_is_waited_for_a_little_while() -> None:
    heard = Heard({"left": True})
    for _ in range(1 + faults.LEFT_LOOKS):
        heard.look()
    with pytest.raises(ConnectionError, match="rank 1 has left"):
        heard.look()
    heard = Heard({"left": False})
    for _ in range(2 * faults.LEFT_LOOKS):
        heard.look()
