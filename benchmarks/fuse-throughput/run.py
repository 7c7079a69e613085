"""Throughput of many small trainings on one GPU: serial, vmap, and fused in every way outcore has.

    python run.py --out results.json [--members 16] [--only resnet18-b32,...] [--limit 120]
    python run.py --out /tmp/dry.json --device cpu --tiny --workers 2           # everything once, small

Every row is written as soon as it is measured, so that a run that is cut short keeps what it has; what did not fit in
the time stands in the file as skipped. A step is forward, backward and Adam, on a batch that lies on the device.
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
sys.path[:0] = [str(ROOT), str(ROOT / "src"), HERE]

Row = dict[str, Any]
LANES: tuple[tuple[str, ...], ...] = (
    ("mobilenet-v3-b64/tf32",),
    ("mobilenet-v3-b64/amp",),
    ("resnet18-b128/tf32", "resnet18-b128/amp"),
    ("resnet18-b32/tf32",),
    ("resnet18-b32/amp", "lstm-b32/tf32", "lstm-b32/amp"),
    ("dcgan-b64/tf32", "dcgan-b64/amp"),
    ("pointnet-cls-b32/tf32", "pointnet-cls-b32/amp", "pointnet-seg-b32/tf32", "pointnet-seg-b32/amp"),
    ("bert-medium-b8/tf32", "bert-medium-b8/amp"),
    ("transformer-b20/tf32", "transformer-b20/amp"),
)
"""What one process after the other does: those of much memory in one, those that cuDNN tunes long in several."""


def jobs(name: str, precision: str, given: argparse.Namespace) -> Iterator[tuple[Row, Callable[[Any], Row]]]:
    """The rows of a workload in a precision: what they are, and how to measure them."""
    import measures
    from tests.fusion.workloads import TINY, USUAL

    from outcore.fusion import Way

    workload = (TINY if given.tiny else USUAL)[name]
    amp, members, last = precision == "amp", given.members, workload.images
    facts = {"workload": name, "precision": precision}

    def ours(count: int, way: Way, **more: Any) -> Callable[[Any], Row]:
        return lambda bench: measures.ours(bench, workload, amp, count, way, **more)

    ways = {
        "fused": lambda count: Way(count, True, channels_last=last),
        "streams": lambda count: Way(1, True, True, channels_last=last),
    }
    yield facts | {"what": "eager serial", "members": 1}, lambda bench: measures.eager(bench, workload, amp)
    yield facts | {"what": "graphed serial", "members": 1}, ours(1, Way(1, True, False, channels_last=last))
    for what, way in ways.items():
        yield facts | {"what": what, "members": members}, ours(members, way(members))
    if name in given.layers.split(","):
        yield (
            facts | {"what": "fused, layers measured", "members": members},
            ours(members, ways["fused"](members), layers=True),
        )
    if f"{name}/{precision}" in given.predict.split(","):
        yield (
            facts | {"what": "prediction", "members": members},
            lambda b: measures.prediction(b, workload, amp, members),
        )
    if name in given.vmap.split(","):
        yield facts | {"what": "vmap", "members": members}, lambda b: measures.vmapped(b, workload, amp, members)
    for what, way in ways.items() if f"{name}/{precision}" in given.sweep_for.split(",") else ():
        for count in map(int, given.sweep.split(",")):
            yield facts | {"what": what, "members": count}, ours(count, way(count))
    if f"{name}/{precision}" == given.partial:
        blocks = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc")
        for kept in (0, 2, 3, 4, 5, 6):
            unfused = blocks[kept:]
            yield (
                facts | {"what": "partial", "members": members, "fused_blocks": kept, "unfused": " ".join(unfused)},
                ours(members, ways["fused"](members), unfused=unfused),
            )
    if name in given.profile.split(","):
        for what, count in (("kernels fused", members), ("kernels serial", 1)):
            way_of = Way(count, channels_last=last)
            yield (
                facts | {"what": what, "members": count},
                lambda b, c=count, w=way_of: measures.kernels(b, workload, amp, c, w),
            )


def work(lane: tuple[str, ...], gate: Any, given: argparse.Namespace, begun: float, rows: Any) -> None:
    """One process: prepare beside others, measure alone."""
    import warnings

    import measures
    import torch

    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.set_num_threads(1)
    bench = measures.Bench(torch.device(given.device), given.seconds, gate.alone)
    with gate.prepare():
        if given.device == "cuda":
            torch.zeros(1, device="cuda")
        for name, precision in (task.split("/") for task in lane):
            for facts, measure in jobs(name, precision, given):
                if time.time() - begun > given.limit:
                    rows.put(facts | {"skipped": "out of time"})
                    continue
                try:
                    found = measure(bench)
                except Exception as error:
                    text = str(error).splitlines()
                    found = {"error": f"{type(error).__name__}: {text[0][:200] if text else ''}"}
                rows.put(facts | found | {"at_s": round(time.time() - begun, 1)})
    rows.put(None)


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
    parser.add_argument("--only", default="", help="workloads or workload/precision, by default all")
    parser.add_argument("--workers", type=int, default=len(LANES))
    parser.add_argument("--limit", type=float, default=120, help="seconds after which no row is begun")
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--sweep", default="1,2,4,8,32")
    for option in ("sweep-for", "vmap", "predict", "layers", "partial", "profile"):
        parser.add_argument(f"--{option}", default="")
    given = parser.parse_args()
    from gate import Gate

    only = given.only.split(",") if given.only else []
    wanted = [[t for t in lane if not only or t in only or t.split("/")[0] in only] for lane in LANES]
    lanes = [tuple(t for lane in wanted[i :: given.workers] for t in lane) for i in range(given.workers)]
    lanes = [lane for lane in lanes if lane]
    context = multiprocessing.get_context("spawn")
    gate, rows, begun = Gate(context, len(lanes)), context.Queue(), time.time()
    workers = [context.Process(target=work, args=(lane, gate, given, begun, rows)) for lane in lanes]
    for worker in workers:
        worker.start()
    facts, found, running = environment(given.device), [], len(workers)
    while running and any(w.is_alive() for w in workers):
        try:
            row = rows.get(timeout=5)
        except Exception:
            continue
        if row is None:
            running -= 1
            continue
        found.append(row)
        given.out.write_text(json.dumps({"environment": facts, "rows": found}, indent=1))
        told = (
            f"{row['step_s'] * 1e3:.2f} ms"
            if "step_s" in row
            else str({k: row[k] for k in row if k in ("error", "skipped", "way", "predicted_step_s")})
        )
        print(
            *(row[k] for k in ("workload", "precision", "what", "members")),
            told,
            row.get("refused") or "",
            row.get("at_s", ""),
            flush=True,
        )
    print(f"{len(found)} rows in {time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
