"""Trains every network as it is and with every technique, and with shares of the GPU; writes what was measured.

    python benchmarks/whatif-gpu/trials.py techniques OUT.jsonl SECONDS [NETWORK,...]
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 python benchmarks/whatif-gpu/trials.py shares OUT.jsonl SECONDS [NETWORK,...]
    python benchmarks/whatif-gpu/trials.py warm - SECONDS NETWORK       fills the compiler's cache, times nothing

One line per trial. A technique is trained in turn with the network as it is, whose trial stands in the same line
(`plain`). Lines of shares name the kernels that took the most time. Nothing is predicted here: `table.py` does that
from the lines, without a GPU.
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
from outcore.whatif.trial import run_in_turn, run_setup


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


def kernels(setup: TrainingSetup, device: str, most: int = 24) -> dict[str, list[float]]:
    """Seconds and launches of a step by the name of a kernel, those that take the most time."""
    from torch.profiler import ProfilerActivity, profile

    from outcore.whatif.trial import _training_step

    step = _training_step(setup, torch.device(device))
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type.name == "CUDA":
            entry = sums.setdefault(event.name[:160], [0.0, 0])
            entry[0] += (event.time_range.end - event.time_range.start) * 1e-6
            entry[1] += 1
    return dict(sorted(sums.items(), key=lambda item: -item[1][0])[:most])


def trained(what: str, job: outcore.Job, question: str, device: str) -> dict[str, Any]:
    """What a line says of a setup."""
    setup = setup_of(job, question)
    if what == "shares":
        found = asdict(run_setup(setup, device, seconds=0.25))
        return found | ({"kernels": kernels(setup, device)} if device == "cuda" else {})
    if not question:
        return asdict(run_setup(setup, device, seconds=0.4))
    plain, own = run_in_turn((setup_of(job, ""), setup), device, seconds=0.4)
    return asdict(own) | {"plain": asdict(plain)}


def main() -> None:
    what, path, limit_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    only = sys.argv[4].split(",") if len(sys.argv) > 4 else []
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    end = time.monotonic() + limit_s
    share = int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
    if what == "warm":
        for name in only:
            run_setup(setup_of(networks.VERIFIED[name], "compile"), device, seconds=0.1)
        return
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
        if only:
            order = [o for name in only for o in order if o[0] == name]
        for name, question in order:
            if time.monotonic() > end:
                write({"network": name, "question": question, "share": share, "error": "no time left"})
                continue
            torch.manual_seed(0)
            torch._dynamo.reset()
            job = (networks.SHARES if what == "shares" else networks.VERIFIED)[name]
            row: dict[str, Any] = {"network": name, "question": question, "share": share}
            start = time.monotonic()
            try:
                row |= trained(what, job, question, device)
            except Exception as error:  # one that fails must not end the others
                row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            row["took_s"] = round(time.monotonic() - start, 2)
            write(row)
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
