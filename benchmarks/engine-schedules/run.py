"""Schedules on real processes: ours among themselves, against torch.distributed.pipelining, and against closed forms.

    python benchmarks/engine-schedules/run.py --ranks 2 --out results/…json              CPU, a core per rank
    python benchmarks/engine-schedules/run.py --device cuda --ranks 2 --out …            ranks share one GPU (MPS)

Each rank on the GPU gets an equal share of its multiprocessors; the daemon of MPS must be running.

All variants run in one process per rank, round after round, on the same stages, micro-batches and optimizer, in another
order in every round: on a CPU a step gets the heap that the one before left, and pages that were given back to the
system cost a tenth of it. Ratios are of the fastest step of each variant, which other load disturbs least.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import random
import socket
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import outcore
from outcore.planner.pipeline.lower import predict_timeline
from outcore.planner.pipeline.schedule_model import Pipeline
from outcore.program import Links, save_trace
from outcore.run import Engine
from outcore.run.engine.measured import Comparison, with_measured_times
from tests.planner.shape_weights import weights_from_shapes

VARIANTS = {
    "model-parallel": {"schedule": "model_parallel", "micro_batches": 4},
    "gpipe": {"schedule": "gpipe", "micro_batches": 4},
    "1f1b": {"schedule": "1f1b", "micro_batches": 4},
    "gems": {"schedule": "gems", "batches": 4},
}


class Chain(nn.Module):
    """Equal convolutions, so that stages are equal."""

    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()) for _ in range(blocks))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def job_of(args: argparse.Namespace) -> outcore.Job:
    shape = (args.channels, args.side, args.side)
    return outcore.Job(
        model=lambda: Chain(args.blocks * args.ranks, args.channels),
        batch=lambda n: (torch.randn(n, *shape), torch.randn(n, *shape)),
        loss=F.mse_loss,
        optimizer=sgd,
        size=4 * args.micro_batch,
    )


class Ours:
    """A schedule of the engine."""

    idle_bytes = 0

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        job = job_of(args)
        stages = tuple(tuple(f"blocks.{s * args.blocks + i}" for i in range(args.blocks)) for s in range(args.ranks))
        graph = job.capture()
        plan = outcore.Plan(graph.fingerprint, stages, **VARIANTS[name])
        self.predicted_peaks = predict_peaks(graph, plan, workspace_of(args))
        self.engine = Engine(job, plan, device=args.device, timeout_s=60.0)
        self.x, self.t = (b.to(args.device) for b in job.batch(4 * args.micro_batch))

    def step(self) -> None:
        self.engine.step(self.x, self.t)

    def held_bytes(self) -> int:
        """What the engine holds between steps."""
        return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in self.engine.worker.gauge.holding()}.values())


def predict_peaks(graph: outcore.Graph, plan: outcore.Plan, workspace_bytes: int) -> list[int]:
    """What the planner expects every rank to hold at most."""
    weights = weights_from_shapes(graph, state_per_parameter=0.0)
    return [peak + workspace_bytes for peak in predict_timeline(plan, graph, weights, Links()).peak_bytes]


@cache
def _workspace(channels: int, side: int, micro_batch: int) -> int:
    """What cuDNN takes for itself in a convolution's forward or backward beyond tensors, tried on the device."""
    conv = nn.Conv2d(channels, channels, 3, padding=1, device="cuda")
    x = torch.randn(micro_batch, channels, side, side, device="cuda", requires_grad=True)
    y = conv(x)
    y.backward(gradient := torch.ones_like(y))
    x.grad = None
    conv.zero_grad()
    y = conv(x)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y.backward(gradient)
    made = torch.cuda.memory_allocated() - before
    backward = torch.cuda.max_memory_allocated() - before - made
    del y
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = conv(x).detach()
    forward = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del y
    return max(0, forward, backward)


def workspace_of(args: argparse.Namespace) -> int:
    """A convolution's workspace on the device; shapes do not tell it."""
    return _workspace(args.channels, args.side, args.micro_batch) if args.device == "cuda" else 0


class Torchs:
    """The same stages under torch's own runtime."""

    idle_bytes = 0

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        torch.manual_seed(0)
        model = job_of(args).build()
        rank = dist.get_rank()
        part = model.blocks[rank * args.blocks : (rank + 1) * args.blocks]
        micro = torch.randn(args.micro_batch, args.channels, args.side, args.side)
        given, made = micro.clone().requires_grad_(rank > 0), micro.clone().requires_grad_()
        stage = PipelineStage(part, rank, args.ranks, torch.device("cpu"), input_args=(given,), output_args=(made,))
        kind = {"torch gpipe": ScheduleGPipe, "torch 1f1b": Schedule1F1B}[name]
        self.schedule = kind(stage, n_microbatches=4, loss_fn=F.mse_loss)
        self.optimizer, self.rank, self.last = sgd(part.parameters()), rank, args.ranks - 1
        self.part = part
        self.x, self.t = job_of(args).batch(4 * args.micro_batch)

    def step(self) -> None:
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(self.x)
        elif self.rank == self.last:
            self.schedule.step(target=self.t, losses=losses)
        else:
            self.schedule.step()
        self.optimizer.step()
        self.optimizer.zero_grad()


def rank_main(rank: int, args: argparse.Namespace, port: int, queue: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    if args.device == "cpu":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})
    else:
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // args.ranks)  # before the device is touched
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("gloo")
    runs: dict[str, Any] = {name: Ours(args, name) for name in VARIANTS}
    if args.device == "cpu":
        runs |= {name: Torchs(args, name) for name in ("torch gpipe", "torch 1f1b")}
    times: dict[str, list[float]] = {name: [] for name in runs}
    computing: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run.step()
    order = random.Random(0)  # the same on all ranks
    for _ in range(args.rounds):
        for name in order.sample(list(runs), len(runs)):
            run = runs[name]
            for _ in range(args.steps):
                dist.barrier()
                _synchronise(args)
                began, used = time.perf_counter(), time.process_time()
                run.step()
                _synchronise(args)
                times[name].append(time.perf_counter() - began)
                computing[name].append(time.process_time() - used)
    found = {name: _facts(name, run, times[name], args) for name, run in runs.items()}
    peaks = _peaks(runs, args)
    for name, peak in peaks.items():
        found[name] |= {"peak_bytes": peak, "idle_bytes": runs[name].idle_bytes, "cpu_s": min(computing[name])}
    every: list[Any] = [None] * args.ranks
    dist.all_gather_object(every, found)
    if rank == 0:
        queue.put(every)
    for run in runs.values():
        if isinstance(run, Ours):
            run.engine.close()
    dist.destroy_process_group()


def _synchronise(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def _facts(name: str, run: Any, times: list[float], args: argparse.Namespace) -> dict[str, Any]:
    facts: dict[str, Any] = {"step_s": min(times), "median_s": statistics.median(times), "times_s": times}
    if isinstance(run, Ours):
        timelines = []
        for _ in range(3 if args.device == "cpu" else 2):
            run.step()
            timelines.append(run.engine.timeline())
        best = min(timelines, key=lambda t: t.step_s)
        step_programs = run.engine.assembly.step_programs
        comparison = Comparison.with_schedule(step_programs.training, step_programs.stages, best)
        stages = with_measured_times(step_programs.stages, best).stages
        pipeline = Pipeline(*(VARIANTS[name].get(k, 1) for k in ("schedule", "micro_batches", "batches")))
        forward, backward = [s.forward_s for s in stages], [s.backward_s for s in stages]
        facts |= {
            "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
            "timeline_s": best.step_s,
            "closed_form_s": pipeline.pass_s(forward, backward, [0.0] * args.ranks)
            + max(s.optimizer_s for s in stages),
            "predicted_peak_bytes": run.predicted_peaks,
            "predicted_s": comparison.predicted.step_s,
            "stage_forward_s": forward,
            "stage_backward_s": backward,
            "stage_step_s": [s.optimizer_s for s in stages],
            "busy_s": best.busy_s(),
            "communication_s": best.communication_s(),
            "exposed_s": best.exposed_s(),
            "copies_s": sum(e.end_s - e.start_s for e in best.events if e.stream.startswith("copy")),
            "copies_beside_compute_s": _beside(best),
        }
        if args.trace and run.engine.rank == 0:
            save_trace(best, f"{args.trace}-{args.ranks}-{best.name}.json")
    return facts


def _beside(timeline: Any) -> float:
    """How long copies ran while the same rank computed."""
    total = 0.0
    for rank in range(len(timeline)):
        computes = [(e.start_s, e.end_s) for e in timeline.events if e.rank == rank and e.stream == "compute"]
        for e in timeline.events:
            if e.rank == rank and e.stream.startswith("copy"):
                total += sum(max(0.0, min(e.end_s, b) - max(e.start_s, a)) for a, b in computes)
    return total


def _peaks(runs: dict[str, Any], args: argparse.Namespace) -> dict[str, int]:
    """Live bytes of tensors at the peak of a step, counted in the same way for all."""
    from outcore.cost.measured.live_bytes import LiveBytes

    found = {}
    for name, run in runs.items():
        if args.device == "cuda":
            run.step()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            run.step()
            found[name] = run.engine.timeline().peak_bytes[run.engine.rank] - before + run.held_bytes()
        elif isinstance(run, Ours):
            run.engine.count_memory()
            run.step()
            found[name] = run.engine.timeline().peak_bytes[run.engine.rank]
            run.engine.count_memory(False)
            run.idle_bytes = run.engine.worker.p2p.shared_rows.idle_bytes
        else:
            held = [t for p in run.part.parameters() for t in (p,)]
            with LiveBytes([*held, run.x, run.t]) as live:
                run.step()
            kept = sum(t.untyped_storage().nbytes() for t in held)
            found[name] = live.peak + kept + _buffers(run.schedule)
    return found


def _buffers(schedule: Any) -> int:
    """Receive buffers that torch's stage keeps between steps; counted once each."""
    stage = schedule._stage
    rows = {}
    for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
        for info in infos:
            buffer = getattr(info, "buffer", None)
            if isinstance(buffer, torch.Tensor) and not buffer.is_meta:
                rows[buffer.data_ptr()] = buffer.untyped_storage().nbytes()
    return sum(rows.values())


def summarise(every: list[dict[str, Any]]) -> dict[str, Any]:
    table = {}
    for name in every[0]:
        rows = [found[name] for found in every]
        row: dict[str, Any] = {"step_s": max(r["step_s"] for r in rows), "median_s": max(r["median_s"] for r in rows)}
        row |= {key: [r[key] for r in rows] for key in ("peak_bytes", "idle_bytes", "cpu_s")}
        row |= {key: value for key, value in rows[0].items() if key not in row and key != "times_s"}
        table[name] = row
    base = table["model-parallel"]["step_s"]
    for row in table.values():
        row["speedup_over_model_parallel"] = base / row["step_s"]
    return table


def run_ranks(args: argparse.Namespace) -> dict[str, Any]:
    """All variants on some ranks; the table of what was found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork" if args.device == "cuda" else "spawn")
    queue = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, args, port, queue)) for r in range(args.ranks)]
    for process in ranks:
        process.start()
    every = queue.get(timeout=600)
    for process in ranks:
        process.join()
    return summarise(every)


def show(table: dict[str, Any]) -> None:
    """A line per variant."""
    for name, row in table.items():
        peak = max(row["peak_bytes"]) / 2**20
        line = f"{name:15} {row['step_s'] * 1e3:8.1f} ms  x{row['speedup_over_model_parallel']:.3f}"
        line += f"  cpu {max(row['cpu_s']) * 1e3:8.1f} ms  peak {peak:7.1f} MiB"
        if "predicted_s" in row:
            line += f"  planned {max(row['predicted_peak_bytes']) / 2**20:7.1f}"
            line += f"  simulated {row['predicted_s'] * 1e3:8.1f} ms  closed form {row['closed_form_s'] * 1e3:8.1f} ms"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=4, help="convolutions per stage")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--trace", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--again", nargs="*", default=[], help="more runs, each as RANKS:BLOCKS:MICRO_BATCH")
    args = parser.parse_args()
    for again in ("", *args.again):
        if again:
            args.ranks, args.blocks, args.micro_batch = map(int, again.split(":"))
        table = run_ranks(args)
        share = str(100 // args.ranks) if args.device == "cuda" else None
        environment = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": table["model-parallel"]["device"],
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
            "mps_percentage": share,
        }
        show(table)
        if args.out:
            document = {"arguments": vars(args), "environment": environment, "table": table}
            path = Path(args.out)
            path = path.with_name(f"{path.stem}-{args.ranks}-ranks.json") if args.again else path
            path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
