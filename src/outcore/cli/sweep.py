"""`outcore sweep`: many configurations of a job, trained together."""

from __future__ import annotations

import json as json_module
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from outcore.cli.common.options import Arguments, Batch, Inputs, JobName, Json
from outcore.documents.folders import missing_folders, remove_empty

if TYPE_CHECKING:
    from outcore.fusion.sweep.sweep import Sweep

__all__ = ["sweep"]

_QUIET_S = 5.0
"""Seconds between two lines about progress, where there is no terminal to draw on."""


def sweep(
    job: JobName,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="NAME=VALUES", help="lr=1e-4,3e-4 or lr=1e-5:1e-1:log. Repeatable."),
    ] = None,
    inputs: Inputs = None,
    arguments: Arguments = None,
    batch: Batch = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="How many to try; else every combination.")
    ] = None,
    search: Annotated[str, typer.Option("--search", help="tpe, random or cmaes.")] = "tpe",
    pruner: Annotated[str, typer.Option("--pruner", help="none, asha, hyperband or median.")] = "none",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps of a configuration.")] = 100,
    interval: Annotated[
        int | None, typer.Option("--every", min=1, help="Steps between reports.", show_default="a tenth, 5 or more")
    ] = None,
    members: Annotated[int, typer.Option("--members", min=1, help="Configurations that train at the same time.")] = 16,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the results; an interrupted sweep goes on.")
    ] = Path("sweep"),
    device: Annotated[
        str | None, typer.Option("--device", help="cuda or cpu.", show_default="cuda if there is one")
    ] = None,
    amp: Annotated[bool, typer.Option("--amp", help="bfloat16 where torch.autocast allows it.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Try which way of running is fastest.")
    ] = True,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**32 - 1, help="Of the weights, the data and the search.")
    ] = 0,
    json: Json = False,
) -> None:
    """Train many configurations of a job together, one row per configuration.

    What is not an argument of the job's model() or optimizer() is set in the optimizer (lr, weight_decay, momentum, …);
    batch and seed vary the batch size and the first weights:

        outcore sweep job.py --set lr=1e-4,3e-4,1e-3 --set wd=0,1e-4
        outcore sweep job.py --set lr=1e-5:1e-1:log --trials 64 --pruner asha
    """
    from outcore.fusion.sweep.optuna_tuner import PRUNERS, SEARCHES, Tuner
    from outcore.fusion.sweep.space import grid, parse_settings
    from outcore.fusion.sweep.sweep import Sweep, SweepOptions
    from outcore.fusion.sweep.trials import ListedTrials, TrialSource
    from outcore.run.engine.setup import choose_device

    for value, allowed, hint in ((search, SEARCHES, "--search"), (pruner, PRUNERS, "--pruner")):
        if value not in allowed:
            raise typer.BadParameter(f"must be one of {', '.join(allowed)}, not {value}", param_hint=hint)
    where = choose_device(device)
    wanted = parse_settings(settings or [])
    every = interval or min(steps, max(5, steps // 10))
    options = SweepOptions(
        job,
        output,
        tuple(inputs or ()),
        tuple(arguments or ()),
        batch,
        steps,
        every,
        members,
        device=device or where.type,
        amp=amp,
        measure=measure,
        seed=seed,
    )
    made = missing_folders(output)
    output.mkdir(parents=True, exist_ok=True)
    study = output / "study.db"
    begun = study.exists()
    source: TrialSource
    running: Sweep | None = None
    try:
        count = trials or len(grid(wanted))
        if trials is None and pruner == "none":
            source = ListedTrials(grid(wanted), output / "trials.jsonl")
        else:
            source = Tuner(
                wanted, output, trials=count, search=search, pruner=pruner, interval=every, steps=steps, seed=seed
            )
        running = Sweep(options, source)
        console = Console(stderr=json)
        _run(running, console, count * steps, live=sys.stdout.isatty() and not json)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; run the same command again to go on with {output}", err=True)
        raise typer.Exit(130) from None
    finally:
        if not begun and (running is None or not running.stepped):  # a study in which nothing was tried
            study.unlink(missing_ok=True)
        remove_empty(made)
    if json:
        rows = [asdict(r) for r in sorted(running.results.values(), key=lambda r: r.number)]
        best = running.best.number if running.best else None
        typer.echo(json_module.dumps({"results": rows, "best": best, "speedup": running.achieved()}))
        return
    _conclude(running, console)


def _run(running: Sweep, console: Console, total: int, *, live: bool) -> None:
    """Run, and show what is being done: from the first second on, and at most a few times in each."""
    said, begun, last_line_s, stated = 0, time.monotonic(), 0.0, ""
    quiet_s = 0.25 if live else _QUIET_S

    def change(now: Sweep) -> None:
        nonlocal said, stated
        for choice in now.choices[said:]:
            console.print(str(choice), highlight=False, markup=False)
        said = len(now.choices)
        if shown is not None:
            shown.update(Group(_table(now), _activity(now, total, begun)))
        else:
            states = [r.state for r in now.results.values()]
            counts = ", ".join(
                f"{states.count(s)} {s}" for s in ("complete", "pruned", "diverged", "running") if s in states
            )
            best = (
                f"; best {now.best.value:.4g} (trial {now.best.number})"
                if now.best and now.best.value is not None
                else ""
            )
            if (line := f"{counts}{best}") != stated:
                stated = line
                console.print(line, highlight=False, markup=False)

    def progress(now: Sweep) -> None:
        nonlocal last_line_s
        if time.monotonic() - last_line_s >= quiet_s:
            last_line_s = time.monotonic()
            if shown is not None:
                shown.update(Group(_table(now), _activity(now, total, begun)))
            else:
                console.print(_activity(now, total, begun), highlight=False, markup=False)

    shown: Live | None = None
    running.on_change, running.on_progress = change, progress
    if live:
        with Live(console=console, refresh_per_second=4) as shown:
            running.run()
            shown.update(_table(running))
    else:
        running.run()


def _activity(now: Sweep, total: int, begun: float) -> str:
    """What is being done, how much of it is done, and how long the rest will take."""
    if not now.stepped:
        return now.activity
    rate = now.stepped / (time.monotonic() - begun)
    left = max(0, total - now.stepped) / rate
    time_left = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
    return f"{now.activity}: {now.stepped:,} of {total:,} steps, {time_left} left at most"


def _table(running: Sweep, limit: int = 40) -> Table:
    names = list(dict.fromkeys(k for r in running.results.values() for k in r.settings))
    table = Table("trial", *names, "state", "steps", "loss")
    order = sorted(
        running.results.values(), key=lambda r: (r.state == "diverged", r.value if r.value is not None else 1e30)
    )
    for result in order[:limit]:
        row = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in (result.settings.get(n, "") for n in names)]
        loss = "" if result.value is None else f"{result.value:.5g}"
        table.add_row(str(result.number), *row, result.state, str(result.steps), loss)
    if len(order) > limit:
        table.caption = f"and {len(order) - limit} more in {running.options.directory / 'results.csv'}"
    return table


def _conclude(running: Sweep, console: Console) -> None:
    console.print(_table(running))
    if (achieved := running.achieved()) is not None:
        said = f"{running.member_steps} steps in {running.seconds:.1f} s"
        if all(choice.speedup <= 1 for choice in running.choices):  # nothing was fused, so there is nothing to compare
            said += ", one configuration after the other"
        else:
            predicted = sum(c.speedup for c in running.choices) / len(running.choices)
            said += (
                f": {achieved:.2f}x over one after the other, {predicted:.2f}x predicted (judging and refilling are "
            )
            said += "in the first, not in the second)"
        console.print(said, highlight=False)
    if running.best is not None:
        where = running.options.directory
        console.print(f"best: trial {running.best.number}, weights in {where / 'best.safetensors'}", highlight=False)
    for name in ("results.csv", "curves.svg"):
        console.print(f"wrote {running.options.directory / name}", highlight=False, soft_wrap=True)
