"""Waits that the transport forgot end when the run has; others are as they were."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from outcore.memory.offload.worker_threads import WorkerTask
from outcore.run.ranks import faults
from outcore.run.ranks.current_work import CurrentWork
from outcore.run.ranks.faults import FaultMonitor
from outcore.run.ranks.store import StoreServer
from outcore.run.ranks.store_client import StoreClient
from outcore.run.transport import watched_wait
from outcore.run.transport.watched_wait import WatchedWait
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


def looking(times: int) -> tuple[WatchedWait, list[int]]:
    """One who finds the run over at some look."""
    found, looks = WatchedWait(CurrentWork()), list[int]()

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
    monkeypatch.setattr(watched_wait, "LOOK_S", 0.01)
    waiting, looks = looking(3)
    with pytest.raises(OverError):
        waiting.result(WorkerTask(lambda: None))  # which no thread runs
    assert len(looks) == 3
    done = WorkerTask(lambda: 7)
    threading.Timer(0.05, done.run).start()
    assert looking(10**6)[0].result(done) == 7

    def fail() -> None:
        raise TimeoutError("its own")

    failed = WorkerTask(fail)
    failed.run()
    with pytest.raises(TimeoutError, match="its own"):
        looking(10)[0].result(failed)


@pytest.fixture
def store() -> Iterator[StoreClient]:
    server = StoreServer("right" * 8).start()
    client = StoreClient("right" * 8, server.address, server.port, timeout_s=10.0)
    yield client
    client.close()
    server.close()


def beat(store: StoreClient, rank: int, **more: Any) -> None:
    store.set(f"engine1/beat/{rank}", json.dumps({"beat": 1, **more}))


def watched_until(watch: FaultMonitor, said: str) -> None:
    """Look as a wait does, until there is nothing to wait for any more."""
    with pytest.raises(ConnectionError, match=said):
        while True:
            watch.look()
            time.sleep(0.02)


def test_a_heart_that_stopped_is_reported_to_all(store: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "SILENT_AFTER_S", 1.0)
    watches = [FaultMonitor(store, rank, 3, CurrentWork(), 1, grace_s=1e9) for rank in (0, 2)]
    try:
        beat(store, 1, stage=1)
        for watch in watches:
            watched_until(watch, "another rank has failed")
            told = watch.failed(ConnectionError("broken"))
            assert told is not None and "rank 1, stage 1" in str(told) and "stopped, or its machine" in str(told)
    finally:
        for watch in watches:
            watch.close()


def test_a_rank_that_left_in_good_order_is_no_reason_to_wait(store: StoreClient) -> None:
    watch = FaultMonitor(store, 0, 3, CurrentWork(), 1, grace_s=1e9)
    try:
        watch.look()
        beat(store, 2, left=True)
        watched_until(watch, "rank 2 has left")
        watch.place.waiting = True
        assert "rank 2 (unknown, step 0): it has left" in str(watch.failed(ConnectionError("broken")))
    finally:
        watch.close()


def test_what_is_no_report_is_not_taken_for_one(store: StoreClient) -> None:
    watch = FaultMonitor(store, 0, 2, CurrentWork(), 1, grace_s=1e9)
    try:
        for text in ("not json", "[]", '{"rank": "x"}'):
            store.set("engine1/fault", text)
            watch._refresh(1)
            watch.look()
    finally:
        watch.close()


@pytest.mark.slow
def test_whenever_a_rank_fails_all_end_before_the_transports_timeout(ranks: Pool) -> None:
    """Its losses are under way then, and what gloo was about to write when the connection broke is forgotten."""
    for _ in range(40):
        outcomes = ranks.outcomes(fail, 3, "backward", 1, 2, timeout_s=200.0, grace_s=190.0)
        assert [text.startswith("EngineError: rank 1, stage 1") for _, text in outcomes] == [True] * 3, outcomes


def test_a_wait_for_a_rank_that_is_alive_and_stuck_ends() -> None:
    """Nothing breaks there, so only time tells."""
    waiting = WatchedWait(CurrentWork())
    waiting.limited("rank 1")()
    waiting.timeout_s = -1.0
    with pytest.raises(ConnectionError, match="rank 1 has not answered for"):
        waiting.limited("rank 1")()
