"""What makes two runs the same experiment: fingerprints that go into every checkpoint and are compared on resuming.

Settings alone do not say it: the same command may find another network in the job, another loss, other classes in the
folder, images that were added, removed or changed. Of each a short fingerprint is kept:

| part | of what |
|---|---|
| network | the structure of the recorded graph, and the options of its layers (rates of dropout, slopes, strides) |
| loss | what it gives for made-up outputs, twice, and a micro-batch's targets: edits that change no number go unseen |
| classes | their names, in order |
| names, labels | of the table's files: which, and what they are called |
| contents | size and time of change of each file |

A difference is refused by name, or passed with `checkpoint.allow_changes=true`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.graph import Graph
from outcore.graph.record.recording import Ref, fill
from outcore.graph.structure import substitute
from outcore.train.examples.examples import OwnExamples, SlideExamples
from outcore.train.examples.supply import ExampleSupply

__all__ = ["changes", "describe"]

_MOST_NUMBERS = 1 << 22
"""Of an output; a larger one is not made up to try a loss."""


def describe(
    graph: Graph | None, model: nn.Module | None, loss: Callable[[Any, Any], Any], targets: Any, supply: ExampleSupply
) -> dict[str, Any]:
    """The fingerprints of a run; a part that cannot be known is None, and not compared."""
    network = None if graph is None or model is None else [graph.fingerprint, _digest(_options(model))]
    found: dict[str, Any] = {"network": network, "loss": None if graph is None else _loss(graph, loss, targets)}
    for name, examples in (("train", supply.train), ("validation", supply.validation)):
        if isinstance(examples, SlideExamples):
            rows = [examples.table.rows[examples._row(i)] for i in range(len(examples))]
            found[f"{name} files"] = len(rows)
            found[f"{name} names"] = _digest(Path(row.path).name for row in rows)
            found[f"{name} labels"] = _digest([_label(row.label), row.mask and Path(row.mask).name] for row in rows)
            found[f"{name} contents"] = _digest(_status(p) for row in rows for p in (row.path, row.mask) if p)
            found["classes"] = [str(one) for one in examples.table.classes]
        elif isinstance(examples, OwnExamples):
            found[f"{name} examples"] = len(examples)
    return found


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences, in words."""
    found = []
    for part in dict.fromkeys((*before, *now)):
        old, new = before.get(part), now.get(part)
        if part == "loss" and old is not None and new is not None:
            if not all(_close(a, b) for a, b in zip(old, new, strict=False)):
                found.append(f"another loss ({_short(old)} for the same output before, {_short(new)} now)")
        elif old is not None and new is not None and old != new:
            if part == "network":
                found.append("another network" if old[0] != new[0] else "other options of its layers")
            elif part == "classes":
                found.append(f"other classes ({', '.join(old)} before, {', '.join(new)} now)")
            elif part.endswith(("files", "examples")):
                found.append(f"{part}: {old} before, {new} now")
            else:
                found.append(f"{part} differ")
        elif (old is None) != (new is None) and part.endswith(("files", "examples")):
            found.append(f"{part}: {old or 'none'} before, {new or 'none'} now")
    return found


def _options(model: nn.Module) -> Iterable[Any]:
    """Numbers and words that a module keeps beside its parameters: what its layers were made with."""
    for path, module in model.named_modules():
        kept = {
            name: value if isinstance(value, (int, float, str)) else list(map(str, value))
            for name, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, tuple)) and not name.startswith("_") and name != "training"
        }
        yield [path, type(module).__name__, kept]


def _loss(graph: Graph, loss: Callable[[Any, Any], Any], targets: Any) -> list[float] | None:
    """What a loss gives for made-up outputs, structured as the network returns them; none if it gives nothing."""
    values = [graph.values[name] for name in graph.outputs]
    if graph.executable is None or not 0 < sum(torch.Size(v.shape).numel() for v in values) <= _MOST_NUMBERS:
        return None
    result, given = graph.executable[1].result, substitute(targets, torch.Tensor, torch.Tensor.cpu)
    found = []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for scale in (1.0, 3.0):
                torch.manual_seed(0)
                output = fill(result, partial(_made_up, graph, scale))
                found.append(float(loss(output, given)))
    except Exception:  # a loss that wants more than outputs of these shapes; the run itself will say what
        return None
    return found if all(number == number for number in found) else None


def _made_up(graph: Graph, scale: float, ref: Ref) -> torch.Tensor:
    """A tensor like a recorded one, of numbers between minus and plus a scale."""
    value = graph.values[ref.name]
    numbers = torch.arange(torch.Size(value.shape).numel(), dtype=torch.float64, device="cpu")
    made = scale * torch.sin(numbers).reshape(value.shape)
    return made.to(getattr(torch, value.dtype.removeprefix("torch.")))


def _close(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= 1e-4 * max(abs(a), abs(b))


def _short(numbers: list[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _label(label: Any) -> Any:
    return label if isinstance(label, (int, float, str, type(None))) else str(label)


def _status(path: Any) -> list[Any]:
    try:
        status = Path(path).stat()
    except OSError:
        return [Path(path).name, "gone"]
    return [Path(path).name, status.st_size if not Path(path).is_dir() else 0, int(status.st_mtime)]


def _digest(rows: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return found.hexdigest()[:16]
