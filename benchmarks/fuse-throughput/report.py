"""The tables of the README, from the result files, put between their marks.

    python report.py README.md results/DATE-all.json results/DATE-later.json -- results/DATE-processes.json

The first file is the run that everything is taken from. A workload that a later file has all of, serial and as an
array, is taken from there, and marked. What is behind the dashes says what the runs have not: processes, memory, use.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COUNTS = (1, 2, 4, 8, 16, 32)
PEAKS = {"tf32": 494e12, "amp": 989e12}
"""Dense matrix rates of an H200 (NVIDIA's data sheet), operations per second."""
BANDWIDTH = 4.8e12
STREAMS_TO_REACH = {
    ("resnet18-b32", "tf32"): (3.3, 1.5), ("resnet18-b32", "amp"): (6.0, 1.8), ("resnet18-b128", "tf32"): (2.0, 1.35),
    ("resnet18-b128", "amp"): (3.0, 1.5), ("mobilenet-v3-b64", "tf32"): (15, 2.1),
    ("transformer-b20", "tf32"): (14.7, 2.5), ("transformer-b20", "amp"): (23, 2.5),
    ("pointnet-cls-b32", "tf32"): (1.3, 1.2), ("pointnet-cls-b32", "amp"): (2.1, 1.3),
}  # fmt: skip
"""Over plain and over graphed serial: one CUDA graph per model on its own stream, before fused operations."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 2) -> None:
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * left + "---:|" * (len(head) - left))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def ms(row: Row | None, members: int = 1) -> str:
    return f"{1e3 * members * row['step_s']:.1f}" if row else "–"


class Rows:
    """Rows with a time, found by what they are; of equal ones the last counts."""

    def __init__(self, rows: list[Row]) -> None:
        self.all = rows
        timed = [r for r in rows if "step_s" in r and r["what"] != "partial"]
        self.found: dict[tuple[str, str, str, int], Row] = {}
        for r in timed:
            self.found[r["workload"], r["precision"], r["what"], r["members"]] = r
        self.keys = list(dict.fromkeys((r["workload"], r["precision"]) for r in rows if "precision" in r))

    def get(self, key: tuple[str, str], what: str, members: int) -> Row | None:
        found = self.found.get((*key, what, members))
        return None if found and found.get("refused") and what != "graphed serial" else found

    def best(self, key: tuple[str, str], members: int = 16) -> tuple[str, Row] | None:
        ways = ("fused", "fused, layers measured", "streams")
        there = [(what, row) for what in ways if (row := self.get(key, what, members)) is not None]
        return min(there, key=lambda pair: pair[1]["step_s"], default=None)


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def source(files: list[Rows], key: tuple[str, str]) -> Rows | None:
    """The last run that has a workload serially, both ways, and as an array."""
    for run in reversed(files):
        if run.get(key, "eager serial", 1) and run.get(key, "graphed serial", 1) and run.best(key):
            return run
    return None


def speed(files: list[Rows]) -> None:
    lines, plain, graphed, missed = [], [], [], []
    for key in files[0].keys:
        if (rows := source(files, key)) is None:
            continue
        eager, serial, best = rows.found[*key, "eager serial", 1], rows.found[*key, "graphed serial", 1], rows.best(key)
        assert best is not None
        over = [16 * r["step_s"] / best[1]["step_s"] for r in (eager, serial)]
        plain.append(over[0])
        graphed.append(over[1])
        wanted = STREAMS_TO_REACH.get(key)
        if wanted and any(round(o, 2) < w for o, w in zip(over, wanted, strict=True)):
            missed.append(" ".join(key))
        others = [files[0].get(key, "vmap", 16), *(rows.get(key, what, 16) for what in ("fused", "streams"))]
        times = [ms(eager, 16), ms(serial, 16), *map(ms, others)]
        gains = [f"{over[0]:.1f}x", f"**{over[1]:.2f}x**", f"{wanted[0]:g}x, {wanted[1]:g}x" if wanted else "–"]
        lines.append([key[0] + ("" if rows is files[0] else " *"), key[1], *times, *gains])
    head = ("workload", "precision", "serial, plain", "serial, graphed", "vmap", "fused", "streams", "best over plain")
    table((*head, "over graphed", "to reach"), lines)
    for what, gains in (("plain", plain), ("graphed", graphed)):
        print(
            f"Over {what}: {min(gains):.2f}x to {max(gains):.2f}x, geometric mean {mean(gains):.2f}x of {len(gains)}."
        )
    print(f"\nBelow what was to reach: {', '.join(missed) or 'none'}.\n")


def members(rows: Rows) -> None:
    lines = []
    for key in rows.keys:
        for what in ("fused", "streams"):
            found = {n: rows.get(key, what, n) for n in COUNTS} | {1: rows.get(key, "graphed serial", 1)}
            if sum(row is not None for row in found.values()) < 3:
                continue
            lines.append([*key, what, *(f"{n / r['step_s']:,.0f}" if r else "–" for n, r in found.items())])
    table(("workload", "precision", "way", *(f"B = {n}" for n in COUNTS)), lines, left=3)


def sizes(rows: Rows) -> None:
    """Memory per model: what the device has to hold, gaps and workspaces included."""
    lines = []
    for key in rows.keys:
        plain = rows.get(key, "eager serial", 1)
        for what in ("fused", "streams"):
            found = {n: rows.get(key, what, n) for n in COUNTS} | {1: rows.get(key, "graphed serial", 1)}
            if sum(row is not None for row in found.values()) < 3:
                continue
            each = [f"{r['used_bytes'] / n / 2**20:,.0f}" if r and "used_bytes" in r else "–" for n, r in found.items()]
            lines.append([*key, what, f"{plain['peak_bytes'] / 2**20:,.0f}" if plain else "–", *each])
    table(("workload", "precision", "way", "plain", *(f"B = {n}" for n in COUNTS)), lines, left=3)


def memory(rows: Rows) -> None:
    """What `forecast` said of an array, beside what was measured."""
    told = [r for r in rows.all if r.get("predicted_bytes") and r["what"].startswith("memory, ")]
    last = {(r["workload"], r["precision"], r["what"]): r for r in told}
    lines, errors = [], []
    for (workload, precision, what), row in sorted(last.items()):
        way = what.removeprefix("memory, ")
        measured = {"fused": "peak_bytes", "streams": "used_bytes"}[way]
        error = 100 * (row["predicted_bytes"] / row[measured] - 1)
        errors.append(abs(error))
        each = [f"{row[name] / row['members'] / 2**20:,.0f}" for name in ("predicted_bytes", measured)]
        lines.append([workload, precision, way, str(row["members"]), *each, f"{error:+.0f} %"])
    table(("workload", "precision", "way", "B", "predicted MiB per model", "measured", "error"), lines, left=3)
    print(f"{sum(e <= 15 for e in errors)} of {len(errors)} within 15 %.\n")


def predictions(rows: Rows) -> None:
    lines, errors = [], []
    told = {(r["workload"], r["precision"], r["members"]): r for r in rows.all if "measured_step_s" in r}
    for r in told.values():
        pairs = [(r["predicted_step_s"], r["measured_step_s"]), (r["serial_s"], r["measured_serial_s"])]
        gains = [r["members"] * serial / step for step, serial in zip(*pairs, strict=True)]
        times = [f"{1e3 * t:.2f}" for t in pairs[0]]
        off = [100 * (pairs[0][0] / pairs[0][1] - 1), 100 * (gains[0] / gains[1] - 1)]
        errors.append(off)
        what = "streams" if "streams" in r["way"] else "fused"
        shown = [*times, f"{off[0]:+.0f} %", *(f"{g:.1f}x" for g in gains), f"{off[1]:+.0f} %"]
        lines.append([r["workload"], r["precision"], what, *shown])
    head = ("workload", "precision", "chosen", "predicted ms", "measured", "error", "speed-up", "measured", "error")
    table(head, lines, left=3)
    within = [sum(abs(off[i]) <= 15 for off in errors) for i in (0, 1)]
    print(f"Within 15 %: {within[0]} of {len(errors)} times, {within[1]} of {len(errors)} speed-ups.\n")


def partial(rows: Rows) -> None:
    found = sorted((r for r in rows.all if r["what"] == "partial" and "step_s" in r), key=lambda r: r["fused_blocks"])
    lines = [
        [str(r["fused_blocks"]), r["unfused"], f"{1e3 * r['step_s']:.1f}", f"{16 / r['step_s']:,.0f}"] for r in found
    ]
    table(("blocks fused", "left member by member", "ms a step of 16", "model-steps per second"), lines)


def use(rows: Rows) -> None:
    """What the profiler saw of replayed steps: shares of their time."""
    lines = []
    for r in {(r["workload"], r["precision"], r["what"]): r for r in rows.all if "busy" in r}.values():
        if r["kernels"]:
            shares = [f"{100 * r[k]:.0f} %" for k in ("busy", "filled", "occupancy")]
            lines.append([r["workload"], r["precision"], r["what"].split(", ")[1], str(r["kernels"]), *shares])
    table(
        ("workload", "precision", "way", "kernels", "a kernel runs", "on all multiprocessors", "threads"), lines, left=3
    )


def processes(rows: Rows, files: list[Rows]) -> None:
    """Model-steps per second of as many processes as members, and how many times faster the array is."""
    found: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    for r in rows.all:
        if "steps_per_s" in r:
            found.setdefault((r["workload"], r["precision"]), {})[r["what"], r["members"]] = r["steps_per_s"]
    lines, gains = [], {"processes": [], "processes with MPS": []}
    if any(r.get("what") == "processes with MPS, graphs" for r in rows.all):
        gains["processes with MPS, graphs"] = []
    for key, rates in found.items():
        best, cells = ours.best(key) if (ours := source(files, key)) else None, []
        for what, counted in gains.items():
            cells += [f"{rates[what, n]:,.0f}" if (what, n) in rates else "–" for n in (4, 16)]
            if best is not None and (what, 16) in rates:
                counted.append(16 / best[1]["step_s"] / rates[what, 16])
                cells.append(f"{counted[-1]:.2f}x")
            else:
                cells.append("–")
        lines.append([*key, f"{16 / best[1]['step_s']:,.0f}" if best else "–", *cells])
    head = ("workload", "precision", "array of 16", "4 processes", "16", "array over 16")
    head = (*head, "4 with MPS", "16 with MPS", "array over 16 with MPS")
    graphed = ("4 with MPS as graphs", "16", "array over 16 with MPS as graphs")
    table((*head, *(graphed if len(gains) == 3 else ())), lines)
    for what, counted in gains.items():
        if counted:
            print(f"Over 16 {what}: {min(counted):.2f}x to {max(counted):.2f}x, geometric mean {mean(counted):.2f}x.\n")


def room(work: Rows, files: list[Rows]) -> None:
    lines = []
    for r in work.all:
        key = (r["workload"], r["precision"])
        if "flops" not in r or (rows := source(files, key)) is None:
            continue
        one, best = rows.found[*key, "graphed serial", 1], rows.best(key)
        assert best is not None
        shares = []
        for per_model in (one["step_s"], best[1]["step_s"] / 16):
            rate, moved = r["flops"] / per_model / PEAKS[r["precision"]], r["bytes"] / per_model / BANDWIDTH
            shares += [f"{100 * rate:.0f} %", f"{100 * moved:.0f} %"]
        lines.append([r["workload"], r["precision"], str(r["operations"]), f"{r['flops'] / 1e9:.1f}", *shares])
    head = ("workload", "precision", "operations", "GFLOP", "serial: matrix rate", "bandwidth", "ours: matrix rate")
    table((*head, "bandwidth"), lines)


def missing(rows: Rows) -> None:
    """What failed or found no time, and is in no run."""
    told = set()
    for r in rows.all:
        name = tuple(r.get(k) for k in ("workload", "precision", "what", "members"))
        if ("error" in r or "skipped" in r) and name not in rows.found and name not in told:
            told.add(name)
            print("-", r.get("workload"), r.get("precision"), r["what"], (r.get("error") or r.get("skipped"))[:90])


def main() -> None:
    readme, *paths = sys.argv[1:]
    apart = paths.index("--") if "--" in paths else len(paths)
    files, others = ([Rows(json.loads(Path(p).read_text())["rows"]) for p in some if p != "--"]
                     for some in (paths[:apart], paths[apart:]))  # fmt: skip
    runs, joined = (Rows([r for f in some for r in f.all]) for some in (files, [*others, *files]))
    sections: dict[str, Callable[[], None]] = {
        "speed": lambda: speed(files), "members": lambda: members(files[0]), "sizes": lambda: sizes(files[0]),
        "memory": lambda: memory(joined), "predictions": lambda: predictions(runs), "use": lambda: use(joined),
        "partial": lambda: partial(files[0]), "processes": lambda: processes(joined, files),
        "room": lambda: room(joined, files),
    }  # fmt: skip
    text = Path(readme).read_text()
    for name, show in sections.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            show()
        if begin in text:
            head, rest = text.split(begin)
            text = f"{head}{begin}\n{shown.getvalue()}{end}{rest.split(end)[1]}"
        else:
            print(shown.getvalue())
    Path(readme).write_text(text)
    missing(runs)


if __name__ == "__main__":
    main()
