"""`outcore infer`: a trained network on slides of any size, within a budget."""

from __future__ import annotations

import csv
import io
import json as json_module
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outcore.cli.common.options import Arguments, Inputs, JobName, Json
from outcore.errors import DataError, FullDiskError, JobError, MissingPackageError, OutcoreError

if TYPE_CHECKING:
    from outcore.infer import ResultsFolder, SlideRunner
    from outcore.infer.runner import Opened
    from outcore.infer.slides import SlideInput

__all__ = ["infer"]

_ENDINGS = (".tif", ".tiff", ".zarr", ".npy", ".csv")


def infer(
    job: JobName,
    data: Annotated[
        Path,
        typer.Option("--data", help="Slide, image, array or volume; or a table or folder of them.", show_default=False),
    ],
    weights: Annotated[
        Path | None, typer.Option("--weights", "-w", help="A run's folder, a checkpoint, or a .safetensors file.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="For a map .tif, .zarr or .npy; for classes .csv; a folder for several."),
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", "-m", help="The most the device may hold.", show_default=True)
    ] = "2GiB",
    level: Annotated[
        int | None, typer.Option("--level", min=0, help="Level of the slide.", show_default="the run's, or 0")
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Write the numbers, not the class of each pixel.")] = False,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Write the probability of each class, not the class.")
    ] = False,
    heat: Annotated[
        str | None, typer.Option("--heat", metavar="CLASS", help="Also write a map of the probability of a class.")
    ] = None,
    overlay: Annotated[bool, typer.Option(help="Write a small picture of the slide with its mask.")] = True,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            help="Which output, of a model that returns several: its name or number.",
            show_default="the run's",
        ),
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="Names: benign,malignant.", show_default="the run's")
    ] = None,
    untrained: Annotated[bool, typer.Option("--untrained", help="Run without weights, to try something.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace outputs that exist.")] = False,
    on_damage: Annotated[
        str | None, typer.Option("--on-damage", help="raise, or white: read damaged tiles as glass.")
    ] = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Allow further passes for norms and pools over the whole image.")
    ] = False,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.", show_default="a GPU if any")] = None,
    workers: Annotated[int, typer.Option("--workers", min=0, max=64, help="Threads that read ahead.")] = 2,
    inputs: Inputs = None,
    arguments: Arguments = None,
    json: Json = False,
) -> None:
    """Run a network on a whole slide, tile by tile, without seams: the result is that of the untiled network.

    A network whose output is a map writes one, pyramidal as TIFF; one that gives classes writes a row:

        outcore infer job.py --weights runs/first --data slide.tif -o mask.tif

    With the folder of a run come its best weights, the arguments of its model, the names of its classes and how it
    prepared its images (level, mean and std); with other weights --arg, --classes and --level say it.

    A table (a column path) or a folder of slides writes results.csv and its maps into a folder:

        outcore infer job.py --weights runs/first --data slides.csv -o results

    Nothing that exists is replaced unless --overwrite is said, and nothing is there under its name until it is
    complete. The same command again goes on where an interrupted one stopped.
    """
    from outcore.infer import SlideRunner, load_network
    from outcore.infer.process_memory import give_back_freed
    from outcore.infer.slides import holds_several
    from outcore.run.engine.setup import choose_device

    if scores and probabilities:
        raise DataError("--scores and --probabilities contradict each other; leave out one")
    if on_damage not in (None, "raise", "white"):
        raise DataError(f"--on-damage {on_damage} is not known; say raise or white")
    values = "scores" if scores else "probabilities" if probabilities else "classes"
    written = _Written(cast(Any, values), heat, overlay, overwrite, json)
    _check_paths(data, output, weights, job, overwrite, several=holds_several(data))
    give_back_freed()
    network = load_network(
        job,
        weights=weights,
        untrained=untrained,
        arguments=arguments or (),
        inputs=inputs or (),
        level=level,
        classes=tuple(name.strip() for name in classes.split(",")) if classes else (),
        key=key,
        device=choose_device(device),
    )
    damage = on_damage or network.data.on_damage
    runner = SlideRunner(network, memory, statistics, workers, cast(Literal["raise", "white"], damage))
    if holds_several(data):
        assert output is not None
        _many(runner, data, output, written)
    else:
        _one(runner, data, output, written)


class _Written:
    """What is written, and how it is reported."""

    def __init__(self, values: Any, heat: str | None, overlay: bool, overwrite: bool, json: bool) -> None:
        self.values, self.heat, self.overlay, self.overwrite, self.json = values, heat, overlay, overwrite, json

    def outputs(self, path: Path) -> Any:
        from outcore.infer import MapOutputs
        from outcore.infer.partial import check_free

        made = MapOutputs(path, self.values, self.heat, self.overlay and self.values == "classes")
        for each in made.paths():
            check_free(each, overwrite=self.overwrite)
        return made


def _check_paths(
    data: Path, output: Path | None, weights: Path | None, job: str, overwrite: bool, *, several: bool
) -> None:
    """Check the paths before anything is loaded."""
    from outcore.infer import find_slides
    from outcore.infer.partial import check_free, check_not_read

    if not data.exists():
        raise DataError(f"no file {data}; give the path of a slide, or of a table or folder of slides")
    if several:
        find_slides(data)  # one that holds none is refused for that
    if several and output is None:
        raise DataError(f"{data} holds several slides; say a folder for their results: -o results")
    if several and output is not None and output.suffix.lower() in _ENDINGS and not output.is_dir():
        raise DataError(
            f"{data} holds several slides, and -o {output} is the name of one file; say a folder, in which the table "
            f"is results.csv: -o {output.with_suffix('')}"
        )
    if output is not None:
        check_not_read(output, [data, *([weights] if weights is not None else []), *([Path(job)] if job else [])])
        if not several:
            if output.suffix.lower() not in _ENDINGS:
                raise DataError(
                    f"-o {output}: a map is written as .tif, .zarr or .npy, classes as .csv, not as "
                    f"{output.suffix or 'a name without an ending'}"
                )
            check_free(output, overwrite=overwrite)


def _one(runner: SlideRunner, data: Path, output: Path | None, written: _Written) -> None:
    opened = runner.open(data)
    if not opened.fitted.is_map and output is not None and output.suffix.lower() != ".csv":
        raise DataError(f"the network gives classes, not a map; they are written as .csv, not {output.name}")
    if not written.json:
        Console(stderr=True).print(str(opened), highlight=False, markup=False, soft_wrap=True)
    with _interruptible("the same command goes on from there", written.json):
        row = _run(runner, opened, output or data.with_suffix(".mask.tif"), written)
    if not opened.fitted.is_map and output is not None:
        _write_row(row, data, output)
    if written.json:
        typer.echo(json_module.dumps(row))
        return
    for name in ("output", "heat", "overlay"):
        if name in row:
            typer.echo(f"wrote {row[name]}")
    if not opened.fitted.is_map:
        typer.echo(classes_text(row))
    if runner.network.device.type == "cpu" and row["process_bytes"] is not None:
        typer.echo(_held(row, runner.memory), err=True)


def classes_text(row: dict[str, Any], most: int = 5) -> str:
    """The class of a slide with the likeliest classes by name.

    >>> classes_text({"class": 1, "names": ["0", "1"], "scores": [0, 2], "probabilities": [0.1192, 0.8808]})
    'class 1: probability 0.8808 of 1, 0.1192 of 0; scores 2, 0'
    """
    named = f" ({row['name']})" if "name" in row and row["name"] != str(row["class"]) else ""
    if len(row["scores"]) == 1:  # a logit, or a value: which, only the user knows
        score, share = row["scores"][0], row["probabilities"][0]
        return f"class {row['class']}{named}: score {score:.6g}, as a logit probability {share:.4g}"
    found = sorted(zip(row["probabilities"], row["scores"], row["names"], strict=True), key=lambda one: -one[0])
    likely = ", ".join(f"{share:.4g} of {name}" for share, _, name in found[:most])
    scores = ", ".join(f"{score:.6g}" for _, score, _ in found[:most])
    rest = f" (the first {most} of {len(found)} classes; -o NAME.csv writes all)" if len(found) > most else ""
    return f"class {row['class']}{named}: probability {likely}; scores {scores}{rest}"


def _held(row: dict[str, Any], memory: str) -> str:
    from outcore.machine.units import format_bytes, parse_bytes

    peak, before = row["process_bytes"], row["process_bytes_before"] or 0
    grown, predicted = (format_bytes(n) for n in (max(0, peak - before), row["predicted_bytes"]))
    over = peak - before - parse_bytes(memory)
    more = (
        f"; {format_bytes(over)} more than --memory are Python's, torch's and the allocator's own" if over > 0 else ""
    )
    return f"the process held {grown} above the {format_bytes(before)} it began with; predicted were {predicted}{more}"


def _run(runner: SlideRunner, opened: Opened, path: Path, written: _Written) -> dict[str, Any]:
    """One slide, with a bar for its tiles on a terminal."""
    if written.heat is not None and not opened.fitted.is_map:
        raise JobError(f"--heat {written.heat} is drawn of maps, and this network gives classes; leave it out")
    quiet = written.json or not sys.stderr.isatty()
    with _bar(quiet) as bar:
        task = bar.add_task(escape(opened.path.name), total=None)
        return runner.run(
            opened, lambda: written.outputs(path), lambda done, total: bar.update(task, completed=done, total=total)
        )


def _bar(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)


@contextmanager
def _interruptible(said: str, quiet: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if not quiet:
            typer.echo(f"stopped; what was done is kept, {said}", err=True)
        raise


def _write_row(row: dict[str, Any], data: Path, output: Path) -> None:
    """A table of one row."""
    from outcore.infer.results import replace_text, result_row
    from outcore.infer.slides import SlideInput

    text = io.StringIO()
    found = result_row(SlideInput(data, str(data), data.stem), row)
    writer = csv.DictWriter(text, list(found), lineterminator="\n")
    writer.writeheader()
    writer.writerow(found)
    replace_text(output, text.getvalue())
    row["output"] = str(output)


def _many(runner: SlideRunner, data: Path, output: Path, written: _Written) -> None:
    from outcore.infer import ResultsFolder, find_slides
    from outcore.infer.partial import check_not_read

    slides = find_slides(data)
    check_not_read(output, [slide.path for slide in slides[:1]])
    about = runner.describe() | {"values": written.values, "heat": written.heat, "key": runner.network.key}
    with (
        ResultsFolder(output, about, written.overwrite) as folder,
        _interruptible("the same command goes on", written.json),
    ):
        before = sum(slide.given in folder.done for slide in slides)
        if before and not written.json:
            typer.echo(f"{before} of {len(slides)} slides are done already", err=True)
        failed = sum(not _try(runner, slide, folder, written, n, len(slides)) for n, slide in _numbered(folder, slides))
    said = {"slides": len(slides), "from_before": before, "failed": failed, "output": str(output / "results.csv")}
    if written.json:
        typer.echo(json_module.dumps(said))
    else:
        where = output / "results.csv"
        said_of = f"{where} has" if before == len(slides) else f"wrote {where}:"
        typer.echo(f"{said_of} {len(slides) - failed} of {len(slides)} slides")
    if failed:
        raise DataError(
            f"{failed} of {len(slides)} slides could not be run; the reasons are in {output / 'failed.csv'}"
        )


def _numbered(folder: ResultsFolder, slides: list[SlideInput]) -> Iterator[tuple[str, SlideInput]]:
    """The slides that are left, each with its number and the time left, once two are done: the first prepares."""
    left, start = list(folder.left(slides)), time.monotonic()
    for number, slide in enumerate(left):
        if number == 1:
            start = time.monotonic()
        rest = (time.monotonic() - start) / (number - 1) * (len(left) - number) if number > 1 else None
        remaining = "" if rest is None else f", about {_duration(max(rest, 1.0))} left"
        yield f"{len(slides) - len(left) + number + 1} of {len(slides)}{remaining}", slide


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def _try(
    runner: SlideRunner, slide: SlideInput, folder: ResultsFolder, written: _Written, number: str, total: int
) -> bool:
    """One slide of several; whether it could be run."""
    from outcore.infer.results import result_row

    if not written.json:
        Console(stderr=True).print(f"{slide.given} ({number})", highlight=False, markup=False, soft_wrap=True)
    try:
        row = _run(runner, runner.open(slide.path), folder.path / f"{slide.name}.mask.tif", written)
    except (JobError, MissingPackageError, FullDiskError):  # the next slide would fare no better
        raise
    except (OutcoreError, OSError) as error:
        folder.fail(slide, str(error))
        if not written.json:
            Console(stderr=True).print(f"  failed: {error}", highlight=False, markup=False, soft_wrap=True)
        return False
    folder.add(result_row(slide, row))
    return True
