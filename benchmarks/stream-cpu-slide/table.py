"""Print the tables of the README from results files: python table.py results/a.json results/b.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    rows = [row for path in sys.argv[1:] for row in json.loads(Path(path).read_text())["rows"]]
    print("| what | figure |")
    print("|---|---|")
    for row in rows:
        if row["what"] == "step":
            tiles = row["tiles"]
            print(f"| processor time of a training step, reading and decoding included | {row['cpu_s']:.0f} s |")
            share = row["waited_s"] / row["time_s"]
            print(f"| time by the clock | {row['time_s']:.0f} s, of which tiles waited {share:.1%} for pixels |")
            print(f"| largest resident memory of the process | {row['resident_bytes'] / 2**30:.2f} GiB |")
            print(f"| tensors, predicted | {row['predicted_bytes'] / 2**20:.0f} MiB |")
            print(f"| tiles | {tiles['forward']} computed per pass, {tiles['reused']} reused in both |")
        elif row["what"] == "infer":
            print(
                f"| `outcore infer` against untiled crops | {row['pixels_differing']} of {row['pixels_compared']:,} "
                "pixels differ |"
            )
    print("\n| share of tissue | tiles computed per pass | processor time of a step |")
    print("|---|---|---|")
    for row in rows:
        if row["what"] == "share" and "cpu_s" in row:
            print(f"| {row['share']} | {row['tiles']['forward']} | {row['cpu_s']:.1f} s |")


if __name__ == "__main__":
    main()
