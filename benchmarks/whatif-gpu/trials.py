"""Trains every network as it is and with every technique, and with shares of the GPU; writes what was measured.

    python benchmarks/whatif-gpu/trials.py techniques OUT.jsonl SECONDS
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 python benchmarks/whatif-gpu/trials.py shares OUT.jsonl SECONDS

One line per trial. Nothing is predicted here: `table.py` does that from the lines, without a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import networks
import torch

import outcore
from outcore.whatif.setup import TrainingSetup
from outcore.whatif.techniques import parse_techniques
from outcore.whatif.trial import run_setup


def setup_of(job: outcore.Job, question: str) -> TrainingSetup:
    setup = TrainingSetup(job)
    for technique in parse_techniques(question) if question else ():
        setup = technique.setup(setup)
    return setup


def rates(device: str) -> dict[str, float]:
    """What this share of the device copies and multiplies."""
    if device == "cpu":
        return {}
    copied = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    into = torch.empty_like(copied)
    found = {"copy_bytes_per_s": 2 * copied.numel() / _seconds(lambda: into.copy_(copied))}
    for name, dtype in (("tf32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(8192, 8192, device=device, dtype=dtype)
        found[name] = 2 * 8192**3 / _seconds(lambda a=a: a @ a)
    return found | {"sms": torch.cuda.get_device_properties(0).multi_processor_count}


def _seconds(call: Any, runs: int = 5) -> float:
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(runs):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / runs


def main() -> None:
    what, path, limit_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    only = sys.argv[4].split(",") if len(sys.argv) > 4 else []
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    end = time.monotonic() + limit_s
    share = int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
    with path.open("a") as lines:

        def write(row: dict[str, Any]) -> None:
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            print(row.get("network"), row.get("question"), share, row.get("step_s"), row.get("error", ""), flush=True)

        write({"what": what, "share": share, "torch": torch.__version__, **rates(device)})
        if what == "shares":
            order = [(name, q) for name in networks.SHARES for q in ("", "amp")]
        else:
            plain = [(name, q) for name in networks.VERIFIED for q in ("", *networks.QUESTIONS[name])]
            order = [o for o in plain if o[1] != "compile"] + [o for o in plain if o[1] == "compile"]
        for name, question in order:
            if only and name not in only:
                continue
            if time.monotonic() > end:
                write({"network": name, "question": question, "share": share, "error": "no time left"})
                continue
            torch.manual_seed(0)
            torch._dynamo.reset()
            job = (networks.SHARES if what == "shares" else networks.VERIFIED)[name]
            row: dict[str, Any] = {"network": name, "question": question, "share": share}
            start = time.monotonic()
            try:
                row |= asdict(run_setup(setup_of(job, question), device, seconds=0.25))
            except Exception as error:  # one that fails must not end the others
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            row["took_s"] = round(time.monotonic() - start, 2)
            write(row)
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
