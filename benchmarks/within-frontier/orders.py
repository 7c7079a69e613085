"""Plain steps in TF32 with images as they come, with images turned to channels last, and with weights turned too.

python orders.py --out results/DATE-orders-h200.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from cases import Case, cases_of
from networks import NAMES

HOW = {"images": "tf32 channels_last", "given": "tf32", "weights": "tf32 channels_last weights"}


def measured(case: Case, how: str) -> dict[str, Any]:
    """A few steps of plain training."""
    training = case.fresh()
    if how != "given":
        training.images = training.images.to(memory_format=torch.channels_last)
    if how == "weights":
        training.model.to(memory_format=torch.channels_last)
    training.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = training.timed(6 if case.small else 2)
    return {"ms": times[len(times) // 2], "fastest_ms": times[0], "peak": torch.cuda.max_memory_allocated()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "networks": NAMES}
    rows = []
    for how, precision in HOW.items():
        for case in cases_of(given.only):
            if case.bf16:
                continue
            rows.append({**case.key, "precision": precision, "how": "plain", **measured(case, how)})
            torch.cuda.empty_cache()
            given.out.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
