"""What was found: for every case the plain step, and every other way as time and memory over it.

The tables are of one run, the newest results called "frontier-all": in several parts if it did not fit into one, each
over its own plain steps, a later part before an earlier one. What has no row so is taken from a part without a plain
step or from the older "frontier" results of the same machine, over the newest plain step, and marked as old. Memory is
the allocator's peak; CUDA graphs keep theirs reserved, so for them it is all that is reserved. Of several plans for one
budget the fastest that keeps to it counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Row = dict[str, Any]
Key = tuple[str, str, str]
"""Network, size, precision."""
PEERS = ("checkpoint per block", "fairscale offload", "save_on_cpu", "compile budget 0.5")


@dataclass(frozen=True)
class Point:
    """A way of training, over the plain step."""

    how: str
    slower: float
    share: float
    """Of the plain peak."""
    within: bool
    """The budget, if there is one."""
    row: Row
    old: bool = False

    @property
    def ours(self) -> bool:
        return self.how.startswith("outcore")

    @property
    def reassociated(self) -> bool:
        return "reassociated" in self.how


@dataclass
class Found:
    """All that is known of a case."""

    plain: Row
    points: dict[str, Point]
    missed: dict[str, str]
    """Way -> why there is no figure."""


def key_of(row: Row) -> Key:
    size = "32x224" if row["batch"] == 32 else f"{row['batch']}x{row['side']}"
    return row["model"], size, row["precision"].split()[0]


def plain_ms(rows: Iterable[Row]) -> dict[tuple[str, int, int, str], float]:
    """Case -> milliseconds of its plain step."""
    plain = [r for r in rows if r.get("how") == "plain" and "ms" in r]
    return {(r["model"], r["batch"], r["side"], r["precision"]): r["ms"] for r in plain}


def newest() -> list[Path]:
    """The results that the tables are made from, the last part first."""
    every = sorted((HERE / "results").glob("*-h200-frontier-all*.json"))
    day = every[-1].name.partition("-h200")[0]
    return [path for path in reversed(every) if path.name.startswith(day)]


def results() -> dict[Key, Found]:
    """Every case."""
    parts = newest()
    found: dict[Key, Found] = {}
    for path in parts:
        rows = _rows(path)
        plain = {key_of(row): row for row in rows if row["how"] == "plain" and "ms" in row}
        found = {key: Found(row, {}, {}) for key, row in plain.items()} | found
        _add(found, [row for row in rows if key_of(row) in plain], plain, old=False)
    every = sorted((HERE / "results").glob("*-h200-frontier*.json"), reverse=True)
    for before in (*parts, *(path for path in every if path not in parts)):
        _add(found, _rows(before), {key: case.plain for key, case in found.items()}, old=True)
    return found


def _add(found: dict[Key, Found], rows: list[Row], plain: dict[Key, Row], *, old: bool) -> None:
    """The rows of a file, where there is nothing newer."""
    known = {key: set(case.points) for key, case in found.items()}
    for row in rows:
        key, how = key_of(row), row["how"].partition(" /")[0]
        if how == "plain" or key not in found or how in known[key]:
            continue
        case = found[key]
        if "ms" not in row:
            case.missed.setdefault(how, row.get("error") or row.get("skipped") or "")
            continue
        point, other = _point(how, row, plain[key], old=old), case.points.get(how)
        case.points[how] = point if other is None else _better(other, point)


def _rows(path: Path) -> list[Row]:
    return [row for row in json.loads(path.read_text())["rows"] if "model" in row]


def _point(how: str, row: Row, base: Row, *, old: bool) -> Point:
    taken = row["reserved"] if "graphs" in how else row["peak"]
    asked = how.split()[1] if how.startswith("outcore") else ""
    budget = float(asked) * base["peak"] if asked and asked != "least" else row.get("budget")
    budget = None if asked == "least" and "graphs" in how else budget
    return Point(how, row["ms"] / base["ms"], taken / base["peak"], budget is None or taken <= budget, row, old)


def _better(one: Point, other: Point) -> Point:
    """The fastest that keeps to its budget; if none does, the nearest."""
    if one.within != other.within:
        return one if one.within else other
    return min(one, other, key=lambda p: p.slower if p.within else p.share)


def best(case: Found, share: float, *, reassociated: bool) -> Point | None:
    """The fastest of ours within a share of the plain peak: a plan for less memory will do, and so will one that is
    bitwise where rounding may differ (`outcore.within` then keeps the library's norms). What is new counts first."""
    fitting = [p for p in case.points.values() if p.ours and p.share <= share and (reassociated or not p.reassociated)]
    new = [p for p in fitting if not p.old and p.reassociated == reassociated]
    return min(new or fitting, key=lambda p: p.slower, default=None)


def least(case: Found) -> Point | None:
    """The smallest of ours, bitwise."""
    ours = [p for p in case.points.values() if p.ours and not p.reassociated]
    return min(ours, key=lambda p: p.share, default=None)


def unbeaten(case: Found) -> list[Point]:
    """Peers that nothing of ours beats: not slower and not larger."""
    ours = [p for p in case.points.values() if p.ours]
    peers = [p for p in case.points.values() if not p.ours]
    return [p for p in peers if not any(o.slower <= p.slower and o.share <= p.share for o in ours)]
