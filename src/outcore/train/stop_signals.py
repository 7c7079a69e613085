"""Stop requests: a signal is noted, the step that is running is finished, and then the run saves and leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

__all__ = ["StopRequest", "listening"]

_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
_HEARD = b"\nstopping when this step is done and saved; Ctrl-C again stops at once, without saving\n"


@dataclass
class StopRequest:
    """Whether the run was asked to stop, and by which signal."""

    signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def listening(stop_request: StopRequest, *, prints: bool = False) -> Iterator[None]:
    """Take SIGTERM, SIGUSR1, SIGHUP and Ctrl-C as stop requests; a second Ctrl-C ends the program as it always does.

    A signal that was ignored stays so: that is what ``nohup`` asks for.

    Args:
        stop_request: where a signal is noted.
        prints: whether this process prints that it noted the signal: a step may take minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    numbers = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]

    def heard(number: int, frame: FrameType | None) -> None:
        if stop_request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if stop_request.signal is None and prints:
            os.write(2, _HEARD)  # a handler must not enter a print that it interrupted
        stop_request.signal = number

    before: dict[int, Any] = {number: signal.signal(number, heard) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
