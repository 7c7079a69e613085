"""The table of the README, from a result.

python benchmarks/engine-schedules/table.py benchmarks/engine-schedules/results/2026-11-15-cpu-2-ranks.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    table = document["table"]
    closed = {"model-parallel": 24, "gpipe": 15, "1f1b": 15, "gems": 21}
    print("| schedule | step | over model parallel | closed form | measured / simulated | peak of a rank | planned |")
    print("|---|---|---|---|---|---|---|")
    for name, row in table.items():
        law = f"{24 / closed[name]:.3f}" if name in closed else ""
        simulated = f"{row['timeline_s'] / row['predicted_s']:.3f}" if "predicted_s" in row else ""
        peak = f"{max(row['peak_bytes']) / 2**20:.1f} MiB"
        planned = f"{max(row['predicted_peak_bytes']) / 2**20:.1f} MiB" if "predicted_peak_bytes" in row else ""
        print(
            f"| {name} | {row['step_s'] * 1e3:.1f} ms | {row['speedup_over_model_parallel']:.3f} | {law} | {simulated} "
            f"| {peak} | {planned} |"
        )
    print()
    for ours, theirs in (("gpipe", "torch gpipe"), ("1f1b", "torch 1f1b")):
        if theirs in table:
            ratio = table[theirs]["step_s"] / table[ours]["step_s"]
            less = max(table[ours]["peak_bytes"]) / max(table[theirs]["peak_bytes"])
            print(f"{ours}: {ratio:.3f} times as fast as torch's, with {less:.0%} of its peak")


if __name__ == "__main__":
    main()
