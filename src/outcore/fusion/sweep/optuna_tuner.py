"""Optuna as the source of a sweep's trials.

Many trials are asked for before the first is reported, as members of an array train together, so the samplers that can
are made to keep concurrent trials apart (TPE's constant liar). All trials of an interval are reported before one is
judged, so those that train side by side compete with each other, whichever slot they are in. Results are ordinary
Optuna trials in an SQLite file, which its own dashboard and functions read. After a kill, trials that were running are
marked failed and tried again.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.errors import FuseError
from outcore.fusion.sweep.space import SearchDimension
from outcore.fusion.sweep.trials import Outcome, Trial, TrialResult

SEARCHES = ("tpe", "random", "cmaes")
PRUNERS = ("none", "asha", "hyperband", "median")


class Tuner:
    """An Optuna study behind the methods of a source."""

    def __init__(
        self,
        settings: Sequence[SearchDimension],
        directory: Path,
        *,
        trials: int,
        search: str = "tpe",
        pruner: str = "none",
        interval: int = 1,
        steps: int = 100,
        seed: int = 0,
        remember: bool = True,
    ) -> None:
        """Open the study of a directory; without `remember` it lives in memory, and a killed sweep begins anew."""
        optuna = _optuna()
        self._optuna, self._settings, self._limit = optuna, list(settings), trials
        self.study = optuna.create_study(
            study_name="sweep",
            storage=f"sqlite:///{directory / 'study.db'}" if remember else None,
            load_if_exists=remember,
            direction="minimize",
            sampler=_sampler(optuna, search, seed),
            pruner=_pruner(optuna, pruner, interval, steps),
        )
        self._running: dict[int, Any] = {}
        self._before = self._recover()

    def ask(self) -> Trial | None:
        """Let the sampler suggest another."""
        counted = [
            t for t in self.study.get_trials(deepcopy=False) if t.state.name != "FAIL" or "diverged" in t.user_attrs
        ]
        if sum(t.state.name != "WAITING" for t in counted) >= self._limit:
            return None
        trial = self.study.ask()
        self._running[trial.number] = trial
        return Trial(trial.number, {s.name: _suggest(trial, s) for s in self._settings})

    def report(self, number: int, step: int, value: float) -> None:
        """Tell Optuna."""
        self._running[number].report(value, step)

    def hopeless(self, number: int) -> bool:
        """Ask Optuna's pruner."""
        return bool(self._running[number].should_prune())

    def tell(self, number: int, state: Outcome, value: float | None) -> None:
        """Finish the Optuna trial."""
        trial = self._running.pop(number)
        names = {"complete": "COMPLETE", "pruned": "PRUNED", "diverged": "FAIL"}
        if state == "diverged":
            trial.set_user_attr("diverged", True)
        values = value if state == "complete" else None
        self.study.tell(trial, values, state=self._optuna.trial.TrialState[names[state]])

    def finished(self) -> list[TrialResult]:
        """From the study, as it was when this run began."""
        return self._before

    def _recover(self) -> list[TrialResult]:
        found, again = [], []
        states = self._optuna.trial.TrialState
        for trial in self.study.get_trials(deepcopy=False):
            curve = sorted((int(s), float(v)) for s, v in trial.intermediate_values.items())
            value = trial.value if trial.state == states.COMPLETE else (curve[-1][1] if curve else None)
            if trial.state == states.RUNNING:
                again.append(trial)
            elif trial.state in (states.COMPLETE, states.PRUNED) or "diverged" in trial.user_attrs:
                name = {"COMPLETE": "complete", "PRUNED": "pruned"}.get(trial.state.name, "diverged")
                steps = curve[-1][0] if curve else 0
                found.append(TrialResult(trial.number, dict(trial.params), name, value, steps, curve))
        for trial in again:
            self.study.tell(trial.number, state=states.FAIL)
            self.study.enqueue_trial(trial.params)
        return found


class Rungs:
    """ASHA's rule, as an Optuna pruner: at 1, 4, 16, … intervals the best quarter goes on (Li et al., MLSys 2020).

    Optuna's own compares a trial with those whose pruner was asked before; this one with all that have been reported at
    the rung, so the members of an array are judged by one standard. The best of a rung always goes on.
    """

    def __init__(self, interval: int, factor: int = 4) -> None:
        self.interval, self.factor = interval, factor

    def prune(self, study: Any, trial: Any) -> bool:
        """Whether a trial that has just reported is not among the best of its rung."""
        step = trial.last_step
        if step is None or not self._is_rung(step):
            return False
        seen = sorted(
            t.intermediate_values[step] for t in study.get_trials(deepcopy=False) if step in t.intermediate_values
        )
        return bool(trial.intermediate_values[step] > seen[max(1, len(seen) // self.factor) - 1])

    def _is_rung(self, step: int) -> bool:
        rung = self.interval
        while rung < step:
            rung *= self.factor
        return rung == step


def _suggest(trial: Any, setting: SearchDimension) -> Any:
    if setting.values:
        return trial.suggest_categorical(setting.name, list(setting.values))
    if setting.whole:
        return trial.suggest_int(setting.name, int(setting.low), int(setting.high), log=setting.log)
    return trial.suggest_float(setting.name, setting.low, setting.high, log=setting.log)


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise FuseError("--trials, --search and --pruner need Optuna; type: pip install 'outcore[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _sampler(optuna: Any, name: str, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the constant liar is marked experimental
        if name == "tpe":
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True, multivariate=True)
        if name == "cmaes":
            return optuna.samplers.CmaEsSampler(seed=seed)
        return optuna.samplers.RandomSampler(seed=seed)


def _pruner(optuna: Any, name: str, interval: int, steps: int) -> Any:
    if name == "asha":
        return Rungs(interval)
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=interval, max_resource=steps)
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=5)
    return optuna.pruners.NopPruner()
