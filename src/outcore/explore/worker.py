"""The process in which a job is looked at: it runs the user's code, and may block, crash or leak without harm.

It reads requests from standard input and writes answers to what was standard output, one JSON document to a line. What
the job prints goes to standard error instead, so it cannot be mistaken for an answer.

    in    {"explore": {"job": "job.py", …}}          {"simulate": {"policy": …, "change": …}, "id": 7}
    out   {"files": […]}  {"pieces": {…}}  {"trouble": {…}}  {"done": true}  {"answer": 7, "value": …}

Imports are done before the first request is read, so that a worker which was started ahead begins at once.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError
from outcore.explore.child_process import leave_with_parent
from outcore.explore.parts import Explored, ExploreSettings
from outcore.graph.source import blame

__all__ = ["main", "trouble_of"]

Send = Callable[[dict[str, Any]], None]


def main() -> None:
    """Answer requests until standard input ends."""
    leave_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message, allow_nan=False) + "\n")
        answers.flush()

    explored: Explored | None = None
    while True:
        request = requests.get()
        if "explore" in request:
            explored = _explore(request["explore"], requests, send)
        else:
            _answer(request, explored, send)


def _read(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)  # nobody listens any more, whatever the job is doing


def _explore(given: dict[str, Any], requests: queue.SimpleQueue[Any], send: Send) -> Explored | None:
    """Look at a job, and answer what is asked meanwhile between two pieces."""
    lists = {name: tuple(given.get(name, ())) for name in ("inputs", "arguments")}
    settings = ExploreSettings(**(given | lists))
    try:
        explored = Explored(settings)
        send({"files": _watched(explored)})
        send({"pieces": explored.first()})
        for name, value in explored.later():
            send({"pieces": {name: value}})
            while not requests.empty():
                _answer(requests.get(), explored, send)
        send({"done": True})
        return explored
    except BaseException as error:  # a job may raise anything, also SystemExit
        send({"trouble": trouble_of(error)})
        return None


def _answer(request: dict[str, Any], explored: Explored | None, send: Send) -> None:
    number, asked = request.get("id"), request.get("simulate", {})
    try:
        if explored is None:
            raise OutcoreError("there is no network to simulate; see the message above")
        send({"answer": number, "value": explored.by_hand(asked["policy"], asked["change"])})
    except Exception as error:
        send({"answer": number, "error": str(error)})


def _watched(explored: Explored) -> list[str]:
    """Files whose change makes the page old: the job's, and the modules it imported from its own folder."""
    given = Path(explored.settings.job)
    found = {given.resolve()} if given.is_file() else set()
    installed = {Path(p).resolve() for p in sys.path if p and "-packages" in p}
    for source in explored.sources:
        path = source.path.resolve()
        if not any(path.is_relative_to(root) for root in installed):
            found.add(path)
    folder = given.resolve().parent if given.is_file() else Path.cwd()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).is_relative_to(folder) and "-packages" not in file:
            found.add(Path(file).resolve())
    return sorted(map(str, found))


def trouble_of(error: BaseException) -> dict[str, Any]:
    """An error in words: its kind, what it says, the user's line, and the traceback below outcore's own frames."""
    cause = error
    while isinstance(cause, OutcoreError) and cause.__cause__ is not None:
        cause = cause.__cause__
    place = blame(cause) or blame(error)
    frames = traceback.format_exception(cause)
    return {
        "kind": type(cause).__name__,
        "message": str(error) or type(error).__name__,
        "place": place,
        "trace": "".join(frames)[-6000:],
    }


if __name__ == "__main__":
    main()
