"""Whatever a file holds in place of a saved graph, costs, calibration, timeline or run, the answer is one sentence."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.costs import Costs
from outcore.cost.predicted.calibration import Calibration
from outcore.errors import OutcoreError
from outcore.graph.graph import Graph
from outcore.program import Program, Stages, Timeline, compile_program, simulate
from outcore.report.run import run_bundle
from outcore.scan.choice import Choices, ScanTiming

WRONG: tuple[Any, ...] = (None, True, -1, 3.5, "word", [], [[]], {}, {"a": 1}, 10**400, "\x00", [None])
INPUT = [(2, 3, 8, 8)]


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def write_graph(path: Path) -> None:
    outcore.capture(net(), INPUT).save(path)


def write_costs(path: Path) -> None:
    outcore.measure(outcore.capture(net(), [torch.rand(2, 3, 8, 8)])).save(path)


def write_calibration(path: Path) -> None:
    whole = Calibration.shipped("NVIDIA H200", "tf32")
    assert whole is not None
    document = whole.to_json()
    first = dict(list(document["models"].items())[:2])  # the whole of it is megabytes
    path.write_text(json.dumps(document | {"models": first, "usage": {}}))


def write_program(path: Path) -> None:
    compile_program(Stages.uniform(2, saved_bytes=100), "gpipe", micro_batches=2).save(path)


def write_timeline(path: Path) -> None:
    network = Stages.uniform(2, saved_bytes=100)
    simulate(compile_program(network, "gpipe", micro_batches=2), network).save(path)


def write_choices(path: Path) -> None:
    made = Choices()
    made.timings["rnn 4"] = ScanTiming(0.1, 0.2, 0.3)
    made.save(path)


READERS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any]]] = {
    "graph": (write_graph, Graph.load),
    "costs": (write_costs, Costs.load),
    "calibration": (write_calibration, Calibration.load),
    "program": (write_program, Program.load),
    "timeline": (write_timeline, Timeline.load),
    "choices": (write_choices, lambda path: Choices().load(path)),
}


def places(value: Any, found: list[tuple[Any, ...]], here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Everywhere in a document."""
    found.append(here)
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        places(inner, found, (*here, name))
    return found


def changed(document: Any, place: tuple[Any, ...], wrong: Any, gone: bool) -> Any:
    if not place:
        return wrong
    made = copy.deepcopy(document)
    inside = made
    for name in place[:-1]:
        inside = inside[name]
    if gone:
        del inside[place[-1]]
    else:
        inside[place[-1]] = wrong
    return made


@pytest.mark.parametrize("kind", READERS)
def test_what_is_saved_is_read_and_what_was_changed_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    write, read = READERS[kind]
    path = tmp_path / f"{kind}.json"
    write(path)
    read(path)
    document, drawn = json.loads(path.read_text()), random.Random(7)
    everywhere, refused = places(document, []), 0
    for number in range(150):
        # Each name at the top first, then anywhere.
        top = [place for place in everywhere if len(place) <= 1]
        place = top[number] if number < len(top) else drawn.choice(everywhere)
        path.write_text(json.dumps(changed(document, place, drawn.choice(WRONG), drawn.random() < 0.2)))
        try:
            read(path)
        except OutcoreError as error:
            refused += 1
            assert kind in str(error) and "\n" not in str(error)
    print(f"{kind}: {refused} of 150 changed documents refused")
    assert refused > 30


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n", b"[1, 2", b"[]", b"null", b"[" * 100_000, b'{"format": 1}'])
def test_bytes_that_are_no_document_are_refused(tmp_path: Path, kind: str, content: bytes) -> None:
    path = tmp_path / f"{kind}.json"
    path.write_bytes(content)
    with pytest.raises(OutcoreError, match=kind):
        READERS[kind][1](path)
    with pytest.raises(OutcoreError, match="folder"):
        READERS[kind][1](tmp_path)
    with pytest.raises(OutcoreError, match="no file"):
        READERS[kind][1](tmp_path / "gone.json")


def test_a_calibration_that_is_cut_off_or_explodes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json.gz"
    write_calibration(tmp_path / "c.json")
    whole = gzip.compress((tmp_path / "c.json").read_bytes())
    path.write_bytes(whole)
    Calibration.load(path)
    for content in (whole[: len(whole) // 2], b"no gzip", gzip.compress(bytes(300 << 20))):
        path.write_bytes(content)
        with pytest.raises(OutcoreError, match=r"c\.json\.gz"):
            Calibration.load(path)


FACTS = {"ended": "finished", "classes": ["a", "b"], "position": {"epoch": 1}, "time_s": 2.0}
TABLE = "example,label,predicted,loss,p0,p1\na.tif,0,1,0.7,0.4,0.6\nb.tif,1,1,0.2,0.1,0.9\n"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run.json", b"[]"),
        ("run.json", b"\xff\xfe"),
        ("run.json", json.dumps(FACTS | {"classes": 3}).encode()),
        ("run.json", json.dumps(FACTS | {"classes": [1, 2]}).encode()),
        ("graph.json", b"{}"),
        ("graph.json", b'{"format": 1, "blocks": 4}'),
        ("plan.json", b"7"),
        ("config.yaml", b"\x00\x01"),
        ("steps.csv", b"loss\n\xff\n"),
        ("predictions.csv", b"label\n1\n"),
        ("predictions.csv", TABLE.replace("b.tif,1", "b.tif,5").encode()),
        ("predictions.csv", TABLE.replace("0.9", "nan").encode()),
        ("predictions.csv", TABLE.replace("0.2", "high").encode()),
        ("predictions.csv", TABLE[:-20].encode()),
        ("predictions.csv", b"\xff" + TABLE.encode()),
    ],
)
def test_a_report_of_a_damaged_run_names_the_file(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / "run.json").write_text(json.dumps(FACTS))
    (tmp_path / "predictions.csv").write_text(TABLE)
    assert run_bundle(tmp_path)["run"]["evaluation"] is not None
    (tmp_path / file).write_bytes(content)
    with pytest.raises(OutcoreError, match=file):
        run_bundle(tmp_path)
