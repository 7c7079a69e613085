"""Print the table of the README from results files: python table.py results/….json …"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HALO = 416
"""Pixels of ResNet-50's halo, both sides together, up to its last block."""


def streaming_cnn(tile: int) -> float:
    """Cost over plain of StreamingCNN's rule for this network: forward tiles overlap by the halo, backward ones by the
    pixels whose gradient is lost (811), in steps of the stride; forward to backward as 1 to 2, forward run twice."""
    given = tile + HALO
    back = (given - 811) // 32 * 32
    return ((given / tile) ** 2 + 3 * (given / back) ** 2) / 3


def main() -> None:
    rows = [row for path in sys.argv[1:] for row in json.loads(Path(path).read_text())["rows"]]
    plain = {r["side"]: r for r in rows if r["how"] == "plain" and "failed" not in r}
    heads = ["side", "how", "tissue", "tile", "stops after", "time", "of plain", "peak memory", "of plain", "reserved"]
    heads += ["waited for pixels", "StreamingCNN's rule"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        if "failed" in row:
            print(f"| {row['side']:,} | {row['how']} |  |  |  | out of memory |  |  |  |  |  |  |")
            continue
        base = plain.get(row["side"])
        streamed = row["how"] != "plain"
        seconds, size = row["time_s"], row["peak_bytes"]
        cells = [
            f"{row['side']:,}",
            row["how"],
            f"{row.get('tissue', 1):.0%}",
            row.get("tile", ""),
            (row["boundary"] or "the pool") if streamed else "",
            f"{seconds:.3g} s",
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
