"""The tables of the README, from the result files: python report.py results/*.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def best_loss(row: Row) -> float:
    return float(row["best_loss"] if "best_loss" in row else row["best"]["value"])


def show(path: str) -> None:
    found = json.loads(Path(path).read_text())
    print(f"{Path(path).stem}: {found['environment']}\n")
    print(
        "| trials at a time | training s | steps of trials | ms per step | complete | pruned | diverged | best loss |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in found["rows"]:
        each = 1e3 * row["training_s"] / row["member_steps"]
        counts = " | ".join(str(row["states"].get(s, 0)) for s in ("complete", "pruned", "diverged"))
        cells = f"{row['members']} | {row['training_s']:.1f} | {row['member_steps']:,} | {each:.2f}"
        print(f"| {cells} | {counts} | {best_loss(row):.3f} |")
    pairs = {row["seed"]: row for row in found["rows"] if row["members"] > 1}
    for alone in (row for row in found["rows"] if row["members"] == 1):
        together = pairs[alone["seed"]]
        print(f"\nTotal {alone['training_s'] / together['training_s']:.2f}x, with all around it "
              f"{alone['wall_s'] / together['wall_s']:.2f}x, in CPU time "
              f"{alone.get('cpu_s', 0) / together.get('cpu_s', 1):.2f}x.")  # fmt: skip
        for row, other in ((together, alone), (alone, together)):
            number = row["best"].get("number")
            trials = other["trials"] if isinstance(other["trials"], list) else []
            there = next((t for t in trials if t["number"] == number), None)
            if there is not None:
                print(f"Best with {row['members']} at a time: trial {number}, loss {best_loss(row):.4f}; "
                      f"with {other['members']}: {there['state']}, {there['value']:.4f}.")  # fmt: skip
    print()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        show(name)
