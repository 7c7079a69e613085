"""The tables of the README, from the result files: python report.py results/DATE-sweep.json results/DATE-noise.json."""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def named(row: Row) -> str:
    if row["members"] == 1:
        return "1, plain PyTorch" + (", channels last" if row.get("channels_last") else "")
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
        for fused in (row for row in rows if row["members"] > 1 and row["file"] == alone["file"]):
            ratios = [alone[k] / fused[k] for k in ("training_s", "wall_s", "cpu_s")]
            print("\n{}: {:.2f}x, with all around it {:.2f}x, in CPU time {:.2f}x.".format(named(fused), *ratios))
            print(f"Decisions on trials that are the same: {same(fused, alone)}.{pace(fused, alone)}")
    decisions(rows)


def decisions(rows: list[Row]) -> None:
    """On how many trials two sweeps decide alike, by which ways the two are of; losses and ranks of their winners."""
    print("\n| sweeps | pairs | decisions that are the same | winner of one in the other |\n|---|---:|---:|---|")
    for kind, pairs in by_kind(rows, named).items():
        alike = [equal_states(one, other) for one, other in pairs]
        ends = [fate(a, b) for one, other in pairs for a, b in ((one, other), (other, one))]
        told = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(sorted(ends)))
        print(f"| {kind} | {len(pairs)} | {spread(alike)} of {len(rows[0]['trials'])} | {told} |")


def by_kind(things: list[Any], name: Any) -> dict[str, list[tuple[Any, Any]]]:
    """Pairs of things, by the names of the two."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    for one, other in combinations(things, 2):
        found.setdefault(" – ".join(sorted((name(one), name(other)))), []).append((one, other))
    return dict(sorted(found.items()))


def spread(values: list[float], digits: int = 0) -> str:
    """From the smallest to the largest."""
    low, high = (f"{v:.{digits}f}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def equal_states(one: Row, other: Row) -> int:
    states = {t["number"]: t["state"] for t in other["trials"]}
    return sum(t["state"] == states.get(t["number"]) for t in one["trials"])


def fate(one: Row, other: Row) -> str:
    """What became of the best trial of a sweep in another."""
    best = one["best"]["number"]
    finished = sorted((t["value"], t["number"]) for t in other["trials"] if t["state"] == "complete")
    places = [number for _, number in finished]
    return f"{places.index(best) + 1}. of {len(places)}" if best in places else "pruned"


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


@dataclass
class Run:
    """All configurations trained to the end once."""

    name: str
    weights: int
    """The seed of first weights and batches."""
    values: Values


def gathered(again: list[Row]) -> list[Run]:
    """Rows are whole runs or shares of one, which are joined."""
    found: list[Run] = []
    for row in again:
        values = {t["number"]: t["value"] if t["state"] == "complete" else math.inf for t in row["trials"]}
        for run in found:
            if (run.name, run.weights) == (named(row), row["weights"]) and not run.values.keys() & values.keys():
                run.values |= values
                break
        else:
            found.append(Run(named(row), row["weights"], values))
    whole = max(len(run.values) for run in found)
    return [run for run in found if len(run.values) == whole]


def ranks(values: Values) -> Values:
    """The place of each trial, equal ones sharing theirs."""
    order = sorted(values, key=lambda number: values[number])
    found: Values = {}
    for number in order:
        equal = [i for i, other in enumerate(order) if values[other] == values[number]]
        found[number] = statistics.mean(equal) + 1
    return found


_FIRST = 8


def agreement(runs: list[Run]) -> None:
    """How alike two ways are that train all configurations, beside how alike one way is to itself."""
    print(
        "\n| trained to the end | from | pairs | rank correlation | median difference | rank of the other's best",
        end="",
    )
    print(f" | of the best {_FIRST}, in both |\n|---|---|---:|---:|---:|---:|---:|")
    for kind, pairs in by_kind(runs, lambda run: run.name).items():
        for start in ("the same weights and batches", "others"):
            chosen = [(a.values, b.values) for a, b in pairs if (a.weights == b.weights) == (start != "others")]
            if not chosen or (start == "others" and "fused – 16" not in kind):
                continue
            like, apart, places, shared = [], [], [], []
            for ours, theirs in chosen:
                mine, yours = ranks(ours), ranks(theirs)
                like.append(statistics.correlation(*zip(*((mine[n], yours[n]) for n in ours), strict=True)))
                finite = [n for n in ours if math.isfinite(ours[n]) and math.isfinite(theirs[n])]
                apart.append(statistics.median(abs(ours[n] - theirs[n]) for n in finite))
                places += [
                    yours[min(ours, key=lambda n, v=ours: v[n])],
                    mine[min(theirs, key=lambda n, v=theirs: v[n])],
                ]
                shared.append(len(set(first(ours)) & set(first(theirs))))
            cells = [spread(like, 3), spread(apart, 4), spread(places), spread(shared)]
            print(f"| {kind} | {start} | {len(chosen)} | " + " | ".join(cells) + " |")


def first(values: Values) -> list[int]:
    return sorted(values, key=lambda n: values[n])[:_FIRST]


def noise(runs: list[Run], sweeps: list[Row]) -> None:
    """How good the sweeps' winners are: every configuration trained to the end, several times."""
    values = {n: [run.values[n] for run in runs] for n in runs[0].values}
    means = {number: statistics.mean(v) for number, v in values.items()}
    ranked = sorted(means, key=lambda number: means[number])
    print(f"\n{len(runs)} trainings to the end of each.\n")
    print("| trial | who found it | rank | mean loss | from, to |\n|---:|---|---:|---:|---:|")
    winners: dict[int, str] = {}
    for row in sweeps:
        number = row["best"]["number"]
        winners[number] = "; ".join(dict.fromkeys(filter(None, (winners.get(number), named(row)))))
    for number in sorted({*ranked[:3], *winners}, key=ranked.index):
        span = f"{min(values[number]):.4f} to {max(values[number]):.4f}"
        found = winners.get(number, "")
        print(f"| {number} | {found} | {1 + ranked.index(number)} | {means[number]:.4f} | {span} |")


def main() -> None:
    rows: list[Row] = []
    for path in sys.argv[1:]:
        found = json.loads(Path(path).read_text())
        print(f"{Path(path).stem}: {found['environment']}\n")
        rows += [row | {"file": path} for row in found["rows"]]
    sweeps = [row for row in rows if row.get("pruner") != "none"]
    if sweeps:
        show(sweeps)
    if again := [row for row in rows if row.get("pruner") == "none"]:
        runs = gathered(again)
        agreement(runs)
        noise(runs, sweeps)


if __name__ == "__main__":
    main()
