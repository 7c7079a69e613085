"""`outcore infer`: a trained network on an image of any size, within a budget."""

from __future__ import annotations

import csv
import json as json_module
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from outcore.cli.options import Arguments, JobName, Json
from outcore.errors import JobError
from outcore.job import Job

__all__ = ["infer"]


def infer(
    job: JobName,
    data: Annotated[Path, typer.Option("--data", help="Slide, image, array or volume.", show_default=False)],
    weights: Annotated[
        Path | None, typer.Option("--weights", "-w", help="A run's folder, a checkpoint, or a .safetensors file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="For a map .tif, .zarr or .npy; for classes .csv.")
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", "-m", help="The most the device may hold.", show_default=True)
    ] = "2GiB",
    level: Annotated[
        int | None, typer.Option("--level", min=0, help="Level of the slide.", show_default="the run's, or 0")
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Write the numbers, not the class of each pixel.")] = False,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Allow further passes for norms and pools over the whole image.")
    ] = False,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.", show_default="a GPU if any")] = None,
    workers: Annotated[int, typer.Option("--workers", min=0, help="Threads that read ahead.")] = 2,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", help="Shape of an input of package.module:Class.")
    ] = None,
    arguments: Arguments = None,
    json: Json = False,
) -> None:
    """Run a network on a whole slide, tile by tile, without seams: the result is that of the untiled network.

    A network whose output is a map writes one, pyramidal as TIFF; one that gives classes writes a row:

        outcore infer job.py --weights runs/first --data slide.tif -o mask.tif

    With the folder of a run come its best weights, the arguments of its model and how it prepared its images (level,
    mean and std); with other weights --arg and --level say it.
    """
    import torch

    from outcore.graph import capture
    from outcore.run.setup import choose_device
    from outcore.stream import plan_tiles, stream
    from outcore.train.config import DataConfig
    from outcore.train.trained import Trained, read_image

    where = choose_device(device)
    trained = Trained.read(weights) if weights is not None else None
    seen = trained.data if trained is not None else DataConfig()
    if level is not None:
        seen = replace(seen, level=level, microns_per_pixel=None)
    # The image says what the input is; a class asks for a shape only to make batches, and none is made here.
    shapes = inputs or (("1x1",) if ":" in job and not Path(job).exists() else ())
    given = (*(trained.arguments if trained is not None else ()), *(arguments or ()))
    model = Job.load(job, inputs=shapes, arguments=given).build().to(where).eval()
    if trained is not None:
        trained.load_into(model)
    image = read_image(data, seen)
    graph = capture(model, [torch.empty(image.shape, device="meta")])
    dense = stream(model, tile=1 << 40, statistics=statistics).is_map(image)
    plan = plan_tiles(graph, memory=memory, training=False, statistics=statistics, dense=dense)
    streamed = plan.apply(model, workers=workers)
    console = Console(stderr=True)
    if not json:
        console.print(f"{data}: {' x '.join(map(str, image.shape[:0:-1]))} px; {plan}", highlight=False)
    start = time.perf_counter()
    with torch.no_grad():
        if dense:
            row = _map(streamed, image, output or data.with_suffix(".mask.tif"), scores, quiet=json)
        else:
            row = _row(streamed(image), data, output)
    row |= {"data": str(data), "time_s": time.perf_counter() - start, "predicted_bytes": plan.peak_bytes}
    if json:
        typer.echo(json_module.dumps(row))
    else:
        typer.echo(row.get("output") or f"class {row['class']}: {row['scores']}")


def _map(streamed: Any, image: Any, path: Path, scores: bool, *, quiet: bool) -> dict[str, Any]:
    import numpy as np

    from outcore.stream.map_writer import MapWriter

    prepared = streamed.prepare(image)
    _, channels, *pixels = prepared.network.shapes[prepared.graph.outputs[0]]
    classes = channels > 1 and not scores
    shape = tuple(pixels) if classes else (channels, *pixels)
    kind = np.dtype("uint8" if classes and channels <= 256 else "int32" if classes else "float32")
    if path.suffix.lower() in (".tif", ".tiff") and not classes and channels == 1:
        shape = tuple(pixels)
    with (
        Progress(console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar,
        MapWriter(path, shape, kind) as writer,
    ):
        task = bar.add_task("tiles", total=len(prepared.grids[-1]))
        for region, part in streamed.tiles(image):
            flat = part[0].argmax(0) if classes else part[0].float()
            if flat.dim() > len(shape):
                flat = flat[0]
            writer.write(region[2:] if flat.dim() == len(pixels) else ((0, channels), *region[2:]), flat)
            bar.advance(task)
    return {"output": str(path), "shape": list(shape), "classes": classes}


def _row(result: Any, data: Path, output: Path | None) -> dict[str, Any]:
    import torch

    if not isinstance(result, torch.Tensor):
        raise JobError(f"the model returned {type(result).__name__}; infer writes one tensor, a map or class scores")
    numbers = result.float().flatten().tolist()
    row: dict[str, Any] = {"class": int(result.flatten().argmax()), "scores": [round(n, 6) for n in numbers]}
    if output is not None:
        with output.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["path", "class", *(f"score{i}" for i in range(len(numbers)))])
            writer.writerow([str(data), row["class"], *row["scores"]])
        row["output"] = str(output)
    return row
