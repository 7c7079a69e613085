"""The folder of a run: everything it was told, did and found, in files that other programs can read.

    runs/x/config.yaml      every setting, resolved
           run.json         what happened: decisions, predicted and measured figures, trouble, how it ended
           steps.csv        one row for each step
           epochs.csv       one row for each epoch, with the validation
           plan.json        the plan, where there is one
           predictions.csv  what the best epoch said about every example of the validation
           bad.csv          slides that were skipped, and why
           checkpoints/     last and best
           report.html      all of it as a page

Files that are replaced are written aside and renamed, so a reader or a killed run never sees half of one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.errors import TrainError
from outcore.train.config import Config

__all__ = ["RunFolder"]

_MAY_CHANGE = (
    "out",
    "resume",
    "train.epochs",
    "train.patience",
    "log.",
    "checkpoint.",
    "plan.",
    "data.on_",
    "train.on_",
)
"""Settings that a run may go on with although they were others before."""


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
        if before is None and self.path.exists() and any(p.name != self.plan.name for p in self.path.iterdir()):
            raise TrainError(f"{self.path} is a folder with other files in it; say another --out")
        if begun and config.resume == "never":
            raise TrainError(f"{self.path} holds a run already; go on with --resume auto, or say another --out")
        changed = {} if before is None else config.differences(before)
        others = {name: pair for name, pair in changed.items() if not name.startswith(_MAY_CHANGE)}
        if begun and others:
            shown = "; ".join(f"{name} was {old!r}, now {new!r}" for name, (new, old) in others.items())
            raise TrainError(f"{self.path} holds another run: {shown}; say another --out, or the same settings")
        if others:  # a first try that never came to a step, with a plan for what it was told
            self.plan.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        replace(self.config, config.to_yaml())
        return begun

    def note(self, **facts: Any) -> None:
        """Put facts into ``run.json``, beside those that are there."""
        replace(self.facts, json.dumps({**self.read_facts(), **facts}, indent=1) + "\n")

    def read_facts(self) -> dict[str, Any]:
        """What is noted so far."""
        if not self.facts.exists():
            return {}
        read = json.loads(self.facts.read_text())
        return dict(read) if isinstance(read, Mapping) else {}


def replace(path: Path, text: str) -> None:
    """Write a file aside and rename it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
