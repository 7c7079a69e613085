"""Tables and a picture of the frontier, made from stored rows.

    python -m benchmarks.frontier.report benchmarks/frontier/results/*.jsonl [--write benchmarks/frontier/README.md]

A cell is *time over plain at memory over plain*: plain is the faster of both layouts. Memory is what the allocator
reserves, of ours the first step included. The last row of a file counts where a way was measured twice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.frontier.ways import TIERS, Rows, fastest_plain, peak_of, ways

__all__ = ["behind", "read", "table"]

MARKS = {"rows": ("<!-- rows -->", "<!-- end of rows -->"), "behind": ("<!-- behind -->", "<!-- end of behind -->")}


def read(paths: Iterable[Path]) -> tuple[dict[str, Rows], list[dict[str, Any]]]:
    """Rows by case and way, and the headers of runs."""
    cases: dict[str, Rows] = {}
    headers = []
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "header" in row:
                headers.append(row["header"])
            else:
                cases.setdefault(row["case"], {})[row["way"]] = row
    return cases, headers


def cell(row: dict[str, Any] | None, plain: dict[str, Any]) -> str:
    """A row in short; what went wrong in a word."""
    if row is None:
        return ""
    if "ms" not in row:
        told = row.get("error", row.get("skipped", ""))
        for word, short in (("OutOfMemory", "out of memory"), ("PlanError", "refused"), ("took more", "too long")):
            if word in told:
                return short
        return told.split(":")[0][:30] or "failed"
    over = row.get("budget") and peak_of(row) > row["budget"]
    inexact = not row["way"].startswith(("compile", "ours compile")) and row.get("bitwise") != row.get("gradients")
    unlike = inexact and row.get("bitwise", 0) < row.get("plain_repeats", 0)
    marks = ("g" if row.get("as_graphs") else "") + ("!" if over else "") + ("≠" if unlike else "")
    return f"{row['ms'] / plain['ms']:.2f}x at {peak_of(row) / peak_of(plain):.2f}{marks}"


def table(cases: dict[str, Rows]) -> str:
    """One line for a case, one column for a way that any case has."""
    there = {name for rows in cases.values() for name in rows}
    names = [way.name for tier in TIERS for way in ways(tier) if way.name in there and way.needs]
    lines = [f"| case | plain | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for case, rows in cases.items():
        plain = fastest_plain(rows)
        if plain is None:
            lines.append(f"| {case} | not measured |" + " |" * len(names))
            continue
        layout = "last" if plain["channels_last"] else "first"
        told = f"{plain['ms']:.1f} ms, {peak_of(plain) / 2**30:.2f} GiB, channels {layout}"
        lines.append(f"| {case} | {told} | " + " | ".join(cell(rows.get(name), plain) for name in names) + " |")
    return "\n".join(lines)


def behind(cases: dict[str, Rows]) -> str:
    """Every point of a peer that no row of ours reaches: as fast within 2 %, with no more memory within 2 %."""
    lines = ["| case | peer | its point | the fastest of ours with no more memory |", "|---|---|---|---|"]
    peers = 0
    for case, rows in cases.items():
        plain = fastest_plain(rows)
        if plain is None:
            continue
        ours = [row for way, row in rows.items() if way.startswith("ours") and "ms" in row]
        for way, row in rows.items():
            if way.startswith(("ours", "plain first", "plain last")) or "ms" not in row:
                continue
            peers += 1
            fitting = [r for r in ours if peak_of(r) <= 1.02 * peak_of(row)]
            best = min(fitting, key=lambda r: r["ms"], default=None)
            if best is None or best["ms"] > 1.02 * row["ms"]:
                found = f"{best['way']}: {cell(best, plain)}" if best else "none"
                lines.append(f"| {case} | {way} | {cell(row, plain)} | {found} |")
    return f"{len(lines) - 2} of {peers} points.\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    cases, headers = read(given.paths)
    made = {"rows": table(cases), "behind": behind(cases)}
    for header in headers:
        print({name: header[name] for name in ("date", "commit", "device", "torch", "cudnn")})
    if given.write is None:
        print("\n\n".join(made.values()))
        return
    text = given.write.read_text()
    for name, (begin, end) in MARKS.items():
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{made[name]}\n\n{end}{rest.partition(end)[2]}"
    given.write.write_text(text)


if __name__ == "__main__":
    main()
