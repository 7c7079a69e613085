"""Sweeps: every configuration as if trained alone, grouped, pruned, resumed."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import optuna
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from typer.testing import CliRunner

from outcore.cli.main import app
from outcore.errors import FuseError, OutcoreError
from outcore.fusion.array import FusedArray
from outcore.fusion.program.program import StackedProgram
from outcore.fusion.sweep.optuna_tuner import Tuner
from outcore.fusion.sweep.space import SearchDimension, grid, parse_settings
from outcore.fusion.sweep.sweep import Sweep, SweepOptions
from outcore.fusion.sweep.trials import ListedTrials, Trial, TrialResult
from tests.cli.command import outcore_command

JOB = """
import torch
from torch import nn

size = 16

def model(width=8):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()

def batch(size):
    x = torch.randn(size, 6).double()
    return x, (x[:, :3] + 0.1 * x[:, 3:]).argmax(1)

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr, momentum=0.9)
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return str(path)


def _options(job: str, directory: Path, **settings: Any) -> SweepOptions:
    return SweepOptions(job, directory, **({"steps": 12, "interval": 4, "members": 4, "measure": False} | settings))


def _alone(sweep: Sweep, number: int) -> float:
    """A configuration trained by plain PyTorch on the sweep's own batches."""
    trial = Trial(number, sweep.results[number].settings)
    model = sweep.recipe.model(trial)
    optimizer = sweep.recipe.optimizer(trial, model.parameters())
    size = sweep.recipe.batch_size(trial)
    for step in range(sweep.options.steps):
        (x,), y = sweep.recipe.batch(trial, size, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    judged = [sweep.recipe.batch(trial, size, -1 - n) for n in range(sweep.options.held_out)]
    with torch.no_grad():
        return sum(float(F.cross_entropy(model(*x), y)) for x, y in judged) / len(judged)


def test_every_configuration_of_a_grid_is_trained_as_if_alone(job: str, tmp_path: Path) -> None:
    """Four at a time from one group of four: all begin at the first batch, so each equals a run of its own."""
    settings = parse_settings(["lr=0.3,0.03", "wd=0,0.1"])
    sweep = Sweep(_options(job, tmp_path / "out"), ListedTrials(grid(settings), tmp_path / "trials.jsonl"))
    results = sweep.run()
    assert [r.state for r in results] == ["complete"] * 4
    for result in results:
        assert result.value == pytest.approx(_alone(sweep, result.number), abs=1e-10)
        assert [step for step, _ in result.curve] == [4, 8, 12]
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    assert {(float(r["lr"]), float(r["wd"])) for r in rows} == {(0.3, 0), (0.3, 0.1), (0.03, 0), (0.03, 0.1)}
    picture = ElementTree.parse(tmp_path / "out" / "curves.svg")
    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 4
    best = min(results, key=lambda r: r.value or 9)
    assert sweep.best is not None and sweep.best.number == best.number
    assert load_file(tmp_path / "out" / "best.safetensors").keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_what_cannot_be_fused_is_grouped_by_itself(job: str, tmp_path: Path) -> None:
    settings = parse_settings(["width=4,8", "batch=8,16", "lr=0.1,0.2", "seed=1"])
    sweep = Sweep(_options(job, tmp_path / "out", members=8), ListedTrials(grid(settings), tmp_path / "trials.jsonl"))
    results = sweep.run()
    assert len(results) == 8 and all(r.state == "complete" for r in results)
    for result in results[::3]:
        assert result.value == pytest.approx(_alone(sweep, result.number), abs=1e-10)


def test_a_slot_is_refilled_while_the_others_train_on(job: str, tmp_path: Path) -> None:
    settings = parse_settings(["lr=0.3,0.1,0.03,0.01,0.003,1e999"])
    sweep = Sweep(_options(job, tmp_path / "out", members=2), ListedTrials(grid(settings), tmp_path / "trials.jsonl"))
    results = {r.settings["lr"]: r for r in sweep.run()}
    assert len(results) == 6
    assert results.pop(float("inf")).state == "diverged"
    assert all(r.state == "complete" and r.steps == 12 for r in results.values())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr=abc", r"--set lr=abc: optimizer\(\) of .*job.py does not take it"), ("lr=-1", "Invalid learning rate"),
        ("momentum=abc", "the optimizer has 0.9 there; give a number"), ("batch=0", "at least one sample"),
        ("batch=abc", "batch=abc: give a whole number"), ("seed=0.5", "seed=0.5: give a whole number"),
        ("width=abc", r"model\(\) of .*job.py failed"), ("foo=1", "neither model"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused_by_name(job: str, tmp_path: Path, setting: str, message: str) -> None:
    made = ListedTrials(grid(parse_settings([setting])), tmp_path / "trials.jsonl")
    with pytest.raises(OutcoreError, match=message):
        Sweep(_options(job, tmp_path / "out"), made).run()


def test_rounds_of_configurations_share_one_array(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five configurations, two at a time, all begin at the first batch; nothing is recorded anew for a round."""
    recorded: list[int] = []
    record = StackedProgram.record
    counting = lambda *given: (recorded.append(1), record(*given))[1]  # noqa: E731
    monkeypatch.setattr(StackedProgram, "record", staticmethod(counting))
    settings = parse_settings(["lr=0.3,0.1,0.03,0.01,0.003"])
    sweep = Sweep(_options(job, tmp_path / "out", members=2), ListedTrials(grid(settings), tmp_path / "trials.jsonl"))
    results = sweep.run()
    assert [r.state for r in results] == ["complete"] * 5
    for result in results:
        assert result.value == pytest.approx(_alone(sweep, result.number), abs=1e-10)
    assert len(recorded) == 2  # training and judging


def test_a_larger_round_gets_a_larger_array(job: str, tmp_path: Path) -> None:
    """One configuration of a width beside two of another, then three of the first."""
    widths = (4, 8, 8, 4, 4, 4)
    made = ListedTrials([{"width": w, "lr": 0.1 / (i + 1)} for i, w in enumerate(widths)], tmp_path / "trials.jsonl")
    seen: list[int] = []
    sweep = Sweep(_options(job, tmp_path / "out", members=3), made)
    start = sweep._start
    sweep._start = lambda members: (seen.append(len(members)), start(members))[1]  # type: ignore[method-assign]
    assert [r.state for r in sweep.run()] == ["complete"] * 6
    assert sorted(seen) == [1, 2, 3]


def test_an_array_that_shrinks_with_its_trials_gives_the_same(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of six are given up after the first interval, and there is nothing to refill their slots with."""

    class Some(ListedTrials):
        def hopeless(self, number: int) -> bool:
            return number not in (3, 5)

    kept: list[list[int]] = []
    keep = FusedArray.keep
    monkeypatch.setattr(FusedArray, "keep", lambda array, slots: (kept.append(list(slots)), keep(array, slots)))
    configurations = grid(parse_settings(["lr=0.3,0.1,0.05,0.03,0.02,0.01"]))

    def sweep(narrow: bool) -> list[TrialResult]:
        options = _options(job, tmp_path / f"{narrow}", members=6, narrow=narrow)
        return sorted(Sweep(options, Some(configurations, tmp_path / f"{narrow}.jsonl")).run(), key=lambda r: r.number)

    wide, narrow = sweep(False), sweep(True)
    assert kept == [[3, 5]]
    assert [r.state for r in wide] == [r.state for r in narrow]
    assert [r.number for r in narrow if r.state == "complete"] == [3, 5]
    for one, other in zip(wide, narrow, strict=True):
        assert one.value == pytest.approx(other.value, abs=1e-12) and len(one.curve) == len(other.curve)


class _KilledError(Exception):
    pass


def test_a_killed_sweep_goes_on_where_it_was(job: str, tmp_path: Path) -> None:
    settings = parse_settings(["lr=0.3,0.1,0.03,0.01"])
    whole = Sweep(
        _options(job, tmp_path / "whole", members=2), ListedTrials(grid(settings), tmp_path / "whole.jsonl")
    ).run()

    def kill(sweep: Sweep) -> None:
        if sum(r.state == "complete" for r in sweep.results.values()) == 2:
            raise _KilledError

    journal = tmp_path / "trials.jsonl"
    with pytest.raises(_KilledError):
        Sweep(_options(job, tmp_path / "out", members=2), ListedTrials(grid(settings), journal), on_change=kill).run()
    with journal.open("a") as file:
        file.write('{"number": 2, "settings"')  # a line cut short
    again = Sweep(_options(job, tmp_path / "out", members=2), ListedTrials(grid(settings), journal))
    results = again.run()
    assert {r.number for r in results} == {0, 1, 2, 3} and all(r.state == "complete" for r in results)
    assert again.member_steps == 24  # two of the four were not trained again
    for a, b in zip(whole[:2], sorted(results, key=lambda r: r.number)[:2], strict=True):
        assert a.value == pytest.approx(b.value)


def test_optuna_asks_prunes_and_keeps_ordinary_trials(job: str, tmp_path: Path) -> None:
    settings = parse_settings(["lr=1e-4:1.0:log", "width=4,8"])
    out = tmp_path / "out"
    out.mkdir()
    tuner = Tuner(settings, out, trials=12, pruner="asha", interval=4, steps=12)
    sweep = Sweep(_options(job, out, members=4), tuner)
    results = sweep.run()
    assert len(results) == 12
    states = {r.state for r in results}
    assert "pruned" in states and "complete" in states and "running" not in states
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{out / 'study.db'}")
    assert len(study.trials) == 12
    assert {t.state.name for t in study.trials} <= {"COMPLETE", "PRUNED", "FAIL"}
    assert study.best_value == pytest.approx(sweep.best.value if sweep.best else None)
    pruned = next(t for t in study.trials if t.state.name == "PRUNED")
    assert min(pruned.intermediate_values) == 4


@pytest.mark.parametrize("order", [range(8), reversed(range(8))], ids=["forth", "back"])
def test_members_of_an_array_are_judged_by_one_standard(order: Any, tmp_path: Path) -> None:
    """Eight report, then all are judged: the best quarter goes on, in whichever order they are asked."""
    tuner = Tuner(parse_settings(["lr=0:1"]), tmp_path, trials=12, pruner="asha", interval=4, remember=False)
    values = [0.5, 0.1, 0.8, 0.3, 0.9, 0.2, 0.7, 0.6]
    for value in values:
        trial = tuner.ask()
        assert trial is not None
        tuner.report(trial.number, 4, value)
    assert {n for n in order if not tuner.hopeless(n)} == {1, 5}
    for number in (1, 5):
        tuner.report(number, 8, 1.0)
        assert not tuner.hopeless(number)  # eight steps are no rung
    late = tuner.ask()
    assert late is not None
    tuner.report(late.number, 4, 0.25)
    assert tuner.hopeless(late.number)  # third of nine
    tuner.report(1, 16, 0.4)
    tuner.report(5, 16, 0.3)
    assert tuner.hopeless(1) and not tuner.hopeless(5)  # the best of a rung goes on, however few there are


def test_a_killed_study_tries_again_what_was_running(job: str, tmp_path: Path) -> None:
    settings = parse_settings(["lr=1e-4:1.0:log"])
    out = tmp_path / "out"
    out.mkdir()

    def kill(sweep: Sweep) -> None:
        raise _KilledError

    with pytest.raises(_KilledError):
        Sweep(_options(job, out, members=3), Tuner(settings, out, trials=6, search="random"), on_change=kill).run()
    results = Sweep(_options(job, out, members=3), Tuner(settings, out, trials=6, search="random")).run()
    assert sum(r.state == "complete" for r in results) == 6
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{out / 'study.db'}")
    failed = [t for t in study.trials if t.state.name == "FAIL"]
    again = [t.params["lr"] for t in study.trials if t.state.name == "COMPLETE"]
    assert len(failed) == 3 and {t.params["lr"] for t in failed} <= set(again)


def test_a_study_may_live_in_memory_and_draws_the_same_configurations(job: str, tmp_path: Path) -> None:
    settings, drawn = parse_settings(["lr=1e-4:1.0:log"]), []
    for members in (3, 1):
        tuner = Tuner(settings, tmp_path, trials=4, search="random", steps=4, remember=False)
        results = Sweep(_options(job, tmp_path / str(members), members=members), tuner).run()
        drawn.append([r.settings["lr"] for r in sorted(results, key=lambda r: r.number)])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 4
    assert not (tmp_path / "study.db").exists()


def test_the_command_prints_a_row_per_configuration(job: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["sweep", job, "--set", "lr=0.1,0.01", "--steps", "4", "--no-measure", "-o", str(out), "--json"]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    shown = json.loads(ran.stdout)
    assert [r["settings"]["lr"] for r in shown["results"]] == [0.1, 0.01]
    assert shown["best"] in (0, 1)
    again = CliRunner().invoke(app, [a for a in arguments if a != "--json"])
    assert again.exit_code == 0 and "complete" in again.output


def test_the_command_refuses_a_device_that_is_not_there(job: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = CliRunner().invoke(app, ["sweep", job, "--set", "lr=0.1,0.01", "--device", "gpu", "-o", str(out)])
    assert isinstance(ran.exception, OutcoreError) and "no device 'gpu'" in str(ran.exception)
    assert not out.exists()


def test_a_sweep_that_fails_before_its_first_step_leaves_no_folder(job: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["sweep", job, "--set", "foo=1", "--no-measure", "-o", str(tmp_path / "new/out")])
    assert isinstance(ran.exception, OutcoreError)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("trials", [(), ("--trials", "2"), ("--pruner", "asha")])
@pytest.mark.parametrize("there", [False, True])
def test_a_sweep_of_a_job_that_cannot_be_imported_leaves_no_study(
    trials: tuple[str, ...], there: bool, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("def (")
    if there:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("kept")
    shown = outcore_command("sweep", "job.py", "--set", "lr=1,2", "--no-measure", *trials, "-o", "out", folder=tmp_path)
    assert shown.returncode == 1 and "cannot be imported" in shown.stderr
    assert [path.name for path in (tmp_path / "out").glob("*")] == (["mine.txt"] if there else [])
    assert (tmp_path / "out").exists() == there


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--set", "lr=1,2", "--seed", str(2**32)), 2, "must be a whole number from 0 to 4294967295"),
        (("--set", "lr=1,2", "--seed", "-1"), 2, "must be a whole number from 0 to 4294967295"),
        (("--set", f"seed=1,{2**63}"), 1, "it must fit into 64 bits"),
        (("--set", "seed=1e400,2"), 1, "give a whole number"),
        (("--set", "batch=1e400,2"), 1, "give a whole number"),
    ],
)
def test_a_seed_that_is_none_is_refused(job: str, tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    shown = outcore_command("sweep", job, *words, "--no-measure", "--steps", "2", "-o", "out", folder=tmp_path)
    assert shown.returncode == code and "Traceback" not in shown.stderr
    assert said in " ".join(re.sub("[│╭╮╰╯─]", " ", shown.stderr).split()), shown.stderr
    assert not (tmp_path / "out").exists()


def test_the_command_measures_and_says_what_it_achieved(job: str, tmp_path: Path) -> None:
    arguments = ["sweep", job, "-s", "lr=0.1:0.2", "--trials", "3", "--search", "random", "--steps", "40"]
    ran = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    # Which of the two it was depends on the machine; a loop that fused nothing is not compared with itself.
    fused = "over one after the other" in ran.output and "predicted" in ran.output
    assert fused != ("fusing does not pay" in ran.output and ", one configuration after the other" in ran.output)
    assert "best: trial" in ran.output


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "something to vary"),
        (["lr"], "must be name=values"),
        (["lr=1:0"], "no range"),
        (["lr=0:1:log"], "begin above 0"),
        (["lr=1", "lr=2"], "given twice"),
    ],
)
def test_settings_that_make_no_sense_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(FuseError, match=message):
        parse_settings(texts)


def test_settings_are_read_as_typed() -> None:
    assert SearchDimension.parse("betas=(0.9,0.99),(0.8,0.9)").values == ((0.9, 0.99), (0.8, 0.9))
    assert SearchDimension.parse("act=relu,gelu").values == ("relu", "gelu")
    assert SearchDimension.parse("n=2:8").whole and SearchDimension.parse("lr=1e-5:1e-1:log").log
    with pytest.raises(FuseError, match="--trials"):
        grid([SearchDimension.parse("lr=0.1:0.2")])


def test_an_unknown_setting_is_refused_with_the_known_ones(job: str, tmp_path: Path) -> None:
    sweep = Sweep(
        _options(job, tmp_path / "out"), ListedTrials(grid(parse_settings(["lrr=1,2"])), tmp_path / "t.jsonl")
    )
    with pytest.raises(FuseError, match="weight_decay"):
        sweep.run()


def test_results_begin_as_running() -> None:
    assert TrialResult(0, {}).state == "running"


def test_a_short_sweep_measures_nothing_and_runs_a_plain_loop(job: str, tmp_path: Path) -> None:
    """Measuring took five times as long as what there was to train."""
    rates = [{"lr": 0.1}, {"lr": 0.01}]
    measured = Sweep(_options(job, tmp_path / "a", measure=True), ListedTrials(rates, tmp_path / "a.jsonl"))
    fused = Sweep(_options(job, tmp_path / "b"), ListedTrials(rates, tmp_path / "b.jsonl"))
    seen: list[str] = []
    measured.on_progress = lambda now: seen.append(now.activity)
    for one, other in zip(measured.run(), fused.run(), strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-9)
    assert not measured.choices
    assert seen[0] == "building trial 0" and seen[-1] == "training" and measured.stepped == 24
    assert measured.best is not None and measured.best.value == pytest.approx(_alone(measured, measured.best.number))
