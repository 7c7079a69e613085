"""Print the tables of the README from results files.

python table.py results/….json …            every row
python table.py --tissue results/….json …   slides with less and more tissue
python table.py --runs results/….json …     time and memory over plain, run by run
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HALO = 416
"""Pixels of ResNet-50's halo, both sides together, up to its last block."""


def streaming_cnn(tile: int) -> float:
    """Cost over plain of StreamingCNN's rule for this network: forward tiles overlap by the halo, backward ones by the
    pixels whose gradient is lost (811), in steps of the stride; forward to backward as 1 to 2, forward run twice."""
    given = tile + HALO
    back = (given - 811) // 32 * 32
    return ((given / tile) ** 2 + 3 * (given / back) ** 2) / 3


def rows_of(path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())["rows"]
    return found


def tissue(paths: list[str]) -> None:
    print(
        "| side | tile | share of tissue | tiles computed, of | time | waited for pixels |\n|---|---|---|---|---|---|"
    )
    rows = [row for path in paths for row in rows_of(path) if "tissue" in row]
    for row in sorted(rows, key=lambda r: (r["side"], r["tissue"])):
        all_tiles = (row["tiles"]["forward"] + row["tiles"]["backward"] + row["tiles"]["reused"]) // 2
        computed = f"{row['tiles']['forward']} of {all_tiles}"
        cells = [f"{row['side']:,}", row["tile"], f"{row['tissue']:.0%}", computed, f"{row['time_s']:.3g} s"]
        print("| " + " | ".join(map(str, [*cells, f"{row['waited_s']:.2g} s"])) + " |")


def runs(paths: list[str]) -> None:
    cases = [(side, boundary) for side in (4096, 8192) for boundary in (None, "layer3", "layer2")]
    print("| run | " + " | ".join(f"{side}, {boundary or 'the pool'}" for side, boundary in cases) + " |")
    print("|---|" + "---|" * len(cases))
    for path in paths:
        rows = rows_of(path)
        plain = {r["side"]: r for r in rows if r["how"] == "plain"}
        ours = {(r["side"], r["boundary"]): r for r in rows if r["how"] == "streamed" and r["tile"] == 2048}
        cells = []
        for side, boundary in cases:
            row, base = ours.get((side, boundary)), plain.get(side)
            shares = [row[k] / base[k] for k in ("time_s", "peak_bytes")] if row and base else None
            cells.append(f"{shares[0]:.2f}x at {shares[1]:.2f}x" if shares else "")
        print(f"| {Path(path).stem} | " + " | ".join(cells) + " |")


def main() -> None:
    if (other := {"--tissue": tissue, "--runs": runs}.get(sys.argv[1])) is not None:
        other(sys.argv[2:])
        return
    rows = [row for path in sys.argv[1:] for row in rows_of(path) if row.get("tissue", 1) == 1]
    plain = {r["side"]: r for r in rows if r["how"] == "plain" and "failed" not in r}
    heads = ["side", "how", "tile", "stops after", "time", "of plain", "peak memory", "of plain", "reserved"]
    heads += ["waited for pixels", "StreamingCNN's rule"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        if "failed" in row:
            print(f"| {row['side']:,} | {row['how']} |  |  | out of memory |  |  |  |  |  |  |")
            continue
        base = plain.get(row["side"])
        streamed = row["how"] != "plain"
        seconds, size = row["time_s"], row["peak_bytes"]
        cells = [
            f"{row['side']:,}",
            row["how"],
            row.get("tile", ""),
            (row["boundary"] or "the pool") if streamed else "",
            f"{seconds:.3g} s" + (" (first step)" if row.get("first_s") == seconds else ""),
            f"{seconds / base['time_s']:.2f}x" if streamed and base else "",
            f"{size / 2**30:.1f} GiB",
            f"{size / base['peak_bytes']:.2f}x" if streamed and base else "",
            f"{row['reserved_bytes'] / 2**30:.1f} GiB",
            f"{row['waited_s']:.2g} s" if "waited_s" in row else "",
            f"{streaming_cnn(row['tile']):.1f}x" if streamed and not row["boundary"] else "",
        ]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
