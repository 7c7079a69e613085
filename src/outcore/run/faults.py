"""When a rank fails, all end soon, with one message that says which rank, in which block, and why.

Three things can happen. A rank raises: it posts its report before it leaves. A rank is killed: its connections break,
which the others notice at once, but not whose it was. A rank is stuck: nothing breaks, and waits run into the timeout.

A thread on each rank (`Watch`) writes a heartbeat with what the rank is doing into the launcher's store, twice a
second, and looks for reports. Whoever fails in talking to others asks the store first: is there a report? Else, whose
heart has stopped? Else, who is still computing while all wait? The answer becomes the report for everybody.
A rank that cannot raise (it hangs in a computation or in a wait) is ended by its watch a grace period after a report
appeared, with that report on its standard error. Who waits for another rank looks for a report once a second
(`Patience`): that a connection has broken is not always told to all who wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from outcore.errors import EngineError, OutcoreError
from outcore.graph.source import blame
from outcore.run.place import Place

__all__ = ["Report", "Watch", "report_of"]

BEAT_S = 0.5
DEAD_AFTER_S = 4 * BEAT_S
SILENT_AFTER_S = 30.0
"""Without a beat for so long, a rank is not waited for, though nothing has broken."""


@dataclass(frozen=True, slots=True)
class Report:
    """What went wrong, as all ranks tell it."""

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


def report_of(error: BaseException, rank: int, place: Place) -> Report:
    """The report of an exception on this rank."""
    lines = str(error).strip().splitlines()
    cause = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if line := blame(error):
        cause += f" (at {line})"
    return Report(rank, place.stage, place.doing, place.call, place.micro_batch, cause, place.step)


class Watch:
    """Watches over this rank and the others."""

    def __init__(self, store: Any, rank: int, size: int, place: Place, number: int, *, grace_s: float) -> None:
        self.rank, self.size, self.place, self.grace_s = rank, size, place, grace_s
        self._store = store.clone()
        self._main = store
        self._fault, self._hearts = f"engine{number}/fault", f"engine{number}/beat"
        self._ended = threading.Event()
        self._handled = False
        self._seen = time.monotonic(), self._beats()
        self._thread = threading.Thread(target=self._beat, name="outcore watch", daemon=True)
        self._thread.start()

    def failed(self, error: BaseException) -> EngineError | None:
        """Tell the others, or learn from them; what this rank should raise, None for the error itself."""
        self._handled = True
        talking = self.place.waiting and not isinstance(error, OutcoreError | KeyboardInterrupt)
        self.place.waiting, self.place.doing, place = False, "failed", replace(self.place)
        with contextlib.suppress(Exception):
            if talking:
                report = self._posted() or self._post(self._find_culprit(error, place))
            else:
                report = self._post(report_of(error, self.rank, place))
            if report.rank != self.rank or not isinstance(error, OutcoreError):
                return EngineError(f"{report}; all {self.size} ranks end")
            return None
        if talking:
            return EngineError(
                f"rank {self.rank}, {place.doing}: the other ranks cannot be reached any more, rank 0 may have "
                f"ended ({str(error).splitlines()[0]})"
            )
        return None

    def look(self) -> None:
        """For who waits: raises if a rank has reported a failure, or has been silent for long."""
        if self._main.check([self._fault]):
            raise ConnectionError("another rank has failed")
        since, before = self._seen
        if time.monotonic() - since > SILENT_AFTER_S:
            now = self._beats()
            self._seen = time.monotonic(), now
            for rank, row in before.items():
                if rank != self.rank and rank in now and row["beat"] == now[rank]["beat"]:
                    raise ConnectionError(f"rank {rank} is silent")

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join(5 * BEAT_S)
        with contextlib.suppress(Exception):
            self._main.delete_key(f"{self._hearts}/{self.rank}")

    # The store

    def _posted(self) -> Report | None:
        if not self._main.check([self._fault]):
            return None
        return Report(**json.loads(self._main.get(self._fault)))

    def _post(self, report: Report) -> Report:
        """Post a report unless there is one; the first counts."""
        text = json.dumps(asdict(report))
        return Report(**json.loads(self._main.compare_set(self._fault, "", text)))

    def _find_culprit(self, error: BaseException, place: Place) -> Report:
        """Whose fault a broken or silent connection is."""
        before = self._beats()
        patience = time.monotonic() + DEAD_AFTER_S
        while time.monotonic() < patience:
            time.sleep(BEAT_S / 2)
            if (found := self._posted()) is not None:
                return found
        after = self._beats()
        for rank in range(self.size):
            if rank != self.rank and before.get(rank, {}).get("beat") == after.get(rank, {}).get("beat"):
                return _about(rank, before.get(rank, {}), "it has ended without a word (killed, or out of memory?)")
        stuck = [r for r, row in after.items() if r != self.rank and row["doing"] in ("forward", "backward")]
        for rank in stuck:
            row, was = after[rank], before.get(rank, {})
            if not row["waiting"] and all(row[k] == was.get(k) for k in ("stage", "doing", "micro_batch", "call")):
                return _about(rank, row, "it has been stuck there while the others waited")
        return report_of(error, self.rank, place)

    def _beats(self) -> dict[int, dict[str, Any]]:
        keys = [f"{self._hearts}/{rank}" for rank in range(self.size)]
        found = {}
        for rank, key in enumerate(keys):
            if self._main.check([key]):
                found[rank] = json.loads(self._main.get(key))
        return found

    def _beat(self) -> None:
        beat = 0
        fault_since: float | None = None
        while not self._ended.wait(BEAT_S):
            beat += 1
            try:
                self._store.set(f"{self._hearts}/{self.rank}", json.dumps(self.place.to_json() | {"beat": beat}))
                posted = self._store.check([self._fault])
            except Exception:
                posted = False  # the store is gone with the rank that kept it; connections will tell
            if posted and fault_since is None:
                fault_since = time.monotonic()
            if fault_since is not None and not self._handled and time.monotonic() - fault_since > self.grace_s:
                self._end()

    def _end(self) -> None:
        """This rank cannot be reached by an exception: end it here."""
        with contextlib.suppress(Exception):
            report = Report(**json.loads(self._store.get(self._fault)))
            print(f"outcore: {report}; rank {self.rank} ends with the others", file=sys.stderr, flush=True)
        os._exit(1)


def _about(rank: int, row: dict[str, Any], cause: str) -> Report:
    return Report(
        rank,
        row.get("stage", -1),
        row.get("doing", "unknown"),
        row.get("call", ""),
        row.get("micro_batch", -1),
        cause,
        row.get("step", 0),
    )
