"""A pathology network from one node to 128 V100s, by simulation, beside the two times that a proposal reports.

    python benchmarks/pathology-scaling/run.py              (from anywhere; a minute on one core, no GPU)
    python benchmarks/pathology-scaling/run.py --table      (the README's tables, from the newest dated JSON)

ResNet-110-v2 on tiles of 1024 x 1024 is recorded on the meta device and costed for a V100 by shapes alone. It is then
cut, compiled and simulated under plain model parallelism, GEMS, and whatever the planner picks, with data-parallel
replicas on the rest of the GPUs. Nothing is trained. The number of tiles, which nobody reports, is chosen so that the
baseline (plain model parallelism on one node) takes the reported time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from curve import DEPTHS, SHOWN, draw, line

import outcore
from outcore.cost.predicted.estimate import estimate
from outcore.graph import Graph
from outcore.machine import parse
from outcore.models import ResNet110V2
from outcore.planner import CallWeights, Pipeline, plan, split
from outcore.planner.pipeline.lower import SCHEDULE_NAMES, predict_timeline
from outcore.planner.pipeline.schedule_model import Schedule
from outcore.program import Links, Stages, Timeline, compile_program, simulate

HERE = Path(__file__).parent
REPORTED = {"baseline_h": 7.25, "gpus": 128, "hours": 28 / 60}
GPUS, BATCH, PER_NODE = (4, 8, 16, 32, 64, 128), 128, 4
CAP_BYTES = 15 << 30


def recorded(batch: int) -> Graph:
    with torch.device("meta"):
        model = ResNet110V2(classes=2)
    return outcore.capture(model, torch.empty((batch, 3, 1024, 1024), device="meta"))


def links(gpus: int) -> Links:
    return Links.of(parse(f"{gpus // PER_NODE}x{PER_NODE}xv100"))


def times(weights: CallWeights, tiles: int) -> CallWeights:
    """The weights of so many tiles, each taking what one takes on its own."""
    calls = {
        name: replace(
            w,
            forward_s=w.forward_s * tiles,
            backward_s=w.backward_s * tiles,
            saved={k: b * tiles for k, b in w.saved.items()},
            workspace_bytes=w.workspace_bytes * tiles,
        )
        for name, w in weights.calls.items()
    }
    return replace(weights, calls=calls)


def run(stages: Stages, schedule: Schedule, tiles: int, replicas: int) -> Timeline:
    """A step in which each replica trains so many tiles, one at a time."""
    program = compile_program(stages, SCHEDULE_NAMES[schedule], batches=tiles, replicas=replicas)
    return simulate(program, stages, links(len(stages) * replicas))


def simulated(graph: Graph, weights: CallWeights) -> list[dict[str, Any]]:
    rows = []
    for depth in DEPTHS:
        for schedule in cast("tuple[Schedule, ...]", ("model_parallel", "gems")):
            pipeline = Pipeline(schedule, 1, 2)
            stages = split(graph, weights, stages=depth, pipeline=pipeline, memory_bytes=CAP_BYTES).stages
            for gpus in (g for g in GPUS if g >= depth):
                replicas = gpus // depth
                step = run(stages, schedule, BATCH // replicas, replicas)
                what = {"gpus": gpus, "stages": depth, "replicas": replicas, "schedule": schedule, "micro_batches": 1}
                rows.append(what | {"step_s": step.step_s, "peak_bytes": max(step.peak_bytes)})
    return rows


def planned(graph: Graph, weights: CallWeights) -> list[dict[str, Any]]:
    inside = parse(f"{PER_NODE}xv100").between_devices
    assert inside is not None
    rows = []
    for gpus in GPUS:
        start = time.process_time()
        chosen = plan(graph, weights, devices=gpus, memory_bytes=CAP_BYTES, link=inside, granularity="layer")
        planning_s = time.process_time() - start
        step = predict_timeline(chosen, graph, weights, links(gpus))
        what: dict[str, Any] = {
            "gpus": gpus,
            "stages": len(chosen.stages),
            "replicas": chosen.replicas,
            "schedule": chosen.schedule,
        }
        what |= {"micro_batches": chosen.micro_batches, "planning_s": planning_s, "why": chosen.why}
        rows.append(what | {"step_s": step.step_s, "peak_bytes": max(step.peak_bytes)})
    return rows


def measure() -> dict[str, Any]:
    graph, many = recorded(1), recorded(BATCH)
    weights = CallWeights.of(graph, estimate(graph, parse("v100")))
    together = CallWeights.of(many, estimate(many, parse("v100")))
    cuts = {d: split(graph, weights, stages=d, balance="memory") for d in (1, *DEPTHS)}
    rows, free = simulated(graph, weights), planned(many, times(weights, BATCH))
    baseline = next(r for r in rows if r["stages"] == r["gpus"] == PER_NODE and r["schedule"] == "model_parallel")
    tiles = REPORTED["baseline_h"] * 3600 * BATCH / baseline["step_s"]
    for row in (*rows, *free):
        row["hours"] = tiles / BATCH * row["step_s"] / 3600
    start = time.process_time()
    large = run(split(graph, weights, stages=4, pipeline=Pipeline("gems", 1, 2)).stages, "gems", 4, 256)
    seconds = time.process_time() - start
    return {
        "date": str(datetime.date.today()),
        "environment": {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.machine()},
        "reported": REPORTED,
        "tile": {
            "forward_s": sum(w.forward_s for w in weights.calls.values()),
            "backward_s": sum(w.backward_s for w in weights.calls.values()),
            "in_batch_s": sum(w.time_s for w in together.calls.values()) / BATCH,
            "parameter_bytes": sum(weights.parameters.values()),
            "smallest_peak_bytes": {d: max(cut.peak_bytes) for d, cut in cuts.items()},
        },
        "batch": BATCH,
        "cap_bytes": CAP_BYTES,
        "tiles": tiles,
        "simulated": rows,
        "planned": free,
        "large": {"ranks": 1024, "compile_and_simulate_s": seconds, "events": len(large.events)},
    }


def tables(data: dict[str, Any]) -> str:
    lines = {(d, k): line(data, d, k) for d in DEPTHS for _, k in SHOWN}
    heads = [f"{name}, {d} stages" for d in DEPTHS for name, _ in SHOWN]
    out = ["| GPUs | " + " | ".join(heads) + " | planner | what it chose |", "|---" * (len(heads) + 3) + "|"]

    def cell(row: dict[str, Any], first: dict[str, Any]) -> str:
        efficiency = first["hours"] * first["gpus"] / (row["hours"] * row["gpus"])
        return f"{row['hours']:.2f} h ({efficiency:.0%})"

    for free in data["planned"]:
        cells = [cell(r[free["gpus"]], next(iter(r.values()))) if free["gpus"] in r else "" for r in lines.values()]
        choice = (
            f"{free['schedule']}, {free['stages']} stages x {free['replicas']}, {free['micro_batches']} micro-batches"
        )
        out.append(f"| {free['gpus']} | {' | '.join(cells)} | {cell(free, data['planned'][0])} | {choice} |")
    baseline_h, hours = data["reported"]["baseline_h"], data["reported"]["hours"]
    out += [
        "",
        "| if the baseline had | MP there | GPUs to 128 | reported 15.5x is | MP at 128 | GEMS at 128 | reported |",
    ]
    out.append("|---|---|---|---|---|---|---|")
    for depth in DEPTHS:
        mp, gems, more = lines[depth, "model_parallel"], lines[depth, "gems"], 128 // depth
        first = mp[max(depth, GPUS[0])]["hours"] * max(depth, GPUS[0]) / depth
        ends = f"{60 * mp[128]['hours']:.1f} min | {60 * gems[128]['hours']:.1f} min | {60 * hours:.0f} min |"
        out.append(f"| {depth} GPUs | {first:.2f} h | {more}x | {baseline_h / hours / more:.0%} of that | {ends}")
    peaks = ", ".join(f"{d}: {b / 2**30:.1f}" for d, b in data["tile"]["smallest_peak_bytes"].items())
    tile, large = data["tile"], data["large"]
    out += [
        "",
        f"- one tile: forward {tile['forward_s']:.3f} s, backward {tile['backward_s']:.3f} s on a V100 (estimated)",
    ]
    out.append(
        f"- the same estimate for {data['batch']} tiles at once: {tile['in_batch_s']:.3f} s a tile, both ways together"
    )
    out.append(f"- GiB on the fullest rank for one tile, by number of stages: {peaks}; usable: {CAP_BYTES >> 30}")
    out.append(f"- tiles in 7.25 h (calibrated): {data['tiles']:,.0f}")
    planning = [row["planning_s"] for row in data["planned"]]
    out.append(f"- planned between single layers in {min(planning):.1f} to {max(planning):.1f} s of one core")
    seconds = f"{large['compile_and_simulate_s']:.1f} s of one core"
    out.append(f"- {large['ranks']:,} ranks compiled and simulated in {seconds} ({large['events']:,} events)")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true", help="print the tables of the newest dated JSON instead")
    if parser.parse_args().table:
        print(tables(json.loads(max(HERE.glob("*.json")).read_text())))
        return
    torch.set_num_threads(1)
    # Through JSON, so that what is drawn is what was written.
    written = json.dumps(measure(), indent=1) + "\n"
    data = json.loads(written)
    (HERE / f"{data['date']}.json").write_text(written)
    (HERE / "curve.svg").write_text(draw(data))
    print(tables(data))


if __name__ == "__main__":
    main()
