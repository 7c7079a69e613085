"""The networks of the published figures, trained on the GPU that is here: here.py OUT.jsonl [SECONDS].

What is predicted for another GPU is the estimate for the H200, carried over. Where a published figure is missed, a
step of the same network measured here says which of the two was wrong. One line of JSON for each setup.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from run import HERE, job_of

from outcore.machine import parse
from outcore.whatif.recording import record_setup
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.trial import run_setup


def main() -> None:
    path, limit_s = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 150.0
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    end = time.monotonic() + limit_s
    published = json.loads((HERE / "published.json").read_text())["rows"]
    wanted = dict.fromkeys((row["network"], row["precision"] == "amp") for row in published)
    batches = {(row["network"], row["precision"] == "amp"): row["batch"] for row in published}
    with path.open("a") as lines:
        for network, amp in wanted:
            row: dict[str, Any] = {"network": network, "amp": amp, "batch": batches[network, amp]}
            if time.monotonic() < end:
                images = not network.startswith("bert")
                autocast = torch.float16 if amp else None
                setup = TrainingSetup(job_of(network), row["batch"], autocast=autocast, channels_last=amp and images)
                try:
                    row["predicted_s"] = record_setup(setup, parse("h200").devices[0]).step.simulate().step_s
                    row |= asdict(run_setup(setup, "cuda" if torch.cuda.is_available() else "cpu", seconds=0.4))
                except Exception as error:  # one that fails must not end the others
                    row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            print(row, flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
