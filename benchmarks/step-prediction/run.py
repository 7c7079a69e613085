"""Step time and peak memory: predicted from calls measured one by one, beside a real training step.

    python benchmarks/step-prediction/run.py --out DIRECTORY              (on a GPU if there is one, else on the CPU)
    python benchmarks/step-prediction/run.py --table DIRECTORY/FILE.json  (the tables of the README)

Per network, batch size and precision: capture, measure, predict; then train in earnest with Adam. Time is the median of
synchronised steps, peak memory what torch's allocator says (on a CPU, the counted bytes of living storages). torch's
own MemTracker looks at the same step. A case that fails stays in the file with its error.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import networks
import torch
from networks import Network, Training

import outcore
from outcore.cost.live import LiveBytes
from outcore.cost.measure import measure
from outcore.cost.memory import memory_curve
from outcore.cost.step import measure_optimizer, predict_step
from outcore.machine import parse

Adam = torch.optim.Adam


def one(network: Network, size: int, bf16: bool, device: torch.device, seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {}
    torch.manual_seed(0)
    base = clean(device)
    model = Training(network.build(), network.loss, bf16).to(device).train()
    batch = tuple(t.to(device) for t in network.batch(size))
    start = time.perf_counter()
    graph = outcore.capture(model, batch)
    row["capture_s"] = time.perf_counter() - start
    costs = measure(graph, device, time_limit_s=seconds)
    optimizer = measure_optimizer(model, Adam, device)
    step = predict_step(graph, costs, optimizer=optimizer)
    curve = memory_curve(graph, costs, optimizer=Adam)
    row["predict_s"] = time.perf_counter() - start
    row |= {
        "calls": len(graph.calls),
        "unmeasured": len(costs.unmeasured),
        "notes": list(costs.notes)[:3],
        "predicted_s": step.step_s,
        "predicted_parts_s": {n: getattr(step, f"{n}_s") for n in ("forward", "backward", "optimizer", "wait")},
        "predicted_bytes": curve.peak_bytes,
        "predicted_parts_bytes": {k: getattr(curve.at_peak, k) for k in curve.at_peak.__dataclass_fields__},
        "peak_in": [curve.peak.phase, curve.peak.call],
        "library_bytes": costs.library_bytes,
    }
    if device.type == "cuda":
        estimated = outcore.estimate(graph, parse("h200"))
        row["estimated_s"] = predict_step(graph, estimated, optimizer=optimizer).step_s
        row["kinds_s"] = {
            kind: [total.time_s, estimated.by_kind()[kind].time_s, total.calls]
            for kind, total in costs.by_kind().items()
        }
        del estimated
    del graph, costs, curve, step
    clean(device)
    row |= train(model, batch, device, base)
    if size == max(network.sizes):  # it takes longer than all else here
        row["memtracker_bytes"] = memtracker(model, batch, device)
    return row


def train(model: Training, batch: tuple[torch.Tensor, ...], device: torch.device, base: int) -> dict[str, Any]:
    """Real steps: median time, and the peak of one."""
    optimizer = Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    for _ in range(3):
        step()
    times, processor = timed(step, device, 20 if device.type == "cuda" else 9)
    row: dict[str, Any] = {"measured_s": statistics.median(times), "fastest_s": min(times)}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        row["measured_bytes"] = torch.cuda.max_memory_allocated(device) - base
        row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    else:
        row["measured_processor_s"] = statistics.median(processor)
        optimizer.zero_grad()
        fixed = [*model.parameters(), *model.buffers(), *batch]
        fixed += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        held = sum(s.nbytes() for s in {t.untyped_storage()._cdata: t.untyped_storage() for t in fixed}.values())
        with LiveBytes(fixed) as live:
            step()
        row["measured_bytes"] = held + live.peak
    return row


def timed(step: Callable[[], None], device: torch.device, runs: int) -> tuple[list[float], list[float]]:
    """Wall-clock times of synchronised steps, and the processor's."""
    wall, processor = [], []
    for _ in range(runs):
        synchronise(device)
        start, busy = time.perf_counter(), time.process_time()
        step()
        synchronise(device)
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
    return wall, processor


def memtracker(model: Training, batch: tuple[torch.Tensor, ...], device: torch.device) -> int | None:
    """The peak by torch.distributed._tools.MemTracker."""
    try:
        from torch.distributed._tools.mem_tracker import MemTracker

        optimizer = Adam(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch)
        with tracker:
            for i in range(2):
                model(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if i == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
        found = next(v for k, v in peak.items() if torch.device(k).type == device.type)
        return int(found["Total"])
    except Exception as error:
        print(f"  MemTracker: {type(error).__name__}: {str(error)[:80]}", flush=True)
        return None


def clean(device: torch.device) -> int:
    """Give back what can be given back; returns what is still allocated."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "load": None if cuda else os.getloadavg()[0],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line per case, then the errors' medians and worst."""
    lines = [
        "| network | batch | precision | untimed calls | step predicted | measured | error | by estimate | error "
        "| peak predicted | measured | error | MemTracker's error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row['network']} | {row['batch']} | {row['precision']} |"
        if "error" in row:
            lines.append(f"{head} failed: {row['error']} | | | | | | | | | |")
            continue
        time_error, bytes_error = errors(row)
        tracked = row.get("memtracker_bytes")
        peer = (
            f"{tracked / row['measured_bytes'] - 1:+.1%}" if tracked else "failed" if "memtracker_bytes" in row else ""
        )
        guess = row.get("estimated_s")
        estimated = f"{guess * 1e3:.1f} ms | {guess / real_time(row) - 1:+.1%}" if guess else "| "
        lines.append(
            f"{head} {row['unmeasured'] or ''} | {row['predicted_s'] * 1e3:.1f} ms "
            f"| {real_time(row) * 1e3:.1f} ms | {time_error:+.1%} "
            f"| {estimated} "
            f"| {row['predicted_bytes'] / 2**20:,.0f} MiB | {row['measured_bytes'] / 2**20:,.0f} MiB "
            f"| {bytes_error:+.1%} | {peer} |"
        )
    good = [errors(row) for row in rows if "error" not in row]
    whole = sorted(abs(errors(row)[0]) for row in rows if "error" not in row and not row["unmeasured"])
    if whole:
        lines.append(
            f"\nstep time, all calls measured: median error {statistics.median(whole):.1%}, worst {whole[-1]:.1%}, "
            f"{len(whole)} cases"
        )
    for name, values in zip(("step time", "peak memory"), zip(*good, strict=True), strict=False) if good else ():
        sizes = sorted(abs(v) for v in values)
        lines.append(
            f"\n{name}: median error {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, {len(sizes)} cases"
        )
    guesses = sorted(abs(r["estimated_s"] / real_time(r) - 1) for r in rows if "estimated_s" in r and "measured_s" in r)
    if guesses:
        lines.append(
            f"\nstep time by estimate: median error {statistics.median(guesses):.1%}, worst {guesses[-1]:.1%}, "
            f"{len(guesses)} cases"
        )
    return "\n".join(lines)


def real_time(row: dict[str, Any]) -> float:
    """What a step took: on a CPU that others use too, the processor's time, which one thread makes the step's."""
    return float(row.get("measured_processor_s", row["measured_s"]))


def errors(row: dict[str, Any]) -> tuple[float, float]:
    return row["predicted_s"] / real_time(row) - 1, row["predicted_bytes"] / row["measured_bytes"] - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="directory for the dated JSON")
    parser.add_argument("--table", type=Path, help="print the tables of a result and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="for measuring the calls of one case")
    parser.add_argument("--limit", type=float, default=270.0, help="begin no case after this many seconds")
    parser.add_argument("--only", nargs="*", help="names of networks")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.table.read_text())["rows"]))
        return
    if given.out is None:
        parser.error("say where to write: --out benchmarks/step-prediction/results")
    warnings.simplefilter("ignore")
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    chosen = networks.GPU if device.type == "cuda" else networks.CPU
    precisions = {"tf32": False, "bf16": True} if device.type == "cuda" else {"fp32": False}
    result: dict[str, Any] = {"environment": environment(device), "rows": []}
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{result['environment']['date']}-{device.type}.json"
    start = time.monotonic()
    # All networks once before any twice: if the time runs out, every network is there.
    cases = [(n, i, p) for i in (1, 0) for p in reversed(precisions) for n in chosen]
    for name, which, precision in cases:
        if given.only and name not in given.only:
            continue
        row: dict[str, Any] = {"network": name, "batch": chosen[name].sizes[which], "precision": precision}
        result["rows"].append(row)
        if time.monotonic() - start > given.limit:
            row["error"] = f"not begun within {given.limit:g} s"
            continue
        try:
            row |= one(chosen[name], row["batch"], precisions[precision], device, given.seconds)
            print(f"{name} {row['batch']} {precision}: {errors(row)}", flush=True)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
            traceback.print_exc(limit=-2)
        clean(device)
        result["seconds"] = time.monotonic() - start
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["rows"]))


if __name__ == "__main__":
    main()
