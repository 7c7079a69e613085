"""Time and memory of compiled steps: `outcore.within(..., compile=True)` beside torch.compile at its own budgets.

    python benchmarks/within-compiled/run.py --out DIR [--networks resnet50,gpt] [--sizes batch,large]
        [--precisions bf16,tf32] [--seconds 470] [--limit 300] [--processes 14] [--resume FILE ...]
    python benchmarks/within-compiled/run.py --device cpu --tiny --out DIR
    python benchmarks/within-compiled/run.py --table DIR/rows.jsonl [...]

Networks, peers and processes are those of `benchmarks/frontier`: each row is a process of its own, rows compile side
by side on the processor, with one cache of kernels for all, and are timed one at a time while all others stand still.
Here only the rows differ. Ours runs under a hard limit of the allocator, at the very peaks that torch.compile reached,
and at a half and a third of its smallest; its predicted time and peak are beside the measured ones.

Rows come in the order of what they tell: for every network of the first size in the first precision torch.compile,
plain training, torch.compile at its smallest budget, ours at torch.compile's peak, and ours at half of its smallest:
five rows each; then the same for the other sizes and precisions; then the other budgets. Channels are last wherever
there are any, and gradients are not compared here (`benchmarks/within-exactness` and the tests do). A turn takes
`--seconds` and ends; rows that are there are not measured again in the next one. `--table` prints the rows of files:
for each peak of torch.compile ours at that peak, and how far predictions were off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.frontier import row  # noqa: E402
from benchmarks.frontier.__main__ import ENVIRONMENT, PRELOAD, Table  # noqa: E402
from benchmarks.frontier.networks import NETWORKS  # noqa: E402
from benchmarks.frontier.row import Settings  # noqa: E402
from benchmarks.frontier.training import Case  # noqa: E402
from benchmarks.frontier.turns import Asked, Turn, run_all  # noqa: E402
from benchmarks.frontier.ways import Ready, Rows, Way, peak_of  # noqa: E402

BUDGETS = ("1.0", "0.1", "0.5", "0.7", "0.3")
SHARES = {"1/2": 1 / 2, "1/3": 1 / 3}
FIRST = 5
"""Rows of a case that come before all others."""


@dataclass(frozen=True)
class Row(Way):
    """A row, with channels last where there are any."""

    def ready(self, rows: Rows, layouts: bool) -> Ready | str | None:
        """What it begins with; why it cannot; none while others are missing."""
        if any(name not in rows for name in self.needs):
            return None
        try:
            return Ready(layouts, self.budget(rows))
        except LookupError as error:
            return str(error.args[0])

    @property
    def run(self) -> str:
        """What runs: budgets are not part of it."""
        return self.name if not self.name.startswith("ours") else "ours compile"


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


def ways() -> list[Row]:
    """The rows of a case, the most telling first."""
    least = tuple(f"compile {b}" for b in BUDGETS[:2])
    half, third = SHARES
    return [
        Row("compile 1.0", "a", ()),
        Row("plain", "a", ()),
        Row("compile 0.1", "a", ()),
        Row("ours compile at 1.0", "a", ("compile 1.0",), _at("1.0")),
        Row(f"ours compile {half} of compile", "a", least, _below(SHARES[half])),
        Row("ours compile at 0.1", "a", ("compile 0.1",), _at("0.1")),
        Row("compile reduce-overhead", "a", ()),
        *(Row(f"compile {b}", "a", ()) for b in BUDGETS[2:]),
        Row(f"ours compile {third} of compile", "a", least, _below(SHARES[third])),
        *(Row(f"ours compile at {b}", "a", (f"compile {b}",), _at(b)) for b in BUDGETS[2:]),
    ]


def measured(case: Case, way: str, channels_last: bool, budget: int | None, settings: Settings, pipe: Any) -> None:
    """What a process does. Compiled steps are the same from the second on, and need no long warming up; the link to the
    host, and how fast that is, are measured while nobody else has the device."""
    from outcore.compiled import joint_graph

    row._prepare(settings.device)
    turn = Turn.by(pipe, row._settle)
    found: dict[str, Any] = {}

    def alone(name: str) -> Any:
        measure = getattr(joint_graph, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            turn.take()
            try:
                found[name] = measure(*args, **kwargs)
                return found[name]
            finally:
                turn.give()

        return patch.object(joint_graph, name, measured)

    with patch.object(row, "_STEADY", 3), alone("tier_below"), alone("simple_operation_s"):
        rows = row.measure(case, way, channels_last, budget, settings, turn)
    from torch._inductor import metrics

    rows |= {name: value for name, value in found.items() if isinstance(value, float)}
    pipe.send(rows | {"generated_kernels": metrics.generated_kernel_count})


class CompiledTable(Table):
    """The rows of this benchmark."""

    def _missing(self) -> Iterator[tuple[Case, Way]]:
        for first in (True, False):
            for size, bf16 in dict.fromkeys((case.size, case.bf16) for case in self.cases):
                named = [way for way in ways() if self.given.ways is None or way.name in self.given.ways]
                for way in named[:FIRST] if first else named[FIRST:]:
                    for case in self.cases:
                        wanted = (case.size, case.bf16) == (size, bf16) and way.name not in self.rows[case]
                        if wanted and (case, way.name) not in self.begun:
                            yield case, way

    def next(self) -> Asked | None:
        """The first row that can begin."""
        asked = super().next()
        if asked is None:
            return None
        plans = Path(tempfile.gettempdir()) / "within-compiled"
        settings = Settings(self.given.device, self.given.steps, 4.0, plans, compare=False)
        return replace(asked, target=measured, args=(*asked.args[:-1], settings))


def read(paths: Iterable[Path]) -> dict[str, Rows]:
    """The rows of files by case; later ones stand for those before."""
    cases: dict[str, Rows] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if "case" in row:
                cases.setdefault(row["case"], {})[row["way"]] = row
    return cases


def table(cases: Mapping[str, Rows]) -> str:
    """Rows as Markdown."""
    lines = [
        "| case | at | torch.compile GiB, ms | ours GiB, ms | of its time | predicted ms | searched, refused |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios, errors = [], []
    for case, rows in cases.items():
        for name, ours in rows.items():
            if not name.startswith("ours compile"):
                continue
            below = " of compile" in name
            theirs = rows.get("compile 0.1" if below else name.removeprefix("ours ").replace("at ", ""), {})
            cells = (name[13:], _cell(theirs), _cell(ours), _ratio(ours, theirs), _ms(ours), _trouble(ours))
            lines.append(f"| {case} | {' | '.join(cells)} |")
            if "ms" in ours and "ms" in theirs and not below:
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


def _trouble(row: dict[str, Any]) -> str:
    return f"{row['retries']}, {row['refused']}" if "retries" in row else ""


def main() -> None:
    """Run one turn, or print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", nargs="+", type=Path)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--sizes", default="batch,large")
    parser.add_argument("--precisions", default="bf16,tf32")
    parser.add_argument("--resume", nargs="*", type=Path, default=[])
    parser.add_argument("--seconds", type=float, default=470)
    parser.add_argument("--limit", type=float, default=300, help="seconds of work for a row")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--ways", type=lambda names: names.split(","), help="rows to measure, by name, in their order")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, on any device: shows that it runs")
    given = parser.parse_args()
    if given.table is not None:
        print(table(read(given.table)))
        return
    if given.out is None:
        parser.error("give --out DIR, or --table FILE")
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    until = time.monotonic() + given.seconds
    if given.tiny:
        given.sizes = "tiny"
    rows = CompiledTable(given)
    there = sum(len(found) for found in rows.rows.values())
    print(f"{there} of {len(ways()) * len(rows.cases)} rows are there", flush=True)
    run_all(rows.next, processes=given.processes, limit_s=given.limit, until=until, preload=PRELOAD)
    print(table({case.label: found for case, found in rows.rows.items()}))


if __name__ == "__main__":
    main()
