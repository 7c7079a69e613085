"""Parameters leave the device and return every step, in six ways (and plain training): the source documents' table.

    python benchmarks/offload-parameters/run.py --out results/

VGG-19, AlexNet, ResNet-50 and Inception-v3 with two classes, batch 32, SGD with momentum, on a synthetic set of two
classes. All ways start from the same weights and see the same batches; after some epochs of eight steps their weights
are compared, bit for bit. Then the ways of the source documents are timed over seven steps (naive: three); plain
training and outcore in rounds of more steps, in turn, because the host that issues them is not equally fast all the
time. A round's time is taken from start to end without looking at the device in between. Every model is a process of
its own, which has the machine alone while it measures.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import multiprocessing
import platform
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from ways import WAYS, Way, wait

from outcore.errors import OutcoreError

sys.path.append(str(Path(__file__).parents[1]))
from gate import Gate

MODELS = {"vgg19": 224, "alexnet": 224, "resnet50": 224, "inception_v3": 299}
INTERLEAVED = ("baseline", "outcore", "outcore, update in step()")
RATES = {"Inception3": 0.03, "ResNet": 0.01}
EPOCHS = {"inception_v3": 4}
"""Until it has learned something; two for the others."""
SEEDS_S = {
    "vgg19": (30.0673, 150.5116, 166.7242, 153.9791, 160.9983),
    "alexnet": (24.1323, 42.2092, 47.4363, 41.5072, 47.5516),
    "resnet50": (26.1702, 113.5793, 110.0957, 113.6041, 109.3674),
    "inception_v3": (32.2195, 124.2807, 120.2433, 123.1403, 119.2649),
}
"""Seconds for 20 epochs on a V100, from the seeds, in the order of the first five ways."""


Pictures = tuple[torch.Tensor, torch.Tensor]


def network(name: str, device: torch.device) -> nn.Module:
    import torchvision

    torch.manual_seed(0)
    extra: dict[str, Any] = {"init_weights": True} if name == "inception_v3" else {}
    with warnings.catch_warnings(), device:
        warnings.simplefilter("ignore")
        model: nn.Module = getattr(torchvision.models, name)(weights=None, num_classes=2, **extra)
    if name in ("vgg19", "alexnet"):  # without norms they learn from nothing only if signals keep their size
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight)
                if layer.weight.shape[0] == 2:
                    layer.weight.data.mul_(0.1)
    return model


def pictures(count: int, side: int, seed: int, device: torch.device) -> Pictures:
    """Two classes: stripes across and stripes along, in noise."""
    generator = torch.Generator(device).manual_seed(seed)
    with device:
        labels = torch.randint(0, 2, (count,), generator=generator)
        wave = torch.sin(torch.arange(side) * (2 * torch.pi / 16))
        noise = torch.randn(count, 3, side, side, generator=generator)
        stripes = torch.where(labels[:, None, None] == 1, wave[None, None, :], wave[None, :, None])
        tint = (labels.float() * 2 - 1)[:, None, None, None] * torch.tensor([1.0, 0.0, -1.0])[None, :, None, None]
        return 0.5 * noise + stripes[:, None] + tint, labels


def link(size: int, device: torch.device) -> dict[str, float]:
    """Seconds that so many bytes take over the link in one copy: out, in, and both at the same time."""
    if device.type != "cuda":
        return {}
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    theirs = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def seconds(out: bool, back: bool) -> float:
        found = []
        for _ in range(12):
            wait(device)
            start = time.perf_counter()
            if out:
                with torch.cuda.stream(streams[0]):
                    hosts[0].copy_(theirs[0], non_blocking=True)
            if back:
                with torch.cuda.stream(streams[1]):
                    theirs[1].copy_(hosts[1], non_blocking=True)
            wait(device)
            found.append(time.perf_counter() - start)
        return min(found)

    return {"out_s": seconds(True, False), "in_s": seconds(False, True), "both_s": seconds(True, True)}


class Row:
    """One way of training a copy of a model."""

    def __init__(self, way: str, model: nn.Module, seen: Pictures, held_out: Pictures, batch: int) -> None:
        self.device, self.held_out = seen[0].device, held_out
        self.model = copy.deepcopy(model).to(self.device)
        self.batches = list(zip(*(t.split(batch) for t in seen), strict=True))
        self.way = Way(way, self.model, self.batches[0][0], RATES.get(type(model).__name__, 0.001))
        self.steps, self.rounds_s = 0, list[float]()
        self.accuracies: list[float] = []
        self.peak_bytes = 0

    def train(self, steps: int) -> float:
        """Seconds of some steps, from start to end, without looking at the device in between."""
        wait(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            torch.manual_seed(self.steps)  # every way drops the same
            self.way.step(*self.batches[self.steps % len(self.batches)])
            self.steps += 1
        wait(self.device)
        return time.perf_counter() - start

    def round(self, steps: int) -> None:
        """A timed round; its first step, which may follow an evaluation, is not."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        here = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        self.train(1)
        self.rounds_s.append(self.train(steps) / steps)
        if self.device.type == "cuda":
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() - here)

    def weights(self) -> dict[str, torch.Tensor]:
        return {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items()}


def found_of(row: Row, plain: Row, equal: bool, path: dict[str, float]) -> dict[str, Any]:
    """A row of the table."""
    step_s, plain_s = statistics.median(row.rounds_s), statistics.median(plain.rounds_s)
    bound_s = path.get("both_s", 0.0)
    return {
        "step_s": step_s,
        "rounds_s": row.rounds_s,
        "over_baseline": step_s / plain_s,
        "over_bound": step_s / max(plain_s, bound_s),
        "best_accuracy": max(row.accuracies),
        "final_accuracy": row.accuracies[-1],
        "accuracies": row.accuracies,
        "more_bytes": row.peak_bytes,
        "trips": row.way.copies(lambda: row.train(1), steps=8).summary(),
        "weights_equal": equal,
    }


def compared(name: str, options: argparse.Namespace, gate: Gate, report: Callable[[dict[str, Any]], None]) -> None:
    """All rows of a model."""
    device = torch.device(options.device)
    side = options.side or MODELS[name]
    model = network(name, device).train()
    data = [pictures(n, side, seed, device) for seed, n in ((1, 8 * options.batch), (2, 64))]
    count = sum(p.numel() for p in model.parameters())
    document: dict[str, Any] = {"parameters": count, "link": {}, "ways": {}}
    rows: dict[str, Row] = {}
    equal: dict[str, bool] = {}
    started = time.perf_counter()
    plain: dict[str, torch.Tensor] = {}
    for way in [way for way in WAYS if way in options.ways]:
        try:
            rows[way] = row = Row(way, model, *data, options.batch)
            for _ in range(
                options.epochs or EPOCHS.get(name, 2)
            ):  # as many steps for all, after which they are compared
                row.train(8)
                row.accuracies.append(row.way.accuracy(*data[1]))
        except (RuntimeError, OutcoreError) as error:
            traceback.print_exc()
            document["ways"][way] = {"error": str(error)}
            continue
        weights = row.weights()
        plain = plain or weights
        equal[way] = all(torch.equal(weights[k], plain[k]) for k in plain)
    print(f"{name:13} trained after {time.perf_counter() - started:.1f} s", flush=True)
    fast = [row for way, row in rows.items() if way in equal and way in INTERLEAVED]
    with gate.alone():
        document["link"] = link(4 * count, device)
        for way, row in rows.items():
            if way in equal and way not in INTERLEAVED:
                row.round(3 if way == "naive" else 7)
        for row in fast:
            row.train(3)
        steps = max(8, int(options.round_s / (fast[0].train(4) / 4)))
        for i in range(options.rounds):
            for row in fast if i % 2 == 0 else fast[::-1]:  # in turn, so that what slows the host slows all alike
                row.round(steps)
        if name in options.trace.split(",") and options.out is not None:
            trace(rows["outcore"], options.out / f"{options.name or options.device}-{name}.trace.json.gz")
        for way in equal:
            line = document["ways"][way] = found_of(rows[way], rows["baseline"], equal[way], document["link"])
            print(
                f"{name:13} {way:26} {line['step_s'] * 1e3:8.2f} ms {line['over_baseline']:6.2f}x baseline "
                f"{line['over_bound']:6.2f}x bound  accuracy {line['accuracies']}  equal {equal[way]}  "
                f"rounds {[round(1e3 * s, 1) for s in rows[way].rounds_s]}",
                flush=True,
            )
            report(document)


def trace(row: Row, path: Path) -> None:
    """What kernels and copies do in three steps."""
    rest = Path(tempfile.mkdtemp()) / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        row.train(3)
    profile.export_chrome_trace(str(rest))
    events = [e for e in json.loads(rest.read_text())["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")]
    path.write_bytes(gzip.compress(json.dumps(events).encode()))


def work(index: int, name: str, options: argparse.Namespace, gate: Gate, path: Path | None) -> None:
    """A process: one model."""
    torch.backends.cudnn.deterministic = True
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu"
    environment = {"device": device, "torch": torch.__version__, "python": platform.python_version()}
    document = {
        "environment": environment,
        "batch": options.batch,
        "rounds": options.rounds,
    }

    def report(found: dict[str, Any]) -> None:
        if path is not None:
            path.write_text(json.dumps({**document, "models": {name: found}}, indent=1) + "\n")

    with gate.inside(index):
        compared(name, options, gate, report)


def parting() -> Any:
    """Processes that share what was imported; where the driver was woken before they part, they begin anew."""
    import torchvision  # noqa: F401

    context = multiprocessing.get_context("fork")
    trial = context.Process(target=lambda: sys.exit(torch.cuda._is_in_bad_fork()))
    trial.start()
    trial.join()
    return context if trial.exitcode == 0 else multiprocessing.get_context("spawn")


def joined(parts: list[Path], path: Path) -> None:
    """What the processes have written, as one file."""
    found = [json.loads(part.read_text()) for part in parts if part.exists()]
    if not found:
        return
    models = {name: row for document in found for name, row in document["models"].items()}
    path.write_text(json.dumps({**found[0], "models": models}, indent=1) + "\n")
    for part in parts:
        part.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.backends.cuda.is_built() else "cpu")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--epochs", type=int, default=0, help="of eight steps, before ways are compared and timed")
    parser.add_argument("--trace", default="", help="models of which a few steps are traced")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-s", type=float, default=0.25, help="seconds of a round of plain training")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=0)
    parser.add_argument("--name", default="")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    names = options.models.split(",")
    context = parting()
    gate, workers, parts = Gate(context, len(names), 100.0), [], []
    whole = f"{time.strftime('%Y-%m-%d')}-{options.name or options.device}"
    for i, name in enumerate(names):
        path = None
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            parts.append(path := options.out / f"{whole}-{name}.json")
        workers.append(context.Process(target=work, args=(i, name, options, gate, path)))
        workers[-1].start()
    for worker in workers:
        worker.join()
    if options.out is not None:
        joined(parts, options.out / f"{whole}.json")


if __name__ == "__main__":
    main()
