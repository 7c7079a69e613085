"""Print the table of the README from a results file: python table.py results/….json"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def _tile(row: dict[str, Any]) -> str:
    sides = row.get("tile", "")
    return " x ".join(map(str, sides)) if isinstance(sides, list) else str(sides)


def main() -> None:
    document = json.loads(Path(sys.argv[1]).read_text())
    plain = {r["side"]: r for r in document["rows"] if r["how"] == "plain" and "failed" not in r}
    print("| side | how | tile | time | of plain | peak memory | of plain |")
    print("|---|---|---|---|---|---|---|")
    for row in document["rows"]:
        if "failed" in row:
            print(f"| {row['side']:,} | {row['how']} |  | out of memory |  |  |  |")
            continue
        base = plain.get(row["side"]) if row["how"] != "plain" else None
        ratio = f"{row['time_s'] / base['time_s']:.2f}x" if base else ""
        share = f"{row['peak_bytes'] / base['peak_bytes']:.2f}x" if base else ""
        how = f"{row['how']}, chosen for {row['memory']}" if "memory" in row else row["how"]
        cells = [f"{row['side']:,}", how, _tile(row), f"{row['time_s']:.3g} s", ratio]
        print("| " + " | ".join(map(str, [*cells, f"{row['peak_bytes'] / 2**30:.1f} GiB", share])) + " |")


if __name__ == "__main__":
    main()
