"""Print the table of the README from a results file: python table.py results/….json"""

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
    document = json.loads(Path(sys.argv[1]).read_text())
    plain = {r["side"]: r for r in document["rows"] if r["how"] == "plain" and "failed" not in r}
    print("| side | how | tile | stops after | time | of plain | peak memory | of plain | StreamingCNN's rule |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in document["rows"]:
        base = plain.get(row["side"])
        streamed = row["how"] != "plain"
        seconds, size = row["time_s"], row["peak_bytes"]
        ratio = f"{seconds / base['time_s']:.2f}x" if streamed and base else ""
        share = f"{size / base['peak_bytes']:.2f}x" if streamed and base else ""
        where = (row["boundary"] or "the pool") if streamed else ""
        rule = f"{streaming_cnn(row['tile']):.1f}x" if streamed and not row["boundary"] else ""
        cells = [f"{row['side']:,}", row["how"], row.get("tile", ""), where, f"{seconds:.3g} s", ratio]
        print("| " + " | ".join(map(str, [*cells, f"{size / 2**30:.1f} GiB", share, rule])) + " |")


if __name__ == "__main__":
    main()
