"""Samples: measured times of operations, in a file that only grows.

One JSON line per measurement, written and flushed when it is made, so an interruption, a crash or an elapsed
time limit loses at most the line being written; the next run reads the file, skips what is there and goes on.
The first line says which device, torch and precision the rest belongs to, and a file of another kind is never
appended to.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outcore.cost.predicted.operation import Operation
from outcore.documents.schema import MapOf, Record, check
from outcore.documents.typed_schema import record_of
from outcore.errors import MachineError
from outcore.machine.clock import TimedRuns

VERSION = 1
_TIMING = record_of(TimedRuns)

Progress = Callable[[float, float, str], None]
"""Called as (seconds used, seconds allowed, the operation that comes next)."""

Timer = Callable[[Operation], TimedRuns]


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation and how long it took."""

    operation: Operation
    timing: TimedRuns


def measure_samples(
    operations: Iterable[Operation],
    timer: Timer,
    path: Path,
    *,
    about: dict[str, Any],
    seconds: float,
    most: int | None = None,
    progress: Progress | None = None,
) -> list[Sample]:
    """Measure operations until the time or the list ends, appending to `path`; returns all it then holds.

    Args:
        operations: what to measure, in this order.
        timer: measures one operation; one that raises `RuntimeError` (out of memory, not supported) is skipped.
        path: the samples file.
        about: what the file belongs to; must equal what an existing file says.
        seconds: no measurement starts later than this.
        most: stop once the file holds this many samples.
        progress: called before each measurement.
    """
    done = _open(path, about)
    kept = len(read_samples(path))
    start = time.monotonic()
    with path.open("a", encoding="utf-8") as file:
        for operation in operations:
            used = time.monotonic() - start
            if used >= seconds or (most is not None and kept >= most):
                break
            key = json.dumps(operation.to_json(), sort_keys=True)
            if key in done:
                continue
            if progress is not None:
                progress(used, seconds, str(operation))
            try:
                result: dict[str, Any] = asdict(timer(operation))
                kept += 1
            except RuntimeError as error:
                result = {"error": str(error).splitlines()[0][:200]}
            file.write(json.dumps({"operation": operation.to_json(), **result}) + "\n")
            file.flush()
            done.add(key)
    return read_samples(path)


def read_samples(path: Path) -> list[Sample]:
    """All samples in a file, also a gzipped one; a torn last line and operations that failed are left out."""
    samples: list[Sample] = []
    for line in _lines(path)[1:]:
        if "error" not in line:
            check(line, Record({"operation": MapOf(), **_TIMING.needed}, _TIMING.may), path, MachineError)
            try:
                operation = Operation.from_json(line.pop("operation"))
            except (TypeError, ValueError, KeyError) as error:
                raise MachineError(f"{path}: an operation that is none: {error}") from None
            samples.append(Sample(operation, TimedRuns(**line)))
    return samples


def _open(path: Path, about: dict[str, Any]) -> set[str]:
    """Make the file or check that it fits; returns the keys it holds."""
    header = {"version": VERSION, **about}
    if not path.exists() or not _lines(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        return set()
    lines = _lines(path)
    if lines[0] != json.loads(json.dumps(header)):
        raise MachineError(f"{path} holds samples of {lines[0]}, not of {header}; give another file or remove it")
    # Cut off what a killed writer left behind, else the next line would be appended to half a line.
    whole = path.read_text(encoding="utf-8").splitlines()[: len(lines)]
    path.write_text("\n".join(whole) + "\n", encoding="utf-8")
    return {json.dumps(line["operation"], sort_keys=True) for line in lines[1:]}


def _lines(path: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    try:
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise MachineError(f"cannot read the samples {path}: {error.strerror or error}") from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise MachineError(f"{path} is not a file of samples, or is cut off: {error}") from None
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
        check(lines[-1], MapOf(), f"{path}, line {len(lines)}", MachineError)
    return lines
