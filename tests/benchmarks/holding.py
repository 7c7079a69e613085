"""A process that holds the device for a while and writes down when; light to import, since processes do."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.frontier.turns import Turn


def hold(path: str, name: str, pipe: Any) -> None:
    turn = Turn.by(pipe)
    with turn.quiet(), Path(path).open("a") as file:
        file.write(f"{name} begins\n")
        file.flush()
        if name == "dies":
            raise SystemExit(3)
        time.sleep(0.2 if name != "hangs" else 60)
        file.write(f"{name} ends\n")
    turn.give()
    pipe.send({"name": name})
