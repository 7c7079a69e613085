"""When a rank fails, all end soon, with one message that says which rank, in which block, and why.

Three things can happen. A rank raises: it posts its report before it leaves. A rank is killed: its connections break,
which the others notice at once, but not whose it was. A rank is stuck: nothing breaks, and waits run into the timeout.

A thread on each rank (`FaultMonitor`) writes a heartbeat with what the rank is doing into the rendezvous store, twice a
second, and reads reports and the heartbeats of the others. A rank whose communication fails looks there first: is there
a report? Else, who has left, whose heartbeat has stopped? Else, who is still computing while all wait? The answer
becomes the report for everybody. A rank that is stopped (SIGSTOP, a machine that freezes) is reported by whoever sees
first that its last heartbeat is older than `SILENT_AFTER_S`. A rank that cannot raise (it hangs in a computation or in
a wait) is ended by its monitor a grace period after a report appeared, with that report on its standard error. A rank
that waits for another looks for a report once a second (`outcore.run.transport.watched_wait`), because not every wait
ends when a connection breaks.

The store itself may go. Where rank 0 runs it, a store that does not answer is rank 0's failure. Where outcore's
launcher runs it, the launcher is gone or stopped: the ranks request a save and a stop themselves, as a signal would,
and end after `ORPHANED_S` in any case, so that none goes on training by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from outcore.errors import EngineError, OutcoreError
from outcore.graph.source import blame
from outcore.run.ranks.current_work import CurrentWork
from outcore.run.ranks.store_client import StoreClient

BEAT_S = 0.5
DEAD_AFTER_S = 4 * BEAT_S
SILENT_AFTER_S = 30.0
"""A rank without a heartbeat for so long is not waited for, though nothing has broken."""
LEFT_LOOKS = 5
"""How often, once a second, a wait checks after a rank has left in good order before it takes that for the reason."""
ORPHANED_S = 600.0
"""Ranks whose launcher is gone have so long to finish their step and to save."""


@dataclass(frozen=True, slots=True)
class FaultReport:
    """What went wrong, as all ranks report it."""

    rank: int
    stage: int
    doing: str
    call: str
    micro_batch: int
    cause: str
    step: int = 0

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        if self.stage >= 0:
            where += f", stage {self.stage}"
        if self.call:
            where += f", block {self.call.partition('#')[0]}"
        doing = f"{self.doing} of micro-batch {self.micro_batch}" if self.micro_batch >= 0 else self.doing
        return f"{where} ({doing}, step {self.step}): {self.cause}"


def report_of(error: BaseException, rank: int, place: CurrentWork) -> FaultReport:
    """The report of an exception on this rank."""
    lines = str(error).strip().splitlines()
    cause = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if line := blame(error):
        cause += f" (at {line})"
    return FaultReport(rank, place.stage, place.doing, place.call, place.micro_batch, cause, place.step)


class FaultMonitor:
    """Monitors this rank and the others.

    Args:
        store: the rendezvous store; the monitor makes a connection of its own.
        store_rank: the rank that runs the store, None where the launcher does.
    """

    def __init__(
        self,
        store: StoreClient,
        rank: int,
        size: int,
        place: CurrentWork,
        number: int,
        *,
        grace_s: float,
        store_rank: int | None = 0,
    ) -> None:
        self.rank, self.size, self.place, self.grace_s = rank, size, place, grace_s
        self._store, self._store_rank = store.another(f"engine{number}/"), store_rank
        self._ended = threading.Event()
        self._handled = False
        self._report: FaultReport | None = None
        self._heartbeats: dict[int, tuple[float, dict[str, Any]]] = {}
        """By rank: seconds since its last heartbeat, and what it was doing."""
        self._suspects: dict[int, int] = {}
        self._answered = time.monotonic()
        self._looks, self._looked = 0, 0.0
        self._refresh(0)
        self._thread = threading.Thread(target=self._run_heartbeat, name="outcore watch", daemon=True)
        self._thread.start()

    def failed(self, error: BaseException) -> EngineError | None:
        """Report an error to the others, or learn the cause from them; returns what this rank should raise, None for
        the error itself."""
        self._handled = True
        communicating = self.place.waiting and not isinstance(error, OutcoreError | KeyboardInterrupt)
        self.place.waiting, self.place.doing, place = False, "failed", replace(self.place)
        found = self._find_culprit(error, place) if communicating else report_of(error, self.rank, place)
        if not self._store_is_lost(DEAD_AFTER_S):
            with contextlib.suppress(ConnectionError):
                found = self._post(found)
        if found.rank != self.rank or not isinstance(error, OutcoreError):
            return EngineError(f"{found}; all {self.size} ranks end")
        return None

    def look(self) -> None:
        """Raise if a rank has reported a failure, has left, or has been silent for long; called while waiting."""
        if self._report is not None:
            raise ConnectionError("another rank has failed")
        if self._store_is_lost(SILENT_AFTER_S) and self._store_rank is not None:
            raise ConnectionError(f"rank {self._store_rank} is silent")
        now = time.monotonic()
        self._looks = self._looks + 1 if now - self._looked < 3.0 and self._left() else 0
        self._looked = now
        if self._looks > LEFT_LOOKS:
            raise ConnectionError(f"rank {self._left()[0]} has left")

    def close(self) -> None:
        """Stop monitoring, and note that this rank leaves in good order."""
        self._ended.set()
        self._thread.join(5 * BEAT_S)
        if not self._store_is_lost(DEAD_AFTER_S):
            with contextlib.suppress(ConnectionError):
                self._store.set(f"beat/{self.rank}", json.dumps(self.place.to_json() | {"beat": -1, "left": True}))
        self._store.close()

    # What is known of the others

    def _left(self) -> list[int]:
        return [rank for rank, (_, row) in self._heartbeats.items() if row.get("left") and rank != self.rank]

    def _store_is_lost(self, after_s: float) -> bool:
        return self._store_rank != self.rank and time.monotonic() - self._answered > after_s

    def _post(self, report: FaultReport) -> FaultReport:
        """Post a report unless there is one; the first counts."""
        there = self._store.compare_set("fault", "", json.dumps(asdict(report)))
        self._report = _read_report(there.decode()) or report
        return self._report

    def _find_culprit(self, error: BaseException, place: CurrentWork) -> FaultReport:
        """The rank that caused a broken or silent connection."""
        was, before = dict(self._heartbeats), dict(self._heartbeats)
        began = time.monotonic()
        while time.monotonic() - began < DEAD_AFTER_S + 2 * BEAT_S:
            time.sleep(BEAT_S / 4)
            if self._report is not None:
                return self._report
            if left := self._left():
                said = "it has left: its engine was closed while others went on; make as many steps on every rank"
                return _about(left[0], self._heartbeats[left[0]][1], said)
            if (
                time.monotonic() - began < 2 * BEAT_S
            ):  # what is known is one interval old, and there may have been a heartbeat since
                before = dict(self._heartbeats)
        if self._store_rank is not None and self._store_is_lost(DEAD_AFTER_S - BEAT_S):
            row = was.get(self._store_rank, (0.0, {}))[1]
            return _about(
                self._store_rank, row, "it has ended without a word, or does not answer (killed, or stopped?)"
            )
        after = dict(self._heartbeats)
        for rank in range(self.size):
            then, now = before.get(rank, (0.0, {}))[1], after.get(rank, (0.0, {}))[1]
            if rank != self.rank and then.get("beat") == now.get("beat") and not now.get("left"):
                return _about(rank, then, "it has ended without a word (killed, or out of memory?)")
        for rank, (_, row) in after.items():
            if rank == self.rank or row.get("doing") not in ("forward", "backward") or row.get("waiting"):
                continue
            then = was.get(rank, (0.0, {}))[1]
            if all(row.get(k) == then.get(k) for k in ("stage", "doing", "micro_batch", "call")):
                return _about(rank, row, "it has been stuck there while the others waited")
        return report_of(error, self.rank, place)

    # The thread

    def _run_heartbeat(self) -> None:
        number, fault_since, orphan_since = 0, None, None
        while not self._ended.wait(BEAT_S):
            number += 1
            try:
                self._refresh(number)
                self._accuse_silent()
            except (ConnectionError, OSError, ValueError):
                if self._ended.is_set():
                    return
            now = time.monotonic()
            if self._store_is_lost(SILENT_AFTER_S) and orphan_since is None:
                orphan_since = now
                self._lose_store()
            if self._report is not None and fault_since is None:
                fault_since = now
            if fault_since is not None and not self._handled and now - fault_since > self.grace_s:
                self._end(str(self._report))
            if self._store_rank is None and orphan_since is not None and now - orphan_since > ORPHANED_S:
                self._end("the launcher is gone")

    def _refresh(self, number: int) -> None:
        """Write a heartbeat, and read the store."""
        self._store.set(f"beat/{self.rank}", json.dumps(self.place.to_json() | {"beat": number}))
        rows = self._store.ages("")
        self._answered = time.monotonic()
        heartbeats = {}
        for key, (age_s, text) in rows.items():
            kind, _, rank = key.partition("/")
            if kind == "fault":
                self._report = self._report or _read_report(text)
            elif kind == "beat" and rank.isdigit():
                heartbeats[int(rank)] = age_s, json.loads(text)
        self._heartbeats = heartbeats

    def _accuse_silent(self) -> None:
        """Report a rank whose heartbeat has stopped though nothing broke: seen twice, since the store may have been
        stopped."""
        for rank, (age_s, row) in self._heartbeats.items():
            silent = age_s > SILENT_AFTER_S and not row.get("left") and rank != self.rank
            self._suspects[rank] = self._suspects.get(rank, 0) + 1 if silent else 0
            if self._suspects[rank] * BEAT_S > 2.0 and self._report is None:
                self._post(_about(rank, row, f"silent for {age_s:.0f} s (stopped, or its machine has frozen?)"))

    def _lose_store(self) -> None:
        """Handle a store that does not answer: rank 0 has failed, or the launcher is gone."""
        if self._store_rank is not None:
            row = self._heartbeats.get(self._store_rank, (0.0, {}))[1]
            said = f"silent for {SILENT_AFTER_S:.0f} s (stopped, or its machine has frozen?)"
            self._report = self._report or _about(self._store_rank, row, said)
            return
        said = f"outcore: the launcher has not answered for {SILENT_AFTER_S:.0f} s; rank {self.rank} saves and stops"
        print(said, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, why: str) -> None:
        """End this process, which an exception cannot reach."""
        print(f"outcore: {why}; rank {self.rank} ends with the others", file=sys.stderr, flush=True)
        os._exit(1)


def _read_report(text: str) -> FaultReport | None:
    """A report, if the text is one."""
    try:
        found = FaultReport(**json.loads(text))
    except (ValueError, TypeError):
        return None
    return found if isinstance(found.rank, int) and isinstance(found.cause, str) else None


def _about(rank: int, row: dict[str, Any], cause: str) -> FaultReport:
    return FaultReport(
        rank,
        row.get("stage", -1),
        row.get("doing", "unknown"),
        row.get("call", ""),
        row.get("micro_batch", -1),
        cause,
        row.get("step", 0),
    )
