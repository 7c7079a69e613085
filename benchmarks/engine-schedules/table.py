"""The table of the README, from a result.

python benchmarks/engine-schedules/table.py benchmarks/engine-schedules/results/2026-11-15-cpu-2-ranks.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

MICRO_BATCHES = 4


def law(name: str, ranks: int) -> float | None:
    """Of a schedule over plain model parallelism, for equal stages with backwards twice as long as forwards."""
    m, d = MICRO_BATCHES, ranks
    units = {"model-parallel": 3 * d * m, "gpipe": 3 * (m + d - 1), "1f1b": 3 * (m + d - 1)}
    units["gems"] = d + 2 * d * m + m - 1
    return units["model-parallel"] / units[name] if name in units else None


def _cells(name: str, row: dict[str, Any], ranks: int) -> list[str]:
    ideal = law(name, ranks)
    cells = [name, f"{row['step_s'] * 1e3:.1f} ms", f"{row['speedup_over_model_parallel']:.3f}"]
    cells.append(f"{ideal:.3f}" if ideal else "")
    cells.append(f"{row['step_s'] / row['closed_form_s']:.3f}" if "closed_form_s" in row else "")
    cells.append(f"{row['timeline_s'] / row['predicted_s']:.3f}" if "predicted_s" in row else "")
    if row.get("copies_s"):
        cells.append(f"{row['copies_beside_compute_s'] * 1e3:.1f} of {row['copies_s'] * 1e3:.1f} ms")
    cells.append(f"{max(row['peak_bytes']) / 2**20:.1f} MiB")
    if "predicted_peak_bytes" in row:
        planned = max(p / q for p, q in zip(row["peak_bytes"], row["predicted_peak_bytes"], strict=True))
        cells.append(f"{planned:.2f}")
    return cells


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    table, ranks = document["table"], document["arguments"]["ranks"]
    copies = any(row.get("copies_s") for row in table.values())
    head = ["schedule", "step", "over model parallel", "ideal", "measured / closed form", "measured / simulated"]
    head += [*(["copies beside compute"] if copies else []), "peak of a rank", "measured / planned"]
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    for name, row in table.items():
        cells = _cells(name, row, ranks)
        print("| " + " | ".join(cells + [""] * (len(head) - len(cells))) + " |")
    print()
    for ours, theirs in (("gpipe", "torch gpipe"), ("1f1b", "torch 1f1b")):
        if theirs in table:
            ratio = table[theirs]["step_s"] / table[ours]["step_s"]
            less = max(table[ours]["peak_bytes"]) / max(table[theirs]["peak_bytes"])
            print(f"{ours}: {ratio:.3f} times as fast as torch's, with {less:.0%} of its peak")


if __name__ == "__main__":
    main()
