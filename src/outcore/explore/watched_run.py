"""A training run beside the page: its curves while it goes on, and the step that it recorded last.

Only files of the run's folder are read (`outcore.report.run`); none of the job's code runs. A folder is looked at every
second, and read again when one of its files has another date or size. A file that is being written is read a second
later.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError
from outcore.explore.parts import ExploreSettings
from outcore.explore.plan_points import timeline_json
from outcore.program import load_trace
from outcore.report.run import read_run

__all__ = ["run_piece", "settings_of_run", "watch_run"]

_FILES = ("run.json", "steps.csv", "epochs.csv", "trace.json", "plan.json", "config.yaml")
_EVERY_S = 1.0


def settings_of_run(folder: Path) -> ExploreSettings:
    """What to look at for a run: the job that it trains, at its batch.

    Raises:
        OutcoreError: the folder holds no run.
    """
    from outcore.train.settings.config import Config

    if not (folder / "config.yaml").is_file():
        raise OutcoreError(f"{folder} is a folder without a run; give a job, or a run that outcore train made")
    config = Config.load(folder / "config.yaml")
    ranks = config.plan.ranks if config.plan.ranks > 1 else None
    return ExploreSettings(
        job=config.job,
        inputs=tuple(config.input),
        arguments=tuple(config.arguments),
        batch=config.train.batch,
        devices=ranks,
        memory=config.plan.memory,
        run=str(folder),
    )


def run_piece(folder: Path) -> dict[str, Any] | None:
    """What the page shows of a run; None where there is none yet."""
    if not (folder / "run.json").is_file():
        return None
    trace = folder / "trace.json"
    recorded = timeline_json(load_trace(trace)) if trace.is_file() else None
    return {**read_run(folder, evaluation=False), "folder": str(folder), "timeline": None, "recorded": recorded}


async def watch_run(folder: Path, show: Callable[[dict[str, Any]], None]) -> None:
    """Call `show` with a run's piece whenever there is something new, until cancelled."""
    seen: Any = None
    while True:
        now = _dates(folder)
        if now != seen and now:
            try:
                piece = await asyncio.to_thread(run_piece, folder)
                if piece is not None:
                    show(piece)
                seen = now
            except (OutcoreError, OSError, json.JSONDecodeError):
                pass  # a file that is being written; it is read again in a moment
        await asyncio.sleep(_EVERY_S)


def _dates(folder: Path) -> list[tuple[str, int, int]]:
    found = []
    for name in _FILES:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        found.append((name, status.st_mtime_ns, status.st_size))
    return found
