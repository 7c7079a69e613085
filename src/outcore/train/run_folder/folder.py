"""The folder of a run: its settings, steps and results, in files that other programs can read.

    runs/x/config.yaml      every setting, resolved
           run.json         what happened: decisions, predicted and measured figures, errors, how it ended
           steps.csv        one row for each step
           epochs.csv       one row for each epoch, with the validation
           plan.json        the plan, where there is one
           predictions.csv  the predictions of the best epoch for every example of the validation
           maps.csv         of networks that give maps: Dice and accuracy of every example
           bad.csv          slides that were skipped, and why
           checkpoints/     last and best
           report.html      all of it as a page

Files that are replaced are written aside and renamed, so a reader or a killed run never sees half of one; what a killed
run left of that is removed by the next. While a run is at work, ``.owner`` says so (`outcore.train.run_folder.owner`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.documents.reading import read_json
from outcore.documents.schema import MapOf, Maybe, Number, Record, Text
from outcore.errors import TrainError
from outcore.train.run_folder.owner import NAME as OWNER
from outcore.train.settings.config import Config

__all__ = ["RunFolder"]

_MAY_CHANGE = (
    "out",
    "resume",
    "key",
    "train.epochs",
    "train.patience",
    "log.",
    "checkpoint.",
    "plan.",
    "data.on_",
    "train.on_",
)
"""Settings that may differ when a run continues."""
_LEFTOVER = re.compile(r"\.(.+\.(yaml|json|html|csv|svg)|owner)\.\d+")
_FACTS = Record(
    may={
        "ended": Maybe(Text()),
        "error": Maybe(Text()),
        "position": Maybe(MapOf()),
        "time_s": Maybe(Number()),
        "wandb": Maybe(Text()),
        "mlflow": Maybe(Text()),
    },
    open=True,
)


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """All settings."""
        return self.path / "config.yaml"

    @property
    def facts(self) -> Path:
        """What happened."""
        return self.path / "run.json"

    @property
    def steps(self) -> Path:
        """A row for each step."""
        return self.path / "steps.csv"

    @property
    def epochs(self) -> Path:
        """A row for each epoch."""
        return self.path / "epochs.csv"

    @property
    def last(self) -> Path:
        """Checkpoints to go on from."""
        return self.path / "checkpoints" / "last"

    @property
    def best(self) -> Path:
        """The checkpoint of the best validation."""
        return self.path / "checkpoints" / "best"

    @property
    def predictions(self) -> Path:
        """A row for each example of the validation."""
        return self.path / "predictions.csv"

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / "report.html"

    @property
    def plan(self) -> Path:
        """The plan."""
        return self.path / "plan.json"

    @property
    def begun(self) -> bool:
        """Whether a run made a step in it."""
        return self.steps.exists() or self.last.exists()

    def open(self, config: Config) -> bool:
        """Make or enter the folder; returns whether a run was begun in it before: whether it made a step.

        Raises:
            TrainError: the folder holds another run, or one that must not be continued.
        """
        begun = self.begun
        before = Config.load(self.config) if self.config.exists() else None
        if before is None and self.path.exists() and any(not self._is_ours(p) for p in self.path.iterdir()):
            raise TrainError(f"{self.path} is a folder with other files in it; say another --out")
        if begun and config.resume == "never":
            raise TrainError(f"{self.path} holds a run already; go on with --resume auto, or say another --out")
        changed = {} if before is None else config.differences(before)
        others = {name: pair for name, pair in changed.items() if not name.startswith(_MAY_CHANGE)}
        if begun and others and not config.checkpoint.allow_changes:
            shown = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (new, old) in others.items())
            raise TrainError(
                f"{self.path} holds another run: {shown}; say another --out, the same settings, or "
                "checkpoint.allow_changes=true"
            )
        if others and not begun:  # a first try that never made a step, with a plan for its settings
            self.plan.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.iterdir():
            if _LEFTOVER.fullmatch(path.name) and path.is_file() and not path.name.endswith(f".{os.getpid()}"):
                path.unlink(missing_ok=True)
        replace(self.config, config.to_yaml())
        return begun

    def discard(self) -> None:
        """Remove what a run wrote that made no step, and the folder if nothing else is in it."""
        if self.begun:
            return
        for path in (self.config, self.facts, self.plan, self.report, self.path / "graph.json"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a folder with other files stays
            self.path.rmdir()

    def note(self, **facts: Any) -> None:
        """Add facts to ``run.json``, beside those that are there."""
        replace(self.facts, json.dumps({**self.read_facts(), **facts}, indent=1) + "\n")

    def read_facts(self) -> dict[str, Any]:
        """What is noted so far."""
        return dict(read_json(self.facts, _FACTS, TrainError)) if self.facts.exists() else {}

    def _is_ours(self, path: Path) -> bool:
        """Whether a file may lie in the folder of a run that did not come to write its settings."""
        return path.name in (self.plan.name, OWNER) or _LEFTOVER.fullmatch(path.name) is not None


def replace(path: Path, text: str) -> None:
    """Write a file aside and rename it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
