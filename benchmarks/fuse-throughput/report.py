"""The tables of the README, from the result files.

python report.py results/2026-11-15-h200-first.json results/2026-11-15-h200-second.json
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def load(paths: list[str]) -> list[Row]:
    rows = []
    for path in paths:
        rows += [r | {"file": Path(path).stem} for r in json.loads(Path(path).read_text())["rows"]]
    return [r for r in rows if "step_s" in r or r["what"] == "prediction"]


def find(rows: list[Row], **facts: Any) -> list[Row]:
    return [r for r in rows if all(r.get(k) == v for k, v in facts.items()) and "step_s" in r]


def main() -> None:
    rows = load(sys.argv[1:])
    print(
        "| workload | precision | serial, plain | serial, graphed | fused | streams | best over plain | over graphed |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    gains = []
    for key in dict.fromkeys((r["file"], r["workload"], r["precision"]) for r in rows):
        _, workload, precision = key
        own = [r for r in rows if (r["file"], r["workload"], r["precision"]) == key]
        eager = find(own, what="eager serial")
        graphed = [r for r in own if r["what"].startswith("graphed serial") and not r.get("refused")]
        fused = [r for r in own if r["what"].startswith("fused") and r["members"] == 16 and "step_s" in r]
        streams = [r for r in own if r["what"].startswith("streams") and r["members"] == 16 and not r.get("refused")]
        if not eager or not fused + streams:
            continue
        plain = 16e3 * eager[0]["step_s"]
        best_serial = 16e3 * min(r["step_s"] for r in graphed) if graphed else math.nan
        times = [1e3 * min((r["step_s"] for r in group), default=math.nan) for group in (fused, streams)]
        best = min(t for t in times if not math.isnan(t))
        if graphed:
            gains.append((workload, precision, best_serial / best))
        cells = [f"{t:.1f}" if not math.isnan(t) else "–" for t in (plain, best_serial, *times)]
        over = f"{best_serial / best:.1f}x" if graphed else "–"
        print(f"| {workload} | {precision} | {' | '.join(cells)} | {plain / best:.1f}x | {over} |")
    mean = math.exp(sum(math.log(g) for _, _, g in gains) / len(gains))
    print(f"\nGeometric mean over graphed serial, {len(gains)} rows: {mean:.2f}x\n")
    print("| workload | precision | way | " + " | ".join(f"B = {n}" for n in (1, 2, 4, 8, 16, 32)) + " |")
    print("|---|---|---|" + "---:|" * 6)
    for key in dict.fromkeys((r["file"], r["workload"], r["precision"], r["what"]) for r in rows if r["members"] == 32):
        found = {r["members"]: r for r in rows if (r["file"], r["workload"], r["precision"], r["what"]) == key}
        eager = [
            r for r in rows if (r["file"], r["workload"], r["precision"]) == key[:3] and r["what"] == "eager serial"
        ]
        cells = [f"{1 / found[n]['step_s'] * n:,.0f}" if n in found else "–" for n in (1, 2, 4, 8, 16, 32)]
        plain = f"plain PyTorch {1 / eager[0]['step_s']:,.0f}"
        print(f"| {key[1]} | {key[2]} | {key[3]} ({plain}) | {' | '.join(cells)} |")
    print("\n| workload | precision | members | predicted MiB | measured MiB | error |\n|---|---|---:|---:|---:|---:|")
    for r in rows:
        if r["what"].startswith("fused") and r.get("predicted_bytes"):
            p, m = r["predicted_bytes"] / 2**20, r["peak_bytes"] / 2**20
            error = f"{100 * (p / m - 1):+.0f} %"
            print(f"| {r['workload']} | {r['precision']} | {r['members']} | {p:,.0f} | {m:,.0f} | {error} |")
    print(
        "\n| workload | precision | predicted ms a step of 16 | measured that way | error |\n|---|---|---:|---:|---:|"
    )
    for r in rows:
        if r["what"] == "prediction":
            what = "streams" if "streams" in r["way"] else "fused"
            same = find(rows, file=r["file"], workload=r["workload"], precision=r["precision"], what=what, members=16)
            if same:
                p, m = 1e3 * r["predicted_step_s"], 1e3 * same[0]["step_s"]
                print(
                    f"| {r['workload']} | {r['precision']} | {p:.2f} ({what}) | {m:.2f} | {100 * (p / m - 1):+.0f} % |"
                )


if __name__ == "__main__":
    main()
