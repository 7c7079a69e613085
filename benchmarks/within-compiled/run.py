"""Time and memory of compiled steps: `outcore.within(..., compile=True)` beside torch.compile at its own budgets.

    python benchmarks/within-compiled/run.py --out DIR [--networks resnet50,gpt] [--sizes large,batch]
        [--precisions bf16,tf32] [--seconds 570] [--limit 150] [--resume FILE ...] [--device cpu]
    python benchmarks/within-compiled/run.py --table DIR/rows.jsonl

Networks, peers, processes and turns are those of `benchmarks/frontier`; here only the rows differ. First come plain
training and torch.compile at activation memory budgets of 1.0, 0.7, 0.5, 0.3 and 0.1 and with CUDA graphs
(reduce-overhead); then ours, under a hard limit of the allocator, at the very peaks that torch.compile reached, and at
a half and a third of its smallest. Each row of ours has its predicted time and peak beside the measured ones.

A turn takes `--seconds` and ends; rows that are there are not measured again in the next one. `--table` prints the rows
of a file: for each peak of torch.compile ours at that peak, and how far predictions were off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.frontier.__main__ import ENVIRONMENT, PRELOAD, Table  # noqa: E402
from benchmarks.frontier.networks import NETWORKS  # noqa: E402
from benchmarks.frontier.training import Case  # noqa: E402
from benchmarks.frontier.turns import run_all  # noqa: E402
from benchmarks.frontier.ways import PLAIN, Rows, Way, peak_of  # noqa: E402

BUDGETS = ("1.0", "0.1", "0.5", "0.7", "0.3")
SHARES = {"1/2": 1 / 2, "1/3": 1 / 3}


def _at(budget: str) -> Callable[[Rows], int]:
    """The peak that torch.compile reached at one of its budgets."""

    def peak(rows: Rows) -> int:
        row = rows.get(f"compile {budget}", {})
        if "ms" not in row:
            raise LookupError(f"torch.compile at {budget} was not measured")
        return peak_of(row)

    return peak


def _below(share: float) -> Callable[[Rows], int]:
    """A share of the smallest peak of torch.compile."""

    def peak(rows: Rows) -> int:
        there = [peak_of(rows[f"compile {b}"]) for b in BUDGETS if "ms" in rows.get(f"compile {b}", {})]
        if not there:
            raise LookupError("torch.compile was not measured")
        return int(share * min(there))

    return peak


def ways() -> list[Way]:
    """The rows of a case, the most telling first."""
    every = tuple(f"compile {b}" for b in BUDGETS)
    return [
        Way("plain first", "a", ()),
        Way("plain last", "a", ()),
        *(Way(f"compile {b}", "a") for b in BUDGETS[:2]),
        *(Way(f"ours compile at {b}", "a", (*PLAIN, f"compile {b}"), _at(b)) for b in BUDGETS[:2]),
        Way("compile reduce-overhead", "a"),
        *(Way(f"compile {b}", "a") for b in BUDGETS[2:]),
        *(Way(f"ours compile {name} of compile", "a", (*PLAIN, *every), _below(s)) for name, s in SHARES.items()),
        *(Way(f"ours compile at {b}", "a", (*PLAIN, f"compile {b}"), _at(b)) for b in BUDGETS[2:]),
    ]


class CompiledTable(Table):
    """The rows of this benchmark."""

    def _missing(self) -> Iterator[tuple[Case, Way]]:
        for case in self.cases:
            for way in ways():
                if way.name not in self.rows[case] and (case, way.name) not in self.begun:
                    yield case, way


def table(path: Path) -> str:
    """The rows of a file as Markdown."""
    cases: dict[str, Rows] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "case" in row:
            cases.setdefault(row["case"], {})[row["way"]] = row
    lines = [
        "| case | at | torch.compile GiB, ms | ours GiB, ms | of its time | predicted ms |",
        "|---|---|---|---|---|---|",
    ]
    ratios, errors = [], []
    for case, rows in cases.items():
        for name, ours in rows.items():
            if not name.startswith("ours compile"):
                continue
            theirs = rows.get(name.removeprefix("ours ").replace("at ", ""), {})
            lines.append(
                f"| {case} | {name[13:]} | {_cell(theirs)} | {_cell(ours)} | {_ratio(ours, theirs)} | {_ms(ours)} |"
            )
            if "ms" in ours and "ms" in theirs:
                ratios.append(ours["ms"] / theirs["ms"])
            if "ms" in ours and ours.get("predicted_s"):
                errors.append(abs(1e3 * ours["predicted_s"] / ours["ms"] - 1))
    if ratios:
        lines += ["", f"Ours over torch.compile at the same peak: median {statistics.median(ratios):.2f}, "]
        lines[-1] += f"largest {max(ratios):.2f}, of {len(ratios)} rows."
    if errors:
        lines += [f"Predicted time: median error {statistics.median(errors):.0%}, largest {max(errors):.0%}."]
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> str:
    if "ms" in row:
        over = " !" if row.get("budget") and peak_of(row) > row["budget"] else ""
        return f"{peak_of(row) / 2**30:.2f}{over}, {row['ms']:.1f}"
    return str(row.get("error", ""))[:60].replace("|", "/")


def _ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return f"{ours['ms'] / theirs['ms']:.2f}x" if "ms" in ours and "ms" in theirs else ""


def _ms(row: dict[str, Any]) -> str:
    return f"{1e3 * row['predicted_s']:.1f}" if row.get("predicted_s") else ""


def main() -> None:
    """Run one turn, or print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--sizes", default="large,batch")
    parser.add_argument("--precisions", default="bf16,tf32")
    parser.add_argument("--resume", nargs="*", type=Path, default=[])
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--limit", type=float, default=150, help="seconds of work for a row")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.table is not None:
        print(table(given.table))
        return
    if given.out is None:
        parser.error("give --out DIR, or --table FILE")
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    until = time.monotonic() + given.seconds
    rows = CompiledTable(given)
    run_all(rows.next, processes=given.processes, limit_s=given.limit, until=until, preload=PRELOAD)
    print(table(rows.path))


if __name__ == "__main__":
    main()
