"""The report of a training run: its folder, read back, as a part of the page's bundle.

Only files are read (JSON, CSV, YAML as text), so a report can be made of a run that is going on, was killed, or came
from another machine. Long series are thinned to what a picture can show, keeping the lowest and the highest value of
every stretch, so that no spike is lost.
"""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.documents.reading import read_json, read_text
from outcore.documents.schema import ListOf, MapOf, Maybe, Number, Record, Text
from outcore.errors import OutcoreError
from outcore.graph.graph import Graph
from outcore.report.bundle import FORMAT, bundle
from outcore.report.evaluation import evaluate
from outcore.report.evaluation_svg import confusion_svg, curves_svg

__all__ = ["read_run", "run_bundle", "thin"]

MOST_POINTS = 600
_FACTS = Record(
    may={
        "ended": Maybe(Text()),
        "error": Maybe(Text()),
        "position": Maybe(MapOf()),
        "time_s": Maybe(Number()),
        "classes": Maybe(ListOf(Text())),
    },
    open=True,
)
"""What the page reads of ``run.json`` without asking what it is."""
SHOWN_SLIDES = 12
"""Slides that are shown with a picture."""


def run_bundle(folder: Path) -> dict[str, Any]:
    """The bundle of a run's page.

    Raises:
        OutcoreError: the folder holds no run.
    """
    run = read_run(folder)
    title = f"Run {folder.resolve().parent.name}/{folder.resolve().name}"
    graph = folder / "graph.json"
    if not graph.is_file():
        return {"format": FORMAT, "title": title, "run": run}
    made = bundle(Graph.load(graph), title=title)
    return {**made, "run": run}


def read_run(folder: Path, *, evaluation: bool = True) -> dict[str, Any]:
    """Everything a run left behind, as plain values; `evaluation` of its predictions takes longest, and can wait."""
    facts_file = folder / "run.json"
    if not facts_file.is_file():
        raise OutcoreError(f"{folder} holds no run; a run is made by: outcore train JOB --out {folder}")
    facts = read_json(facts_file, _FACTS, OutcoreError)
    plan = folder / "plan.json"
    config, timeline = folder / "config.yaml", folder / "timeline.svg"
    return {
        **facts,
        "steps": _columns(folder / "steps.csv", thinned="loss"),
        "epochs": _columns(folder / "epochs.csv"),
        "plan": read_json(plan, MapOf(), OutcoreError) if plan.is_file() else None,
        "config": read_text(config, OutcoreError, "YAML") if config.is_file() else "",
        "timeline": read_text(timeline, OutcoreError, "SVG") if timeline.is_file() else None,
        "evaluation": _evaluation(folder, facts.get("classes") or ()) if evaluation else None,
        "maps": _maps(folder) if evaluation else None,
    }


def _evaluation(folder: Path, classes: Sequence[str]) -> dict[str, Any] | None:
    """How well the best epoch does, with its pictures; None where there are no predictions for single examples."""
    if not (folder / "predictions.csv").is_file() or (found := evaluate(folder / "predictions.csv", classes)) is None:
        return None
    wrong = [e for e in found.examples if not e["right"]][:SHOWN_SLIDES]
    pictures = {"confusion": confusion_svg(found)}
    if any(not math.isnan(curve.area) for curve in found.roc):  # there is none where all are of one class
        pictures["roc"] = curves_svg(found.roc, kind="roc")
        pictures["precision and recall"] = curves_svg(found.precision_recall, kind="pr")
    return found.to_json() | {
        "thumbnails": {e["example"]: small for e in wrong if (small := _thumbnail(folder, e["example"])) is not None},
        "pictures": pictures,
    }


def _maps(folder: Path) -> dict[str, Any] | None:
    """How well the map of each example agrees with its mask, the worst first; None where there are no maps."""
    path = folder / "maps.csv"
    if not path.is_file():
        return None
    text = read_text(path, OutcoreError, "figures of maps")
    examples: list[dict[str, Any]] = []
    for row in csv.DictReader(io.StringIO(text, newline="")):
        dice, right = _number(row.get("dice") or ""), _number(row.get("accuracy") or "")
        shown = [None if math.isnan(v) else v for v in (dice, right)]
        examples.append({"example": str(row.get("example") or ""), "dice": shown[0], "accuracy": shown[1]})
    examples.sort(key=lambda e: 2.0 if e["dice"] is None else e["dice"])
    worst = [e["example"] for e in examples[:SHOWN_SLIDES]]
    small = {name: picture for name in worst if (picture := _thumbnail(folder, name)) is not None}
    return {"examples": examples, "thumbnails": small}


def _thumbnail(folder: Path, example: str) -> str | None:
    """A slide that is still where it was, seen from here or from beside the run."""
    places = (Path(example), folder / example, folder.parent / example, folder.parent.parent / example)
    path = next((p for p in places if p.is_file()), None)
    if path is None:
        return None
    from outcore.report.thumbnails import thumbnail

    return thumbnail(path)


def thin(x: Sequence[float], y: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Which points to keep of a long series: first and last, and the lowest and highest of every stretch.

    >>> thin(range(8), [0, 9, 0, 0, -5, 0, 0, 0], most=4)
    [0, 1, 4, 5, 7]
    """
    if len(x) <= most:
        return list(range(len(x)))
    stretch = math.ceil(2 * len(x) / most)
    kept = {0, len(x) - 1}
    for start in range(0, len(x), stretch):
        known = [i for i in range(start, min(start + stretch, len(x))) if y[i] is not None]
        if known:
            kept |= {min(known, key=lambda i: y[i]), max(known, key=lambda i: y[i])}  # type: ignore[arg-type, return-value]
    return sorted(kept)


def _columns(path: Path, thinned: str | None = None) -> dict[str, list[float | None]]:
    """A CSV file of numbers by column; empty cells and what is not finite are None."""
    if not path.is_file():
        return {}
    numbers: dict[str, array[float]] = {}
    count = 0
    try:
        # Row by row, eight bytes a cell: the log of a day has millions of rows.
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            numbers = {name: array("d") for name in next(rows, [])}
            for row in rows:
                count += 1
                for place, column in enumerate(numbers.values()):
                    column.append(_number(row[place]) if place < len(row) else math.nan)
    except (csv.Error, UnicodeDecodeError) as error:
        raise OutcoreError(f"{path} is no table of numbers: {error}") from None
    if not count:
        return {}
    kept: Sequence[int] = range(count)
    if thinned in numbers:
        kept = thin(kept, [None if math.isnan(n) else n for n in numbers[thinned]])
    return {name: [None if math.isnan(values[i]) else values[i] for i in kept] for name, values in numbers.items()}


def _number(cell: str) -> float:
    """A cell, not a number where it is none or not finite."""
    try:
        value = float(cell or "nan")
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
