"""A pathology network from one node to 128 V100s, by simulation, beside the two times that a proposal reports.

    python benchmarks/pathology-scaling/run.py              (from anywhere; about a minute on one core, no GPU)
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
import math
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

import outcore
from outcore.cost.estimate import estimate
from outcore.graph import Graph
from outcore.machine import parse
from outcore.models import ResNet110V2
from outcore.planner import Pipeline, Route, Weights, plan, split
from outcore.planner.judge import SCHEDULE_NAMES
from outcore.planner.lower import predict_timeline
from outcore.planner.pipeline import Schedule
from outcore.program import Links, Stages, Timeline, compile_program, simulate

HERE = Path(__file__).parent
REPORTED = {"baseline_h": 7.25, "gpus": 128, "hours": 28 / 60}
GPUS, DEPTHS, BATCH, PER_NODE = (4, 8, 16, 32, 64, 128), (2, 4, 8), 128, 4
CAP_BYTES = 15 << 30
COLOURS = {2: "#1b9e77", 4: "#d95f02", 8: "#7570b3"}


def recorded(batch: int) -> Graph:
    with torch.device("meta"):
        model = ResNet110V2(classes=2)
    return outcore.capture(model, torch.empty((batch, 3, 1024, 1024), device="meta"))


def links(gpus: int) -> Links:
    return Links.of(parse(f"{gpus // PER_NODE}x{PER_NODE}xv100"))


def times(weights: Weights, tiles: int) -> Weights:
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


def simulated(graph: Graph, weights: Weights) -> list[dict[str, Any]]:
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


def planned(graph: Graph, weights: Weights) -> list[dict[str, Any]]:
    inside = parse(f"{PER_NODE}xv100").between_devices
    assert inside is not None
    rows = []
    for gpus in GPUS:
        start = time.perf_counter()
        chosen = plan(graph, weights, devices=gpus, memory_bytes=CAP_BYTES, link=inside, granularity="block")
        planning_s = time.perf_counter() - start
        step = predict_timeline(chosen, graph, weights, links(gpus))
        what = {"gpus": gpus, "stages": len(chosen.stages), "replicas": chosen.replicas, "schedule": chosen.schedule}
        what |= {"micro_batches": chosen.micro_batches, "planning_s": planning_s, "why": chosen.why}
        rows.append(what | {"step_s": step.step_s, "peak_bytes": max(step.peak_bytes)})
        print({k: rows[-1][k] for k in ("gpus", "stages", "schedule", "micro_batches", "step_s", "planning_s")})
    return rows


def measure() -> dict[str, Any]:
    graph, many = recorded(1), recorded(BATCH)
    weights = Weights.of(graph, estimate(graph, parse("v100")))
    cuts = {d: split(graph, weights, stages=d, balance="memory") for d in (1, *DEPTHS)}
    rows, free = simulated(graph, weights), planned(many, times(weights, BATCH))
    baseline = next(r for r in rows if r["stages"] == r["gpus"] == PER_NODE and r["schedule"] == "model_parallel")
    tiles = REPORTED["baseline_h"] * 3600 * BATCH / baseline["step_s"]
    for row in (*rows, *free):
        row["hours"] = tiles / BATCH * row["step_s"] / 3600
    start = time.perf_counter()
    large = run(split(graph, weights, stages=4, pipeline=Pipeline("gems", 1, 2)).stages, "gems", 4, 256)
    seconds = time.perf_counter() - start
    return {
        "date": str(datetime.date.today()),
        "environment": {"python": platform.python_version(), "torch": torch.__version__, "cpu": platform.machine()},
        "reported": REPORTED,
        "tile": {
            "forward_s": sum(w.forward_s for w in weights.calls.values()),
            "backward_s": sum(w.backward_s for w in weights.calls.values()),
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


def line(data: dict[str, Any], depth: int, schedule: str) -> dict[int, dict[str, Any]]:
    return {r["gpus"]: r for r in data["simulated"] if (r["stages"], r["schedule"]) == (depth, schedule)}


def tables(data: dict[str, Any]) -> str:
    lines = {(d, s): line(data, d, s) for d in DEPTHS for s in ("model_parallel", "gems")}
    heads = [f"{'GEMS' if s == 'gems' else 'MP'}, {d} stages" for d, s in lines]
    out = ["| GPUs | " + " | ".join(heads) + " | planner | what it chose |", "|---" * (len(heads) + 3) + "|"]

    def cell(row: dict[str, Any], first: dict[str, Any]) -> str:
        efficiency = first["hours"] * first["gpus"] / (row["hours"] * row["gpus"])
        return f"{row['hours']:.2f} h ({efficiency:.0%})"

    for free in data["planned"]:
        cells = [cell(r[free["gpus"]], next(iter(r.values()))) if free["gpus"] in r else "" for r in lines.values()]
        choice = f"{free['schedule']}, {free['stages']} stages x {free['replicas']}, {free['micro_batches']} in a pass"
        out.append(f"| {free['gpus']} | {' | '.join(cells)} | {cell(free, data['planned'][0])} | {choice} |")
    baseline_h, hours = data["reported"]["baseline_h"], data["reported"]["hours"]
    out += ["", "| if the baseline had | MP there | GPUs to 128 | reported 15.5x is | MP at 128 | GEMS at 128 | reported |"]
    out.append("|---|---|---|---|---|---|---|")
    for depth in DEPTHS:
        mp, gems, more = lines[depth, "model_parallel"], lines[depth, "gems"], 128 // depth
        first = mp[max(depth, GPUS[0])]["hours"] * max(depth, GPUS[0]) / depth
        ends = f"{60 * mp[128]['hours']:.1f} min | {60 * gems[128]['hours']:.1f} min | {60 * hours:.0f} min |"
        out.append(f"| {depth} GPUs | {first:.2f} h | {more}x | {baseline_h / hours / more:.0%} of that | {ends}")
    peaks = ", ".join(f"{d}: {b / 2**30:.1f}" for d, b in data["tile"]["smallest_peak_bytes"].items())
    tile, large = data["tile"], data["large"]
    out += ["", f"- one tile: forward {tile['forward_s']:.3f} s, backward {tile['backward_s']:.3f} s on a V100 (estimated)"]
    out.append(f"- GiB on the fullest rank for one tile, by number of stages: {peaks}; usable: {CAP_BYTES >> 30}")
    out.append(f"- tiles in 7.25 h (calibrated): {data['tiles']:,.0f}")
    seconds = f"{large['compile_and_simulate_s']:.1f} s"
    out.append(f"- {large['ranks']:,} ranks compiled and simulated in {seconds} ({large['events']:,} events)")
    return "\n".join(out)


def curve(data: dict[str, Any]) -> str:
    """Hours against GPUs, both logarithmic."""

    def at(gpus: float, hours: float) -> tuple[float, float]:
        return 80 + 520 * math.log(gpus / 4) / math.log(32), 40 + 380 * math.log(10 / hours) / math.log(200)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{words}</text>'

    end = 'text-anchor="end"'
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 480" font-family="sans-serif" font-size="12">']
    out.append('<rect width="780" height="480" fill="white"/>')
    for gpus in GPUS:
        x = at(gpus, 1)[0]
        out += [f'<path d="M{x:.0f} 40V420" stroke="#e5e5e5"/>', text(x, 438, str(gpus), 'text-anchor="middle"')]
    for hours in (10, 5, 2, 1, 0.5, 0.2, 0.1, 0.05):
        y = at(4, hours)[1]
        out += [f'<path d="M80 {y:.0f}H600" stroke="#e5e5e5"/>', text(72, y + 4, f"{hours:g}", end)]
    out.append(text(340, 464, "V100 GPUs", 'text-anchor="middle"'))
    out.append(text(0, 0, "hours", 'transform="translate(28 230) rotate(-90)" text-anchor="middle"'))
    out.append(text(80, 24, "ResNet-110-v2, 1024 x 1024 tiles: simulated, calibrated to 7.25 h", 'font-size="14"'))
    drawn = [(f"{d} stages, {s}", COLOURS[d], s, line(data, d, k)) for d in DEPTHS for s, k in SHOWN]
    drawn.append(("planner's choice", "#000", "", {r["gpus"]: r for r in data["planned"]}))
    for i, (name, colour, kind, rows) in enumerate(drawn):
        dash = ' stroke-dasharray="5 4"' if kind == "GEMS" else ""
        points = " ".join("{:.1f},{:.1f}".format(*at(g, r["hours"])) for g, r in rows.items())
        style = f'fill="none" stroke="{colour}" stroke-width="2"{dash}'
        out += [f'<polyline points="{points}" {style}/>', f'<path d="M614 {60 + 22 * i}h28" {style}/>']
        out.append(text(650, 64 + 22 * i, name))
    y, (x, there) = at(4, REPORTED["baseline_h"])[1], at(REPORTED["gpus"], REPORTED["hours"])
    out += [f'<path d="M80 {y:.0f}H600" stroke="#c00" stroke-dasharray="2 3"/>']
    out += [text(596, y - 5, "reported: 7.25 h, number of GPUs not stated", f'{end} fill="#c00"')]
    out += [f'<circle cx="{x:.0f}" cy="{there:.0f}" r="5" fill="#c00"/>']
    out += [text(x + 10, there + 4, "reported: 28 min", 'fill="#c00"')]
    return "\n".join([*out, "</svg>"]) + "\n"


SHOWN = (("MP", "model_parallel"), ("GEMS", "gems"))


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
    (HERE / "curve.svg").write_text(curve(data))
    print(tables(data))


if __name__ == "__main__":
    main()
