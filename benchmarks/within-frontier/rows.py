"""What the result files hold: for every case the plain step, and every other way as time and memory over it.

Files called "frontier" are of one day and one machine, and share their newest plain steps; in older ones a ratio is
within one file. The newest file that has a way counts; what only older ones have is marked so.
Memory is the allocator's peak; CUDA graphs keep theirs reserved, so for them it is all that is reserved. Of several
plans for one budget the fastest that keeps to it counts.
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
PEERS = ("checkpoint per block", "save_on_cpu", "compile budget 0.5")


@dataclass(frozen=True)
class Point:
    """A way of training, over the plain step."""

    how: str
    slower: float
    share: float
    """Of the plain peak."""
    within: bool
    """The budget, if there is one."""
    old: bool
    row: Row

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


def results() -> dict[Key, Found]:
    """Every case; files are read in the order of their names, later ones count."""
    names = sorted((HERE / "results").glob("*-h200-*.json"))
    files = [p for p in names if not any(part in p.name for part in ("norms", "first", "casts"))]
    shared: dict[Key, Row] = {}
    for path in names:
        shared |= _plain(path) if "frontier" in path.name else {}
    found: dict[Key, Found] = {}
    for path in sorted(files, key=lambda p: ("frontier" in p.name, p.name)):
        new = "frontier" in path.name
        plain = shared if new else _plain(path)
        fresh: set[tuple[Key, str]] = set()
        for row in _rows(path):
            key, how = key_of(row), row["how"].partition(" /")[0]
            if (base := plain.get(key)) is None:
                continue
            case = found.setdefault(key, Found(base, {}, {}))
            case.plain = base
            if how == "plain":
                continue
            if "ms" in row:
                point = _point(how, row, base, old=not new)
                known = case.points.get(how) if (key, how) in fresh else None
                case.points[how] = point if known is None else _better(known, point)
                fresh.add((key, how))
                case.missed.pop(how, None)
            elif how not in case.points:
                case.missed[how] = row.get("error") or row.get("skipped") or ""
    return found


def _rows(path: Path) -> list[Row]:
    return [row for row in json.loads(path.read_text())["rows"] if "model" in row]


def _plain(path: Path) -> dict[Key, Row]:
    return {key_of(row): row for row in _rows(path) if row["how"] == "plain" and "ms" in row}


def _point(how: str, row: Row, base: Row, *, old: bool) -> Point:
    taken = row["reserved"] if "graphs" in how else row["peak"]
    asked = how.split()[1] if how.startswith("outcore") else ""
    budget = float(asked) * base["peak"] if asked and asked != "least" else row.get("budget")
    budget = None if asked == "least" and "graphs" in how else budget
    return Point(how, row["ms"] / base["ms"], taken / base["peak"], budget is None or taken <= budget, old, row)


def _better(one: Point, other: Point) -> Point:
    """The fastest that keeps to its budget; if none does, the nearest."""
    if one.within != other.within:
        return one if one.within else other
    return min(one, other, key=lambda p: p.slower if p.within else p.share)


def best(case: Found, share: float, *, reassociated: bool) -> Point | None:
    """The fastest of ours within a share of the plain peak: a plan for less memory will do, and so will one that is
    bitwise where rounding may differ (`outcore.within` then keeps the library's norms)."""
    ours = [p for p in case.points.values() if p.ours and (reassociated or not p.reassociated)]
    new = [p for p in ours if not p.old] or ours
    return min((p for p in new if p.share <= share), key=lambda p: p.slower, default=None)


def least(case: Found) -> Point | None:
    """The smallest of ours, bitwise."""
    ours = [p for p in case.points.values() if p.ours and not p.reassociated]
    return min([p for p in ours if not p.old] or ours, key=lambda p: p.share, default=None)


def unbeaten(case: Found) -> list[Point]:
    """Peers that nothing of ours beats: not slower and not larger."""
    ours = [p for p in case.points.values() if p.ours]
    peers = [p for p in case.points.values() if not p.ours]
    return [p for p in peers if not any(o.slower <= p.slower and o.share <= p.share for o in ours)]
