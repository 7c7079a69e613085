"""Where the configurations of a sweep come from, and where their results go.

A source hands out trials, hears of their progress, says which to give up, and keeps all of it on disk, so that a
sweep that was killed goes on: what was finished stays, what was running begins again. `ListedTrials` is for given
configurations, with a journal of one JSON line per result; `outcore.fusion.sweep.optuna_tuner` is Optuna behind the
same five methods.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Outcome = Literal["complete", "pruned", "diverged"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration to train."""

    number: int
    settings: dict[str, Any]


@dataclass
class TrialResult:
    """The result of a trial."""

    number: int
    settings: dict[str, Any]
    state: str = "running"
    """running, complete, pruned or diverged."""
    value: float | None = None
    """The last value reported; the lower the better."""
    steps: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)


class TrialSource(Protocol):
    """Where a sweep gets its trials from."""

    def ask(self) -> Trial | None:
        """The next trial; None if there is no more to try."""

    def report(self, number: int, step: int, value: float) -> None:
        """Report the value of a trial after a step."""

    def hopeless(self, number: int) -> bool:
        """Whether to give a trial up, by what was reported of it and of all others."""

    def tell(self, number: int, state: Outcome, value: float | None) -> None:
        """Report that a trial is over."""

    def finished(self) -> list[TrialResult]:
        """The results of trials that were over before this run began."""


class ListedTrials:
    """Given configurations, one after the other, with a journal."""

    def __init__(self, configurations: Sequence[dict[str, Any]], journal: Path) -> None:
        self.configurations, self.journal = list(configurations), journal
        self._curves: dict[int, list[tuple[int, float]]] = {}
        self._done = {result.number: result for result in self._read()}
        self._next = 0

    def ask(self) -> Trial | None:
        """The next that was not finished before."""
        while self._next < len(self.configurations):
            number, self._next = self._next, self._next + 1
            if number not in self._done:
                return Trial(number, self.configurations[number])
        return None

    def report(self, number: int, step: int, value: float) -> None:
        """Remember it for the journal."""
        self._curves.setdefault(number, []).append((step, value))

    def hopeless(self, number: int) -> bool:
        """Nothing is given up."""
        return False

    def tell(self, number: int, state: Outcome, value: float | None) -> None:
        """Write the result into the journal."""
        curve = self._curves.pop(number, [])
        row = {
            "number": number,
            "settings": self.configurations[number],
            "state": state,
            "value": value,
            "curve": curve,
        }
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def finished(self) -> list[TrialResult]:
        """From the journal."""
        return list(self._done.values())

    def _read(self) -> list[TrialResult]:
        if not self.journal.is_file():
            return []
        found = []
        for line in self.journal.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line a kill cut short
            number = row["number"]
            if number < len(self.configurations) and row["settings"] == json.loads(
                json.dumps(self.configurations[number])
            ):
                curve = [(int(s), float(v)) for s, v in row["curve"]]
                steps = curve[-1][0] if curve else 0
                found.append(TrialResult(number, row["settings"], row["state"], row["value"], steps, curve))
        return found
