"""How every layer and loss of torch.nn is run for many members, and how far its gradients are from serial ones.

python run.py --out results/DATE.json        prints the table of the README
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from outcore.errors import OutcoreError  # noqa: E402
from tests.fusion.layers import CASES  # noqa: E402
from tests.fusion.test_layers import run_case  # noqa: E402

MEANING = {
    "fused": "one operation for all members",
    "vmap": "one operation for all members, by torch's own batching rules",
    "members": "one operation per member",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in CASES:
        try:
            error, way, note = run_case(name)
        except OutcoreError as refusal:
            error, way, note = None, "refused", str(refusal)
        rows.append({"layer": name, "way": way, "error": error, "note": note})
    facts = {"torch": torch.__version__, "members": 3, "dtype": "float64", "date": time.strftime("%Y-%m-%d")}
    given.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1))
    print("| run as | cases | layers |\n|---|---:|---|")
    for way, meaning in MEANING.items():
        own = [r["layer"] for r in rows if r["way"] == way]
        print(f"| **{way}**: {meaning} | {len(own)} | {'; '.join(sorted(own))} |")
    refused = [r for r in rows if r["way"] == "refused"]
    worst = max(r["error"] for r in rows if r["error"] is not None)
    print(f"\n{len(rows)} cases; largest difference {worst:.1e}; refused: {len(refused)}")
    for row in refused:
        print(f"- {row['layer']}: {row['note']}")


if __name__ == "__main__":
    main()
