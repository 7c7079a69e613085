"""The tables of the README, from the result files: python report.py results/DATE-sweep.json results/DATE-noise.json."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
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
    for alone in (row for row in rows if row["members"] == 1):
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


def noise(again: list[Row], sweeps: list[Row]) -> None:
    """Every configuration trained to the end, several times from other weights; and where the sweeps' winners are."""
    values: dict[int, list[float]] = {}
    for row in again:
        for trial in row["trials"]:
            if trial["state"] == "complete":
                values.setdefault(trial["number"], []).append(trial["value"])
    means = {number: statistics.mean(v) for number, v in values.items() if len(v) == len(again)}
    ranked = sorted(means, key=lambda number: means[number])

    def line(number: int, who: str) -> Iterator[str]:
        yield from (str(number), who, str(1 + ranked.index(number)), f"{means[number]:.4f}")
        yield f"{min(values[number]):.4f} to {max(values[number]):.4f}"

    print(f"\n{len(again)} trainings to the end of each; {len(ranked)} of 64 configurations never diverged.\n")
    print("| trial | who found it | rank of 64 | mean loss | from, to |\n|---:|---|---:|---:|---:|")
    winners: dict[int, str] = {}
    for row in sweeps:
        number = row["best"]["number"]
        winners[number] = "; ".join(filter(None, (winners.get(number), named(row))))
    for number in dict.fromkeys([*ranked[:3], *winners]):
        if number in means:
            print("| " + " | ".join(line(number, winners.get(number, ""))) + " |")


def main() -> None:
    rows: list[Row] = []
    for path in sys.argv[1:]:
        found = json.loads(Path(path).read_text())
        print(f"{Path(path).stem}: {found['environment']}\n")
        rows += found["rows"]
    sweeps = [row for row in rows if row.get("pruner") != "none"]
    show(sweeps)
    if again := [row for row in rows if row.get("pruner") == "none"]:
        noise(again, sweeps)


if __name__ == "__main__":
    main()
