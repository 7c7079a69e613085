"""The tables of the README, from the result files: python report.py results/DATE-sweep.json results/DATE-noise.json."""

from __future__ import annotations

import json
import math
import statistics
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def named(row: Row) -> str:
    if row["members"] == 1:
        return "1, plain PyTorch"
    return f"{row['members']}, fused" + (", slots kept to the end" if row.get("wide") else "")


def best_loss(row: Row) -> float:
    return float(row["best_loss"] if "best_loss" in row else row["best"]["value"])


def show(rows: list[Row]) -> None:
    """Time and fate of the trials of every sweep, and how they compare."""
    print("| trials at a time | training s | with all | steps of trials | complete | pruned | best trial | its loss |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        counts = " | ".join(str(row["states"].get(s, 0)) for s in ("complete", "pruned"))
        cells = f"{row['training_s']:.1f} | {row['wall_s']:.1f} | {row['member_steps']:,} | {counts}"
        print(f"| {named(row)} | {cells} | {row['best'].get('number', '–')} | {best_loss(row):.4f} |")
    plain = [row for row in rows if row["members"] == 1]
    for one, other in combinations(plain, 2):
        print(f"\nPlain PyTorch twice: decisions that are the same: {same(one, other)}.")
    for alone in plain:
        for fused in (row for row in rows if row["members"] > 1 and row["seed"] == alone["seed"]):
            ratios = [alone[k] / fused[k] for k in ("training_s", "wall_s", "cpu_s")]
            print("\n{}: {:.2f}x, with all around it {:.2f}x, in CPU time {:.2f}x.".format(named(fused), *ratios))
            print(f"Decisions on trials that are the same: {same(fused, alone)}.{pace(fused, alone)}")


def same(one: Row, other: Row) -> str:
    """How many trials ended the same way, and how far apart their last losses are."""
    found = {t["number"]: t for t in other["trials"]}
    pairs = [(t, found[t["number"]]) for t in one["trials"] if t["number"] in found]
    equal = [(a, b) for a, b in pairs if a["state"] == b["state"]]
    apart = [abs(a["value"] - b["value"]) for a, b in equal if a["value"] is not None and b["value"] is not None]
    return f"{len(equal)} of {len(pairs)}, median difference of their last losses {statistics.median(apart):.1e}"


def pace(fused: Row, alone: Row) -> str:
    """Per step of a trial, without the first interval, in which the fused step is recorded, checked and captured."""
    if "marks" not in fused or len(fused["marks"]) < 2:
        return ""
    (first_s, first), (last_s, last) = fused["marks"][0], fused["marks"][-1]
    each = [1e3 * (last_s - first_s) / (last - first), 1e3 * alone["training_s"] / alone["member_steps"]]
    return f" First interval {first_s:.2f} s; after it {each[0]:.2f} ms a step of a trial, plain {each[1]:.2f}."


Values = dict[int, float]
"""Trial -> its last loss, infinite where it diverged."""


def gathered(again: list[Row]) -> dict[tuple[str, int], Values]:
    """The losses of all configurations trained to the end, by way and seed; shares of them are joined."""
    found: dict[tuple[str, int], Values] = {}
    for row in again:
        values = found.setdefault((named(row), row["weights"]), {})
        for trial in row["trials"]:
            values[trial["number"]] = trial["value"] if trial["state"] == "complete" else math.inf
    whole = max(map(len, found.values()))
    return {key: values for key, values in found.items() if len(values) == whole}


def ranks(values: Values) -> Values:
    """The place of each trial, equal ones sharing theirs."""
    order = sorted(values, key=lambda number: values[number])
    found: Values = {}
    for number in order:
        equal = [i for i, other in enumerate(order) if values[other] == values[number]]
        found[number] = statistics.mean(equal) + 1
    return found


def agreement(runs: dict[tuple[str, int], Values]) -> None:
    """How alike two ways are that train all configurations, beside how alike one way is to itself."""
    print("\n| one | other | from | rank correlation | median difference | best of one: its rank in the other |")
    print("|---|---|---|---:|---:|---:|")
    for (one, a), (other, b) in combinations(runs, 2):
        if one != other and a != b:
            continue
        ours, theirs = runs[one, a], runs[other, b]
        mine, yours = ranks(ours), ranks(theirs)
        like = statistics.correlation(*zip(*((mine[n], yours[n]) for n in ours), strict=True))
        apart = [abs(ours[n] - theirs[n]) for n in ours if math.isfinite(ours[n]) and math.isfinite(theirs[n])]
        best = [min(v, key=lambda n, v=v: v[n]) for v in (ours, theirs)]
        places = f"{yours[best[0]]:.0f}, and {mine[best[1]]:.0f}"
        start = f"the same weights and batches ({a})" if a == b else f"others ({a}, {b})"
        print(f"| {one} | {other} | {start} | {like:.3f} | {statistics.median(apart):.4f} | {places} |")


def noise(runs: dict[tuple[str, int], Values], sweeps: list[Row]) -> None:
    """How good the sweeps' winners are: every configuration trained to the end, several times."""
    values = {n: [run[n] for run in runs.values()] for n in next(iter(runs.values()))}
    means = {number: statistics.mean(v) for number, v in values.items()}
    ranked = sorted(means, key=lambda number: means[number])
    print(f"\n{len(runs)} trainings to the end of each.\n")
    print("| trial | who found it | rank | mean loss | from, to |\n|---:|---|---:|---:|---:|")
    winners: dict[int, str] = {}
    for row in sweeps:
        number = row["best"]["number"]
        winners[number] = "; ".join(dict.fromkeys(filter(None, (winners.get(number), named(row)))))
    for number in dict.fromkeys([*ranked[:3], *winners]):
        span = f"{min(values[number]):.4f} to {max(values[number]):.4f}"
        found = winners.get(number, "")
        print(f"| {number} | {found} | {1 + ranked.index(number)} | {means[number]:.4f} | {span} |")


def main() -> None:
    rows: list[Row] = []
    for path in sys.argv[1:]:
        found = json.loads(Path(path).read_text())
        print(f"{Path(path).stem}: {found['environment']}\n")
        rows += found["rows"]
    sweeps = [row for row in rows if row.get("pruner") != "none"]
    show(sweeps)
    if again := [row for row in rows if row.get("pruner") == "none"]:
        runs = gathered(again)
        agreement(runs)
        noise(runs, sweeps)


if __name__ == "__main__":
    main()
