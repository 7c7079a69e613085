"""The costs of every case, measured on the device; where it is shared, bytes are right and times are not.

    python costs.py --out costs/ [--only unet] [--seconds 4]
    python costs.py --out costs/ --channels-last                # of images that are turned inside the network
    python costs.py --out costs/ --from costs/ --by-shapes results/2026-11-16-h200-frontier.json

With ``--by-shapes`` times are estimated from shapes for an H200, and scaled so that the plain step takes what it took
in a result; bytes stay as measured, or as they follow from shapes where nothing was measured. That needs no device.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import cases
import torch
from cases import TURNED, Case, cases_of
from networks import build
from rows import plain_ms

import outcore
from outcore.cost.costs import CallCost
from outcore.cost.predicted.rough import without_gaps
from outcore.machine import parse
from outcore.machine.clock import TimedRuns
from outcore.memory.offload.bandwidth import measured_tier, memory_rate
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel

RATE, LINK = 3.54e12, OffloadTarget(45.6e9, 45.7e9, None, 1 << 20)
"""An H200's memory and its link to the host, as measured."""


def measured(case: Case, seconds: float, turned: bool) -> StepModel:
    """On the device."""
    training = case.fresh()
    with case.precision():
        graph = case.graph(training.model, training.images, turned)
        costs = without_gaps(outcore.measure(graph, time_limit_s=seconds))
    device = training.images.device
    return StepModel(graph, costs, 0.0, measured_tier(device), memory_rate(device))


def by_shapes(case: Case, known: StepModel | None, plain_s: float | None, turned: bool) -> StepModel:
    """Without a device."""
    model = build(case.name)
    model = model.to(memory_format=torch.channels_last) if case.bf16 else model
    with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
        graph = case.graph(model, (case.batch, 3, case.side, case.side), turned)
        estimated = without_gaps(outcore.estimate(graph, parse("h200")))
    costs = known.costs if known is not None else estimated
    total = sum(t.median_s for c in estimated.calls.values() for t in (c.forward, c.backward) if t is not None)
    factor = plain_s / total if plain_s is not None else 1.0

    def timed(cost: CallCost) -> CallCost:
        like = estimated.calls[cost.call]
        return replace(cost, forward=scaled(like.forward, factor), backward=scaled(like.backward, factor))

    costs = replace(costs, calls={name: timed(cost) for name, cost in costs.calls.items()})
    if known is not None:
        graph = replace(known.graph, executable=graph.executable)
    return StepModel(graph, costs, 0.0, LINK, RATE)


def scaled(timing: TimedRuns | None, factor: float) -> TimedRuns | None:
    if timing is None:
        return None
    return replace(timing, **{n: getattr(timing, n) * factor for n in ("min_s", "median_s", "max_s", "mean_s")})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--sizes", default="1x4096,32x224")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the times of one case")
    parser.add_argument("--from", dest="known", type=Path, help="a folder of costs with measured bytes")
    parser.add_argument("--by-shapes", type=Path, help="a result to scale to; need not be there")
    parser.add_argument("--channels-last", dest="turned", action="store_true", help="TF32 with images turned inside")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    given.out.mkdir(parents=True, exist_ok=True)
    took = {}
    if given.by_shapes is not None and given.by_shapes.exists():
        took = plain_ms(json.loads(given.by_shapes.read_text())["rows"])
    for case in cases_of(given.only, given.sizes):
        if given.turned and case.bf16:
            continue  # which is in that order already
        begun, label = time.time(), case.label + (TURNED if given.turned else "")
        try:
            if given.by_shapes is not None:
                known = case.costs(given.known, given.turned) if given.known is not None else None
                precision = case.key["precision"] + (" channels_last" if given.turned else "")
                plain = took.get((case.name, case.batch, case.side, precision))
                keeping = by_shapes(case, known, plain / 1e3 if plain else None, given.turned)
            else:
                keeping = measured(case, given.seconds, given.turned)
        except Exception as error:
            print(label, type(error).__name__, str(error)[:200], flush=True)
            continue
        (given.out / f"{label}.keeping").write_bytes(gzip.compress(pickle.dumps(keeping)))
        peak = keeping.plain.peak_bytes / 2**30
        print(f"{label} {keeping.plain_s * 1e3:.1f} ms, {peak:.2f} GiB ({time.time() - begun:.1f} s)", flush=True)
        del keeping
        if cases.DEVICE == "cuda" and torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
