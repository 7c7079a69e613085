"""Throughput of many small trainings on one GPU: serial, vmap, and fused in every way outcore has.

    python run.py --out results.json [--limit 200] [--members 16]
    python run.py --out results.json --tasks "lstm-b32/tf32:curve+predict bert-medium-b8/amp; resnet18-b32/tf32:partial"
    python run.py --out /tmp/dry.json --device cpu --tiny --members 2          # everything once, small

A task is a workload in a precision and the kinds of rows wanted (`rows_of` has them), by default ``base``: plain and
graphed serial, fused, streams; ``curve`` has the last two for every number of members. Tasks between semicolons run in
one process, one after the other. Every row is written as soon as it is measured, so that a run that is cut short keeps
what it has; what did not fit in the time stands in the file as skipped. ``untuned`` keeps cuDNN from trying its
algorithms. A row is prepared once there is memory for it (`GIB`), so that what other processes have prepared cannot
crowd it out. A step is forward, backward and Adam, on a batch that lies on the device. ``memory`` rows are not timed.
Processes side by side, with and without MPS, are in processes.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = str(Path(__file__).resolve().parent)
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "benchmarks"), HERE]

Row = dict[str, Any]
Job = tuple[Row, Callable[[Any], Any]]
TASKS = "; ".join(
    f"{name}/{precision}:curve"
    for precision in ("tf32", "amp")
    for name in (
        "transformer-b20 resnet18-b32 resnet18-b128 mobilenet-v3-b64 dcgan-b64 bert-medium-b8 lstm-b32 "
        "pointnet-cls-b32 pointnet-seg-b32"
    ).split()
)
GIB = {
    "pointnet-seg-b32/tf32": (3.0, 3.8), "pointnet-cls-b32/tf32": (1.8, 3.0), "pointnet": (1.6, 2.3),
    "bert": (1.15, 1.2), "lstm": (0.1, 0.2), "mobilenet": (0.25, 0.3), "": (0.4, 0.4),
}  # fmt: skip
"""What a fused member of a workload and one on its stream take at most, about; the first that fits counts."""
LARGE_GIB = 20.0
"""Rows that take more have the device one after the other, beside small ones."""
BLOCKS = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc")
"""Of a ResNet, for the partially fused network."""


def rows_of(name: str, precision: str, kind: str, given: argparse.Namespace) -> Iterator[Job]:
    """The rows of one kind: what they are, and how to measure them."""
    import measures

    from outcore.fusion import RunMode
    from outcore.fusion.program.autotune import group_width
    from tests.fusion.workloads import TINY, USUAL

    workload = (TINY if given.tiny else USUAL)[name]
    amp, members, last = precision == "amp", given.members, workload.images
    facts = {"workload": name, "precision": precision, "members": members}

    def ours(count: int, way: RunMode, **more: Any) -> Callable[[Any], Any]:
        return lambda bench: measures.ours(bench, workload, amp, count, way, **more)

    fused, streams = RunMode(members, True, channels_last=last), RunMode(1, True, True, channels_last=last)
    if kind == "base":
        for part in ("serial", "fused", "streams"):
            yield from rows_of(name, precision, part, given)
    elif kind == "serial":
        yield facts | {"what": "eager serial", "members": 1}, lambda b: measures.eager(b, workload, amp)
        yield facts | {"what": "graphed serial", "members": 1}, ours(1, RunMode(1, True, False, channels_last=last))
    elif kind == "fused":
        yield facts | {"what": "fused"}, ours(members, fused)
    elif kind == "streams":
        yield facts | {"what": "streams"}, ours(members, streams)
    elif kind == "layers":
        yield facts | {"what": "fused, layers measured"}, ours(members, fused, layers=True)
    elif kind == "predict":
        yield facts | {"what": "prediction"}, lambda b: measures.prediction(b, workload, amp, members)
    elif kind == "predict-more":
        more = facts | {"what": "prediction", "members": 2 * members}
        yield more, lambda b: measures.prediction(b, workload, amp, 2 * members)
    elif kind == "vmap":
        yield facts | {"what": "vmap"}, lambda b: measures.vmapped(b, workload, amp, members)
    elif kind == "curve":
        yield from rows_of(name, precision, "serial", given)
        yield from rows_of(name, precision, "counts", given)
    elif kind in ("counts", "counts-fused", "counts-streams"):
        for count in map(int, given.counts.split(",")):
            way = RunMode(group_width(count), True, channels_last=last)
            if kind != "counts-streams":
                yield facts | {"what": "fused", "members": count}, ours(count, way)
            if kind != "counts-fused":
                yield facts | {"what": "streams", "members": count}, ours(count, streams)
    elif kind == "memory":
        yield facts | {"what": "memory, fused"}, ours(members, fused, predicted=True, timed=False)
        yield facts | {"what": "memory, streams"}, ours(members, streams, predicted=True, timed=False)
    elif kind == "norms":
        yield facts | {"what": "fused, norms as torch has them"}, ours(members, fused, chained=False)
    elif kind.startswith("no-"):
        without = kind.removeprefix("no-")
        yield facts | {"what": f"fused, without {without}"}, ours(members, fused, without=without)
    elif kind == "partial":
        for kept in (0, 7, 3, 5, 4, 6, 2):
            more = {"what": "partial", "fused_blocks": kept, "unfused": " ".join(BLOCKS[kept:])}
            yield facts | more, ours(members, fused, unfused=BLOCKS[kept:])
    elif kind == "use":
        way = RunMode(1, True, False, channels_last=last)
        yield facts | {"what": "use, serial", "members": 1}, lambda b: measures.use(b, workload, amp, 1, way)
        yield facts | {"what": "use, fused"}, lambda b: measures.use(b, workload, amp, members, fused)
    elif kind == "kernels":
        for what, count in (("kernels fused", members), ("kernels serial", 1)):
            way = RunMode(count, channels_last=last)
            more = {"what": what, "members": count}
            yield facts | more, lambda b, c=count, w=way: measures.kernels(b, workload, amp, c, w)
    else:
        raise SystemExit(f"no kind of rows is called {kind}")


def gib(row: Row) -> float:
    """An upper bound of the memory of a row; to predict, copies are tried beside the array."""
    named = f"{row['workload']}/{row['precision']}"
    fused, on_streams = next(sizes for name, sizes in GIB.items() if named.startswith(name))
    if row["what"] == "prediction":
        return 1.2 * on_streams * row["members"] + 0.2
    return (on_streams * row["members"] if "streams" in row["what"] else fused * min(16, row["members"])) + 0.2


def packed(jobs: list[Job], count: int, limit_gib: float = LARGE_GIB) -> Iterator[list[Job]]:
    """Rows to prepare at once: a few small ones, or one large one.

    Streams share the workspaces of libraries with those before them, so only one row of them tells their memory.
    """
    some: list[Job] = []
    for job in jobs:
        together = [facts for facts, _ in [*some, job]]
        on_streams = sum("streams" in facts["what"] for facts in together)
        if some and (len(some) == count or sum(map(gib, together)) > limit_gib or on_streams > 1):
            yield some
            some = []
        some.append(job)
    if some:
        yield some


def work(index: int, group: tuple[str, ...], gate: Any, given: argparse.Namespace, begun: float, rows: Any) -> None:
    """One process: prepare beside others, measure alone."""
    import warnings

    import measures
    import torch

    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(1)
    bench = measures.Bench(torch.device(given.device), given.seconds, gate.alone)
    with gate.inside(index):
        for task in group:
            which, _, kinds = task.partition(":")
            asked = (kinds or "base").split("+")
            bench.tuned = "untuned" not in asked
            jobs = [job for kind in asked if kind != "untuned" for job in rows_of(*which.split("/"), kind, given)]
            for some in packed(jobs, given.together):
                wanted = sum(gib(facts) for facts, _ in some)
                with gate.room(wanted):
                    started = time.time()
                    if started - begun > given.limit:
                        found = [{"skipped": "out of time"} for _ in some]
                    elif wanted > given.gib:
                        found = [{"skipped": f"takes about {wanted:.0f} GiB"} for _ in some]
                    else:
                        found = bench.run([measure(bench) for _, measure in some])
                    for (facts, _), row in zip(some, found, strict=True):
                        took = {"begun_s": round(started - begun, 1), "at_s": round(time.time() - begun, 1)}
                        at = took | ({} if bench.tuned else {"tuned": False})
                        rows.put(facts | row | at)
                    found.clear()
                    bench.give_back()
    rows.put(None)


def preload(device: str) -> None:
    """Import, before processes are forked from here, what each of them would import: seconds of it."""
    import measures  # noqa: F401
    import sympy  # noqa: F401
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    from tests.foreign.shim import define_torchvision_operators

    define_torchvision_operators()
    import torchvision  # noqa: F401

    if device == "cuda":
        import triton  # noqa: F401


def environment(device: str) -> Row:
    import torch

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    on_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_properties(0).name if on_gpu else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "driver": subprocess.run(asked, capture_output=True, text=True).stdout.strip() if on_gpu else None,
        "precision": "TF32 for float32 products; amp: bfloat16 autocast",
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--counts", default="16,2,4,8,32", help="members of the rows of a curve")
    parser.add_argument("--limit", type=float, default=200, help="seconds after which no row is begun")
    parser.add_argument("--grace", type=float, default=10, help="seconds that rows begun before may take after")
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--together", type=int, default=4, help="small rows that a process prepares before timing them")
    parser.add_argument("--gib", type=float, default=52, help="memory that one large row may take")
    parser.add_argument("--small-gib", type=float, default=70, help="memory that all small rows together may take")
    given = parser.parse_args()
    from gate import Gate

    begun = time.time()
    groups = [tuple(group.split()) for group in given.tasks.split(";") if group.split()]
    preload(given.device)
    print(f"imported {time.time() - begun:.1f}", flush=True)
    context = multiprocessing.get_context("fork")
    gate, rows = Gate(context, len(groups), given.small_gib, LARGE_GIB), context.Queue()
    workers = [
        context.Process(target=work, args=(i, group, gate, given, begun, rows)) for i, group in enumerate(groups)
    ]
    for worker in workers:
        worker.start()
    facts, found, running = environment(given.device), [], len(workers)
    while running and any(w.is_alive() for w in workers) and time.time() - begun < given.limit + given.grace:
        try:
            row = rows.get(timeout=1)
        except Exception:
            continue
        if row is None:
            running -= 1
            continue
        found.append(row)
        given.out.write_text(json.dumps({"environment": facts, "rows": found}, indent=1))
        shown = ("error", "skipped", "way", "predicted_step_s", "busy", "filled", "occupancy")
        told = f"{row['step_s'] * 1e3:.2f} ms" if row.get("step_s") else {k: row[k] for k in row if k in shown}
        named = (row[k] for k in ("workload", "precision", "what", "members"))
        print(*named, told, row.get("refused") or "", row.get("begun_s", ""), row.get("at_s", ""), flush=True)
    for worker in workers:
        worker.kill()  # whoever is late, or stopped
    print(f"{len(found)} rows in {time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
