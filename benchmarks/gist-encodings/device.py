"""What each way costs the device alone: the kernels of a step, each by the fastest of its runs.

    python benchmarks/gist-encodings/device.py --out results/2026-11-16-h200-device.json

Call by call, a step of short calls waits for the interpreter, and beside other processes it waits for them. The kernels
of a step are the same every time, in the same order; the shortest run of each, added up, is what the device needs, and
neither gaps nor neighbours are in it. Where a way could be captured, this is what its CUDA graph takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from run import DEVICE, KINDS, Case, Subject, synchronise
from torch.profiler import ProfilerActivity, profile

_NAMED = 12
"""Kernels that are named, those that take longest."""


def on_device(event: Any) -> bool:
    """Whether an event is a kernel or a copy, and not the name of a stretch of time."""
    named = getattr(event, "is_user_annotation", bool)() or event.name().startswith(("Optimizer.", "ProfilerStep"))
    return str(event.device_type()).endswith("CUDA") and not named


def kernels(subject: Subject, steps: int) -> dict[str, Any]:
    """Milliseconds of a step's kernels, how many there are, and which take longest; none if steps are not alike."""
    synchronise()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            subject.step()
        synchronise()
    events = [e for e in trace.profiler.kineto_results.events() if on_device(e)]
    events.sort(key=lambda e: e.start_ns())
    per_step, left = divmod(len(events), steps)
    names = [[e.name() for e in events[i * per_step : (i + 1) * per_step]] for i in range(steps)]
    alike = not left and all(row == names[0] for row in names)
    least: dict[str, int] = {}
    if alike:
        for runs in (events[i::per_step] for i in range(per_step)):
            name = runs[0].name()
            least[name] = least.get(name, 0) + min(e.duration_ns() for e in runs)
    longest = sorted(least, key=lambda name: -least[name])[:_NAMED]
    named = {name[:80]: round(least[name] / 1e6, 3) for name in longest}
    found = {"device_ms": sum(least.values()) / 1e6, "longest": named} if alike else {}
    return {"kernels": per_step, "alike": alike, **found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--cases", default="densenet121:64x224,resnet50:64x224,inception_v3:64x299")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--effects", default="", help="kinds whose gradients are compared with exact ones")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    started, rows = time.time(), list[dict[str, Any]]()
    for case in map(Case.of, args.cases.split(",")):
        subject = Subject(case)
        for kind in ["plain", *args.kinds.split(",")]:
            row = {**case.facts, "how": kind}
            try:
                if kind != "plain":
                    row |= subject.prepare(kind, effects=kind in args.effects.split(","))
                subject.enter(kind)
                subject.warm_up()
                row |= subject.peak()
                row |= kernels(subject, args.steps) if DEVICE == "cuda" else {"device_ms": 1.0}
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            rows.append(row)
            print(f"{time.time() - started:5.1f} s", json.dumps(row), flush=True)
            args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        del subject
        gc.collect()


if __name__ == "__main__":
    main()
