"""What encodings alone save, per network, in memory and gradients: Gist's own question.

    python benchmarks/gist-encodings/run.py --out results/

Gist (Jain et al., ISCA 2018) holds what backward needs in fewer bits between forward and backward: up to 2x less memory
without loss at 4 % more time, beyond 4x with loss. Here every buffer that has an exact smaller form gets it (lossless:
signs of ReLU outputs, positions in pool windows, masks as bits), then the outputs of ReLU as bitmap and values too
("sparse"), then everything that is left as half, bfloat16 or 8 bits in groups (lossy, with what that does to the
gradients). Nothing is recomputed or moved. The ratio is that of the peak above weights, gradients and inputs, as there;
the peak itself is beside it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outcore
from outcore.cost.rough import by_bytes
from outcore.cost.saved import account
from outcore.memory.rates import memory_rate
from outcore.ops.encoding import held_bytes
from outcore.planner.keeping import Keeping

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORKS = ("alexnet", "vgg19", "inception_v3", "resnet50", "densenet121", "unet")
KINDS = ("lossless", "sparse", "half", "bf16", "int8")


def build(name: str) -> nn.Module:
    if name == "unet":
        return outcore.models.UNet()
    import torchvision

    more = {"init_weights": False, "aux_logits": False} if name == "inception_v3" else {}
    return getattr(torchvision.models, name)(**more)


def policy_for(keeping: Keeping, kind: str) -> dict[str, str]:
    """Encodings for everything that can have one."""
    found: dict[str, str] = {}
    for buffer in keeping.buffers.values():
        if buffer.kind == "given" or buffer.opaque or not buffer.savers or buffer.bytes < 2**16:
            continue
        exact = [c for c in keeping.choices(buffer) if c.startswith("encode")]
        if exact:
            found[buffer.name] = exact[0]
        elif kind != "lossless" and buffer.kind == "value" and buffer.element_bytes == 4:
            rectified = "sign" in buffer.savers.values()
            if kind != "sparse" or rectified:
                found[buffer.name] = f"encode:{kind}"
    return found


def stashed(keeping: Keeping, policy: dict[str, str]) -> int:
    """Bytes that are held between forward and backward."""
    kept = [b for b in keeping.buffers.values() if b.savers and b.kind != "given"]
    return sum(held_bytes(b, policy[b.name])[0] if b.name in policy else b.bytes for b in kept)


def measured(model: nn.Module, images: torch.Tensor) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(images).square().mean().backward()
        optimizer.step()

    if DEVICE != "cuda":
        step()
        return {"ms": 1.0, "peak": 1, "held": 1}
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()  # weights, gradients, images
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return {"ms": times[3], "peak": torch.cuda.max_memory_allocated(), "held": held}


def case(name: str, batch: int, side: int, kinds: list[str]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    original = build(name).to(DEVICE)
    side = max(side, 299) if name == "inception_v3" else side
    images = torch.randn(batch, 3, side, side, device=DEVICE)
    rows: list[dict[str, Any]] = []

    def add(how: str, **facts: Any) -> None:
        rows.append({"model": name, "batch": batch, "side": side, "how": how, **facts})
        print(json.dumps(rows[-1]), flush=True)
        gc.collect()

    add("plain", **measured(original, images))
    graph = outcore.capture(original, (images,))
    rate = memory_rate(images.device)
    costs = by_bytes(account(graph), rate)
    keeping = Keeping(graph, costs, 0.0, None, rate)
    kept = stashed(keeping, {})
    for kind in kinds:
        model = copy.deepcopy(original)
        try:
            plan = policy_for(keeping, kind)
            outcore.within(model, (images,), memory=None, optimizer=0.0, plan=plan, costs=costs, quiet=True)
            codecs = {how: list(plan.values()).count(how) for how in sorted(set(plan.values()))}
            facts: dict[str, Any] = {"kept_bytes": kept, "stashed_bytes": stashed(keeping, plan)}
            facts["predicted_peak"] = outcore.memory_plan(model).peak_bytes
            if (effect := outcore.gradient_effect(model)) is not None and effect.whole and effect.worst:
                facts |= {"off": effect.whole.relative, "cosine": effect.whole.cosine, "median_off": effect.median}
                facts |= {"worst_off": effect.worst.relative, "worst": effect.worst.name}
            gc.collect()
            add(kind, **measured(model, images), **facts, codecs=codecs)
        except Exception as error:
            add(kind, error=f"{type(error).__name__}: {str(error)[:200]}")
        del model
    return rows


def sizes(name: str, batch: int, side: int, kinds: list[str]) -> dict[str, Any]:
    """What is stashed under each kind of encoding: sizes alone, which need no device."""
    side = max(side, 299) if name == "inception_v3" else side
    graph = outcore.capture(build(name), [(batch, 3, side, side)])
    keeping = Keeping(graph, by_bytes(account(graph), 1e12), 0.0, None)
    plain = sum(  # also what plain training keeps although backward needs no more than its shape
        b.bytes for b in keeping.buffers.values() if (b.savers or b.shapes) and b.kind != "given"
    )
    row = {"model": name, "batch": batch, "side": side, "how": "sizes", "plain": plain}
    row |= {kind: stashed(keeping, policy_for(keeping, kind)) for kind in kinds}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--sizes-only", action="store_true", help="train nothing")
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    started = time.time()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    environment = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "outcore": outcore.__version__,
    }
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{time.strftime('%Y-%m-%d')}-h200.json"
    for name in args.networks.split(","):
        if time.time() - started > args.seconds:
            break
        batch = args.batch if name != "unet" else max(1, args.batch // 4)
        if args.sizes_only:
            rows.append(sizes(name, batch, args.side, args.kinds.split(",")))
            continue
        rows += case(name, batch, args.side, args.kinds.split(","))
        path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    if args.sizes_only:
        path = args.out / f"{time.strftime('%Y-%m-%d')}-sizes.json"
        path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    print(f"done after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
