"""Parameters leave the device and return every step, in six ways (and plain training): the source documents' table.

    python benchmarks/offload-parameters/run.py --out results/

VGG-19, AlexNet, ResNet-50 and Inception-v3 with two classes, batch 32, SGD with momentum, on a synthetic set of two
classes. An epoch is eight steps; its time is taken from start to end without looking at the device in between, so that
what overlaps may. The first epoch warms up. All ways start from the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from ways import WAYS, Way, wait

from outcore.errors import OutcoreError

MODELS = {"vgg19": 224, "alexnet": 224, "resnet50": 224, "inception_v3": 299}
RATES = {"Inception3": 0.01}
SEEDS_S = {
    "vgg19": (30.0673, 150.5116, 166.7242, 153.9791, 160.9983),
    "alexnet": (24.1323, 42.2092, 47.4363, 41.5072, 47.5516),
    "resnet50": (26.1702, 113.5793, 110.0957, 113.6041, 109.3674),
    "inception_v3": (32.2195, 124.2807, 120.2433, 123.1403, 119.2649),
}
"""Seconds for 20 epochs on a V100, from the seeds, in the order of the first five ways."""


Pictures = tuple[torch.Tensor, torch.Tensor]


def network(name: str) -> nn.Module:
    import torchvision

    torch.manual_seed(0)
    extra: dict[str, Any] = {"init_weights": True} if name == "inception_v3" else {}
    with warnings.catch_warnings():
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
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator)
    wave = torch.sin(torch.arange(side) * (2 * torch.pi / 16))
    noise = torch.randn(count, 3, side, side, generator=generator)
    stripes = torch.where(labels[:, None, None] == 1, wave[None, None, :], wave[None, :, None])
    tint = (labels.float() * 2 - 1)[:, None, None, None] * torch.tensor([1.0, 0.0, -1.0])[None, :, None, None]
    images = 0.5 * noise + stripes[:, None] + tint
    return images.to(device), labels.to(device)


def link(size: int, device: torch.device) -> dict[str, float]:
    """Seconds that so many bytes take over the link in one copy: out, in, and both at the same time."""
    if device.type != "cuda":
        return {}
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    theirs = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def seconds(out: bool, back: bool) -> float:
        found = []
        for _ in range(4):
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


def trained(
    model: nn.Module, way: str, seen: Pictures, held_out: Pictures, options: argparse.Namespace
) -> dict[str, Any]:
    """One row."""
    device = seen[0].device
    batches = list(zip(*(t.split(options.batch) for t in seen), strict=True))
    row = Way(way, model, batches[0][0], RATES.get(type(model).__name__, 0.001))
    torch.manual_seed(3)
    epochs, accuracies = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.epochs):
        wait(device)
        start = time.perf_counter()
        for batch in batches:
            row.step(*batch)
        wait(device)
        epochs.append(time.perf_counter() - start)
        accuracies.append(row.accuracy(*held_out))
    weights = {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}
    trips = row.copies(lambda: row.step(*batches[0]), steps=8)
    return {
        "step_s": statistics.median(epochs[1:]) / len(batches),
        "steps_s": [e / len(batches) for e in epochs],
        "best_accuracy": max(accuracies),
        "accuracies": accuracies,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "trips": trips.summary(),
        "weights": weights,
    }


def compared(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All rows of a model."""
    device = torch.device(options.device)
    side = options.side or MODELS[name]
    model = network(name).train()
    data = [pictures(n, side, seed, device) for seed, n in ((1, 8 * options.batch), (2, 64))]
    count = sum(p.numel() for p in model.parameters())
    found: dict[str, Any] = {"parameters": count, "link": link(4 * count, device), "ways": {}}
    plain: dict[str, torch.Tensor] = {}
    for way in WAYS:
        if name in options.short.split(",") and way not in ("baseline", "outcore"):
            continue
        if options.ways and way not in options.ways:
            continue
        try:
            row = trained(copy.deepcopy(model).to(device), way, *data, options)
        except (RuntimeError, OutcoreError) as error:
            traceback.print_exc()
            found["ways"][way] = {"error": str(error)}
            continue
        weights = row.pop("weights")
        plain = plain or weights
        row["weights_equal"] = all(torch.equal(weights[k], plain[k]) for k in plain)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found["ways"][way] = row
        bound = max(found["ways"]["baseline"]["step_s"], found["link"].get("both_s", 0.0))
        row["over_baseline"] = row["step_s"] / found["ways"]["baseline"]["step_s"]
        row["over_bound"] = row["step_s"] / bound
        print(
            f"{name:13} {way:26} {row['step_s'] * 1e3:8.2f} ms {row['over_baseline']:6.2f}x baseline "
            f"{row['over_bound']:6.2f}x bound  accuracy {row['best_accuracy']:.3f}  equal {row['weights_equal']}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--ways", nargs="*", default=[])
    parser.add_argument("--short", default="", help="models of which only the baseline and outcore are run")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--side", type=int, default=0)
    parser.add_argument("--name", default="")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.backends.cudnn.deterministic = True
    device = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu"
    document: dict[str, Any] = {
        "environment": {"device": device, "torch": torch.__version__, "python": platform.python_version()},
        "batch": options.batch,
        "epochs": options.epochs,
        "models": {},
    }
    for name in options.models.split(","):
        document["models"][name] = compared(name, options)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"{time.strftime('%Y-%m-%d')}-{options.name or options.device}.json"
            path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
