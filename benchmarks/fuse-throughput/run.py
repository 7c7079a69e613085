"""Throughput of many small trainings on one GPU: serial, vmap, processes, and fused in every way outcore has.

    python run.py --out results.json [--members 16] [--sweep 1,2,4,8,16,32] [--only resnet18-b32,...] [--limit 150]

Every row is written as soon as it is measured, so that a run that is cut short keeps what it has. A step is forward,
backward and Adam, on a batch that lies on the device. A model-step per second is one step of one model.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.fusion.networks import (  # noqa: E402
    Bert,
    Gan,
    LstmTagger,
    PointNet,
    PointNetSegmentation,
    TransformerLM,
    discriminator_loss,
    generator_loss,
)

import outcore  # noqa: E402
from outcore.fusion import Objective, Way, choose, forecast  # noqa: E402
from outcore.fusion.choice import time_steps  # noqa: E402
from outcore.fusion.layerwise import measure_convolutions  # noqa: E402

DEVICE = torch.device("cuda")


def _vision(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(num_classes=10, **settings)

    return build


def _images(batch: int, size: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(batch, 3, size, size), torch.randint(10, (batch,)))


def _tokens(batch: int, length: int, words: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(1, words, (batch, length)), torch.randint(words, (batch, length)))


WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "transformer-b20": (lambda: TransformerLM(10_000), _tokens(20, 35, 10_000)),
    "resnet18-b32": (_vision("resnet18"), _images(32, 32)),
    "pointnet-cls-b32": (lambda: PointNet(16), lambda: (torch.randn(32, 3, 2500), torch.randint(16, (32,)))),
    "mobilenet-v3-b64": (_vision("mobilenet_v3_large"), _images(64, 32)),
    "resnet18-b128": (_vision("resnet18"), _images(128, 32)),
    "bert-medium-b8": (lambda: Bert(), _tokens(8, 64, 30_522)),
    "dcgan-b64": (lambda: Gan(), lambda: (torch.randn(64, 3, 64, 64), torch.randn(64, 100, 1, 1))),
    "lstm-b32": (
        lambda: LstmTagger(1000, 64, 64, 10),
        lambda: (torch.randint(1, 1000, (32, 40)), torch.randint(10, (32, 40))),
    ),
    "pointnet-seg-b32": (
        lambda: PointNetSegmentation(8),
        lambda: (torch.randn(32, 3, 2500), torch.randint(8, (32, 2500))),
    ),
}
OBJECTIVES = {
    "dcgan-b64": {
        "d": Objective(discriminator_loss, lambda gan, i: torch.optim.Adam(gan.discriminator.parameters(), 2e-4)),
        "g": Objective(generator_loss, lambda gan, i: torch.optim.Adam(gan.generator.parameters(), 2e-4)),
    }
}


def adam(params: Any, i: int = 0) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, 1e-4 * (1 + i % 8))


def make(
    name: str, members: int, amp: bool, way: Way | None, unfused: tuple[str, ...] = ()
) -> outcore.fusion.FusedArray:
    build, _ = WORKLOADS[name]
    first = build().to(DEVICE)
    models = [first, *(copy.deepcopy(first) for _ in range(members - 1))]
    low = torch.bfloat16 if amp else None
    settings: dict[str, Any] = {"autocast": low, "way": way, "check": False, "unfused": unfused}
    if name in OBJECTIVES:
        return outcore.fuse(models, objectives=OBJECTIVES[name], **settings)
    return outcore.fuse(models, loss=F.cross_entropy, optimizer=adam, **settings)


def batch_of(name: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return tuple(t.to(DEVICE) for t in WORKLOADS[name][1]())


def clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def eager(name: str, amp: bool, seconds: float) -> dict[str, Any]:
    """One model, plain PyTorch; memory with it."""
    clean()
    before = torch.cuda.memory_allocated()
    model = WORKLOADS[name][0]().to(DEVICE)
    batch = batch_of(name)
    if name in OBJECTIVES:
        pairs = [(o.loss, o.optimizer(model, 0)) for o in OBJECTIVES[name].values()]
    else:
        pairs = [(lambda m, x, y: F.cross_entropy(m(x), y), adam(model.parameters()))]

    def step() -> None:
        for loss, optimizer in pairs:
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                found = loss(model, *batch)
            found.backward()
            optimizer.step()

    taken = time_steps(step, DEVICE, seconds, warm=5)
    return {"step_s": taken, "peak_bytes": torch.cuda.max_memory_allocated() - before}


def ours(
    name: str, members: int, amp: bool, way: Way, seconds: float, unfused: tuple[str, ...] = (), layers: bool = False
) -> dict[str, Any]:
    clean()
    before = torch.cuda.memory_allocated()
    array = make(name, members, amp, way, unfused)
    batch = batch_of(name)
    found: dict[str, Any] = {}
    if layers:
        found["layers"] = measure_convolutions(array, *batch)
    if way.width == members > 1:
        found["predicted_bytes"] = forecast(array, *batch).peak_bytes()
    torch.cuda.reset_peak_memory_stats()
    taken = time_steps(lambda: array.step(*batch), DEVICE, seconds, warm=4)
    return found | {
        "step_s": taken,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "reserved_bytes": torch.cuda.memory_reserved(),
        "refused": array.runner.refused,
        "way": str(array.way),
    }


def vmapped(name: str, members: int, amp: bool, seconds: float) -> dict[str, Any]:
    """torch.func as its tutorial shows it, with one Adam on the stacked parameters."""
    from torch.func import functional_call, stack_module_state, vmap

    clean()
    before = torch.cuda.memory_allocated()
    models = [WORKLOADS[name][0]().to(DEVICE) for _ in range(members)]
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    optimizer = adam(list(params.values()))
    x, y = batch_of(name)

    def loss(p: Any, b: Any) -> torch.Tensor:
        return F.cross_entropy(functional_call(base, (p, b), (x,)), y)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            total = vmap(loss, randomness="different")(params, buffers).sum()
        total.backward()
        optimizer.step()

    taken = time_steps(step, DEVICE, seconds, warm=4)
    return {"step_s": taken, "peak_bytes": torch.cuda.max_memory_allocated() - before}


_CHILD = """
import sys, time, json, torch
sys.argv = [sys.argv[0], *sys.argv[1:]]
import importlib.util
spec = importlib.util.spec_from_file_location("run", sys.argv[1])
run = importlib.util.module_from_spec(spec); spec.loader.exec_module(run)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
torch.backends.cudnn.benchmark = True
names, start = sys.argv[2].split(","), float(sys.argv[3])
import torch.nn.functional as F
work = []
for name in names:
    model = run.WORKLOADS[name][0]().cuda(); batch = run.batch_of(name); optimizer = run.adam(model.parameters())
    def step(model=model, batch=batch, optimizer=optimizer):
        optimizer.zero_grad(); F.cross_entropy(model(batch[0]), batch[1]).backward(); optimizer.step()
    for _ in range(5): step()
    work.append(step)
torch.cuda.synchronize()
found = {}
for i, (name, step) in enumerate(zip(names, work)):
    begin = start + 3.0 * i
    time.sleep(max(0.0, begin - time.time()))
    late = time.time() - begin
    count = 0
    while time.time() < begin + 2.5:
        step(); count += 1
        if count % 5 == 0: torch.cuda.synchronize()
    torch.cuda.synchronize()
    found[name] = count / (time.time() - begin - max(0.0, late)), late
print("RESULT" + json.dumps(found))
"""


def processes(names: list[str], count: int, mps: bool) -> dict[str, Any]:
    """Plain PyTorch in concurrent processes; model-steps per second of all together."""
    env = dict(os.environ)
    if mps:
        env |= {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/mps-log"}
        started = subprocess.run(["nvidia-cuda-mps-control", "-d"], env=env, capture_output=True, text=True)
        if started.returncode != 0:
            return {"error": (started.stderr or started.stdout).strip()[:200] or "MPS did not start"}
    try:
        start = time.time() + 14 + count * 0.8
        children = [
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, __file__, ",".join(names), str(start)],
                env=env | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for _ in range(count)
        ]  # fmt: skip
        rows, errors = [], []
        for child in children:
            out, err = child.communicate(timeout=90)
            line = next((text for text in out.splitlines() if text.startswith("RESULT")), None)
            rows.append(json.loads(line[6:]) if line else None)
            if line is None:
                errors.append(err.strip().splitlines()[-1:] or [""])
        if errors:
            return {"error": str(errors[0])[:300]}
        return {
            name: {"steps_per_s": sum(r[name][0] for r in rows), "latest_start_s": max(r[name][1] for r in rows)}
            for name in names
        }
    except subprocess.TimeoutExpired:
        return {"error": "timed out"}
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
        if mps:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", env=env, text=True, capture_output=True)


class Table:
    """Rows, written as they come."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self.path, self.begun, self.limit_s = path, time.time(), limit_s
        self.rows: list[dict[str, Any]] = []
        properties = torch.cuda.get_device_properties(0)
        self.facts = {
            "device": properties.name,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
            "precision": "TF32 for float32 products; amp: bfloat16 autocast; cudnn.benchmark with 4 algorithms",
            "date": time.strftime("%Y-%m-%d"),
        }

    def out_of_time(self) -> bool:
        return time.time() - self.begun > self.limit_s

    def add(self, run: Callable[[], dict[str, Any]], **facts: Any) -> dict[str, Any]:
        try:
            found = run()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"}
            clean()
        row = facts | found | {"at_s": round(time.time() - self.begun, 1)}
        self.rows.append(row)
        self.path.write_text(json.dumps({"environment": self.facts, "rows": self.rows}, indent=1))
        shown = f"{row['step_s'] * 1e3:.2f} ms" if "step_s" in row else str(found)[:160]
        print(" ".join(f"{v}" for v in facts.values()), shown, row.get("refused") or "", flush=True)
        return row


def _driver() -> str:
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    return asked.stdout.strip()


def has_images(name: str) -> bool:
    return name.startswith(("resnet", "mobilenet", "dcgan"))


def workload(table: Table, name: str, amp: bool, members: int, sweep: list[int], seconds: float) -> None:
    facts = {"workload": name, "precision": "amp" if amp else "tf32"}
    table.add(lambda: eager(name, amp, seconds), **facts, what="eager serial", members=1)
    formats = (False, True) if has_images(name) else (False,)
    for cl in formats:
        table.add(
            lambda cl=cl: ours(name, 1, amp, Way(1, True, False, channels_last=cl), seconds),
            **facts,
            what=f"graphed serial{' channels last' if cl else ''}",
            members=1,
        )
    candidates = [("fused", Way(members, True)), ("streams", Way(1, True, True))]
    if has_images(name):
        candidates += [
            ("fused channels last", Way(members, True, channels_last=True)),
            ("streams channels last", Way(1, True, True, channels_last=True)),
        ]
    best: tuple[float, str, Way] | None = None
    for what, way in candidates:
        if table.out_of_time():
            return
        row = table.add(lambda way=way: ours(name, members, amp, way, seconds), **facts, what=what, members=members)
        if "step_s" in row and (best is None or row["step_s"] < best[0]):
            best = (row["step_s"], what, way)
    if best is None:
        return
    _, what, way = best
    if way.width > 1 and has_images(name) and not table.out_of_time():
        table.add(
            lambda w=way: ours(name, members, amp, w, seconds, layers=True),
            **facts,
            what=f"{what}, layers measured",
            members=members,
        )
    for count in sweep:
        if count != members and not table.out_of_time():
            width = count if way.width > 1 else 1
            chosen = Way(width, way.graphed, way.parallel, channels_last=way.channels_last)
            table.add(lambda c=count, w=chosen: ours(name, c, amp, w, seconds), **facts, what=what, members=count)


def predict(table: Table, name: str, amp: bool, members: int) -> None:
    """What `choose` predicts before training, to be held against the rows above."""

    def run() -> dict[str, Any]:
        clean()
        array = make(name, members, amp, None)
        batch = batch_of(name)
        made = choose(array, *batch, seconds=0.1)
        return {
            "predicted_step_s": made.best.predicted_s, "serial_s": made.serial_s, "way": str(made.best.way),
            "predicted_bytes": made.memory.peak_bytes() if made.memory else None,
        }  # fmt: skip

    table.add(run, workload=name, precision="amp" if amp else "tf32", what="prediction", members=members)


def partial(table: Table, seconds: float, members: int) -> None:
    """The study of the paper: how throughput grows with the share of the network that is fused."""
    blocks = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc")
    for start in (0, 3, 5, 6, 7):
        left = blocks[:7][start:] if start < 7 else ()
        if table.out_of_time():
            return
        table.add(
            lambda u=left: ours("resnet18-b32", members, False, Way(members, True, channels_last=True), seconds, u),
            workload="resnet18-b32", precision="tf32",
            what=f"fused channels last, unfused: {' '.join(left) or 'none'}",
            members=members,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--sweep", default="")
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--precisions", default="tf32,amp")
    parser.add_argument("--limit", type=float, default=150)
    parser.add_argument("--seconds", type=float, default=0.25)
    parser.add_argument("--processes", default="")
    parser.add_argument("--vmap", default="")
    parser.add_argument("--predict", default="")
    parser.add_argument("--partial", action="store_true")
    parser.add_argument("--sweep-for", default=",".join(WORKLOADS))
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 4
    table = Table(given.out, given.limit)
    sweep = [int(n) for n in given.sweep.split(",") if n]
    only = given.only.split(",")
    for count, mps in [(int(c), m) for c in given.processes.split(",") if c for m in (False, True)]:
        names = ["resnet18-b32", "transformer-b20", "pointnet-cls-b32"]
        table.add(
            lambda c=count, m=mps, n=names: processes(n, c, m),
            what="processes with MPS" if mps else "processes",
            members=count,
        )
    for name in only:
        for precision in given.precisions.split(","):
            if table.out_of_time():
                print("out of time", flush=True)
                return
            counts = sweep if name in given.sweep_for.split(",") else []
            workload(table, name, precision == "amp", given.members, counts, given.seconds)
            if name in given.vmap.split(","):
                table.add(
                    lambda n=name, p=precision: vmapped(n, given.members, p == "amp", given.seconds),
                    workload=name,
                    precision=precision,
                    what="vmap",
                    members=given.members,
                )
            if name in given.predict.split(","):
                predict(table, name, precision == "amp", given.members)
    if given.partial:
        partial(table, given.seconds, given.members)


if __name__ == "__main__":
    main()
