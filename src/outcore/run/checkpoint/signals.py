"""Signals: SIGUSR1 asks for a checkpoint, SIGTERM or SIGHUP (a terminal that is gone) for a checkpoint and the end.

A signal that was ignored stays so: that is what ``nohup`` asks for.

A handler only notes the request. The ranks exchange requests at the beginning of the next step, so all of them save
after the same step, whichever of them was signalled.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SAVE, STOP = 1, 2


class SaveSignals:
    """Notes signals until it is closed; does nothing outside the main thread, where Python allows no handlers."""

    def __init__(self) -> None:
        self.request = 0
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.request |= SAVE if number == signal.SIGUSR1 else STOP

    def close(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
