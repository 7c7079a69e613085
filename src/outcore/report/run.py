"""The report of a training run: its folder, read back, as a part of the page's bundle.

Only files are read (JSON, CSV, YAML as text), so a report can be made of a run that is going on, was killed, or came
from another machine. Long series are thinned to what a picture can show, keeping the lowest and the highest value of
every stretch, so that no spike is lost.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError
from outcore.graph.graph import Graph
from outcore.report.bundle import FORMAT, bundle
from outcore.report.evaluation import evaluate
from outcore.report.evaluation_svg import confusion_svg, curves_svg

__all__ = ["read_run", "run_bundle", "thin"]

MOST_POINTS = 600
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
    made = bundle(Graph.from_json(json.loads(graph.read_text())), title=title)
    return {**made, "run": run}


def read_run(folder: Path) -> dict[str, Any]:
    """Everything a run left behind, as plain values."""
    facts_file = folder / "run.json"
    if not facts_file.is_file():
        raise OutcoreError(f"{folder} holds no run; a run is made by: outcore train JOB --out {folder}")
    facts = json.loads(facts_file.read_text())
    plan = folder / "plan.json"
    config, timeline = folder / "config.yaml", folder / "timeline.svg"
    return {
        **facts,
        "steps": _columns(folder / "steps.csv", thinned="loss"),
        "epochs": _columns(folder / "epochs.csv"),
        "plan": json.loads(plan.read_text()) if plan.is_file() else None,
        "config": config.read_text() if config.is_file() else "",
        "timeline": timeline.read_text() if timeline.is_file() else None,
        "evaluation": _evaluation(folder, facts.get("classes") or ()),
    }


def _evaluation(folder: Path, classes: Sequence[str]) -> dict[str, Any] | None:
    """How well the best epoch does, with its pictures; None where there are no predictions for single examples."""
    if not (folder / "predictions.csv").is_file() or (found := evaluate(folder / "predictions.csv", classes)) is None:
        return None
    wrong = [e for e in found.examples if not e["right"]][:SHOWN_SLIDES]
    return found.to_json() | {
        "thumbnails": {e["example"]: small for e in wrong if (small := _thumbnail(folder, e["example"])) is not None},
        "pictures": {
            "confusion": confusion_svg(found),
            "roc": curves_svg(found.roc, kind="roc"),
            "precision and recall": curves_svg(found.precision_recall, kind="pr"),
        },
    }


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
    with path.open(newline="") as file:
        rows: list[Mapping[str, str | None]] = list(csv.DictReader(file))
    if not rows:
        return {}
    columns = {name: [_number(row.get(name)) for row in rows] for name in rows[0]}
    if thinned in columns:
        kept = thin(range(len(rows)), columns[thinned])
        columns = {name: [values[i] for i in kept] for name, values in columns.items()}
    return columns


def _number(cell: str | None) -> float | None:
    try:
        value = float(cell or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
