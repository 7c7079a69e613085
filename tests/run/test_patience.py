"""Waits that the transport forgot end when the run has; others are as they were."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from datetime import timedelta

import pytest
import torch.distributed as dist

from outcore.run import faults, patience
from outcore.run.faults import Watch
from outcore.run.patience import Patience
from outcore.run.place import Place
from tests.run.failing import fail
from tests.run.pool import Pool


class Work:
    """A collective operation that is done, or fails, after some waits; perhaps between a wait and the question."""

    def __init__(self, waits: int | None, error: Exception | None = None, between: bool = False) -> None:
        self.waits, self.error, self.between, self.ended = waits, error, between, False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.waits == 0:
            self.ended = True
            if self.error is not None:
                raise self.error
            return True
        assert timeout is not None, "waited for good"
        if self.waits is not None:
            self.waits -= 1
            self.ended = self.between and self.waits == 0
        raise RuntimeError("Operation timed out!")


class OverError(ConnectionError):
    pass


def looking(times: int) -> tuple[Patience, list[int]]:
    """One who finds the run over at some look."""
    found, looks = Patience(Place()), list[int]()

    def look() -> None:
        looks.append(len(looks))
        if len(looks) == times:
            raise OverError

    found.look = look
    return found, looks


@pytest.mark.parametrize("between", [False, True])
def test_work_that_takes_long_is_waited_for(between: bool) -> None:
    waiting, looks = looking(10)
    waiting.wait(Work(3, between=between))
    assert len(looks) == (2 if between else 3) and not waiting.place.waiting


def test_what_went_wrong_is_raised() -> None:
    waiting, _ = looking(10)
    with pytest.raises(RuntimeError, match="closed by peer"):
        waiting.wait(Work(2, RuntimeError("Connection closed by peer")))
    assert waiting.place.waiting  # the error came from talking to others


def test_work_that_never_ends_is_given_up_when_the_run_is_over() -> None:
    waiting, looks = looking(4)
    with pytest.raises(OverError):
        waiting.wait(Work(None))
    assert len(looks) == 4 and waiting.place.waiting


def test_another_threads_wait_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LOOK_S", 0.01)
    waiting, looks = looking(3)
    with pytest.raises(OverError):
        waiting.result(Future[None]())
    assert len(looks) == 3
    done: Future[int] = Future()
    threading.Timer(0.05, done.set_result, [7]).start()
    assert looking(10**6)[0].result(done) == 7
    failed: Future[int] = Future()
    failed.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        looking(10)[0].result(failed)


def test_a_report_and_a_heart_that_stopped_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    watch = Watch(store, 0, 3, Place(), 1, grace_s=1e9)
    try:
        monkeypatch.setattr(faults, "SILENT_AFTER_S", 0.0)

        def beat(rank: int, number: int) -> None:
            store.set(f"engine1/beat/{rank}", json.dumps({"beat": number}))

        watch.look()  # nobody has begun
        beat(1, 1)
        beat(2, 1)
        watch.look()
        beat(1, 2)
        beat(2, 2)
        watch.look()
        beat(1, 3)
        store.delete_key("engine1/beat/2")  # it has left
        watch.look()
        with pytest.raises(ConnectionError, match="rank 1 is silent"):
            watch.look()
        watch.failed(ValueError("mine"))
        with pytest.raises(ConnectionError, match="another rank"):
            watch.look()
    finally:
        watch.close()


@pytest.mark.slow
def test_whenever_a_rank_fails_all_end_before_the_transports_timeout(ranks: Pool) -> None:
    """Its losses are under way then, and what gloo was about to write when the connection broke is forgotten."""
    for _ in range(40):
        outcomes = ranks.outcomes(fail, 3, "backward", 1, 2, timeout_s=200.0, grace_s=190.0)
        assert [text.startswith("EngineError: rank 1, stage 1") for _, text in outcomes] == [True] * 3, outcomes
