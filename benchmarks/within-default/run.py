"""`outcore.within` as a user calls it: networks that no plan was tuned on, at half of plain's memory, with defaults.

    python benchmarks/within-default/run.py --out DIR [--only NAME ...] [--share 0.5] [--wall] [--seconds 500]

For every network, in one process of its own: plain training first (its reserved peak, its time, its gradients), then
the public call with a budget of a share of that, first step included: planning time, reserved peak, median of ten
steps, how many gradients are bitwise plain's. With --wall the process may not reserve more than the budget
(`torch.cuda.set_per_process_memory_fraction`) while it plans and trains within it; allocator retries and refused
requests (workspaces among them) are counted from the first step on, and the same steps are timed without the wall too.
Planning starts with an empty cache; a second start, with the files of the first and nothing in memory, is timed too.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing as mp
import os
import shutil
import statistics
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 10
STEADY = 16
"""Steps before the timed ones: in these, live steps and graphs are compared."""


class UNet3d(nn.Module):
    """A small 3-D U-Net with instance norms and biases before them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()

        def block(i: int, o: int) -> nn.Module:
            layers = [
                nn.Conv3d(i, o, 3, padding=1),
                nn.InstanceNorm3d(o, affine=True),
                nn.LeakyReLU(0.01, inplace=True),
            ]
            return nn.Sequential(
                *layers,
                nn.Conv3d(o, o, 3, padding=1),
                nn.InstanceNorm3d(o, affine=True),
                nn.LeakyReLU(0.01, inplace=True),
            )

        widths = [width * 2**i for i in range(4)]
        self.down = nn.ModuleList([block(1 if i == 0 else widths[i - 1], w) for i, w in enumerate(widths)])
        self.up = nn.ModuleList([nn.ConvTranspose3d(widths[i + 1], widths[i], 2, stride=2) for i in range(3)])
        self.merge = nn.ModuleList([block(2 * widths[i], widths[i]) for i in range(3)])
        self.head = nn.Conv3d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, part in enumerate(self.down):
            x = part(x if i == 0 else F.max_pool3d(x, 2))
            skips.append(x)
        skips.pop()
        for i in (2, 1, 0):
            x = self.merge[i](torch.cat([self.up[i](x), skips.pop()], 1))
        return self.head(x)


def _torchvision(name: str, batch: int, side: int, **options: Any) -> Any:
    def make() -> tuple[nn.Module, torch.Tensor]:
        import torchvision

        return getattr(torchvision.models, name)(weights=None, **options), torch.randn(batch, 3, side, side)

    return make


def _timm(name: str, batch: int, side: int) -> Any:
    def make() -> tuple[nn.Module, torch.Tensor]:
        import timm

        return timm.create_model(name), torch.randn(batch, 3, side, side)

    return make


NETWORKS: dict[str, Any] = {
    "resnet50 1x4096": _torchvision("resnet50", 1, 4096),
    "resnet50 64x224": _torchvision("resnet50", 64, 224),
    "resnext50 64x224": _torchvision("resnext50_32x4d", 64, 224),
    "wide_resnet50 64x224": _torchvision("wide_resnet50_2", 64, 224),
    "densenet121 64x224": _torchvision("densenet121", 64, 224),
    "efficientnet_b0 64x224": _torchvision("efficientnet_b0", 64, 224),
    "efficientnet_v2_s 64x224": _torchvision("efficientnet_v2_s", 64, 224),
    "mobilenet_v3_large 128x224": _torchvision("mobilenet_v3_large", 128, 224),
    "regnet_y_1_6gf 64x224": _torchvision("regnet_y_1_6gf", 64, 224),
    "shufflenet_v2 128x224": _torchvision("shufflenet_v2_x1_0", 128, 224),
    "mnasnet1_0 128x224": _torchvision("mnasnet1_0", 128, 224),
    "squeezenet1_1 128x224": _torchvision("squeezenet1_1", 128, 224),
    "convnext_tiny 64x224": _torchvision("convnext_tiny", 64, 224),
    "swin_t 64x224": _torchvision("swin_t", 64, 224),
    "vit_b_16 64x224": _torchvision("vit_b_16", 64, 224),
    "maxvit_t 32x224": _torchvision("maxvit_t", 32, 224),
    "poolformer_s12 64x224": _timm("poolformer_s12", 64, 224),
    "mixer_b16 64x224": _timm("mixer_b16_224", 64, 224),
    "coatnet_0 32x224": _timm("coatnet_0_rw_224", 32, 224),
    "rexnet_100 64x224": _timm("rexnet_100", 64, 224),
    "unet3d 2x96": lambda: (UNet3d(), torch.randn(2, 1, 96, 96, 96)),
    "vgg16_bn 32x224": _torchvision("vgg16_bn", 32, 224),
}


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """The mean of squares in float32."""
    return output.float().square().mean()


def take_step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, bf16: bool, seed: int) -> None:
    """One step of training."""
    torch.manual_seed(seed)
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        output = model(x)
    loss_of(output).backward()
    optimizer.step()


def trouble() -> tuple[int, int]:
    """How often the allocator looked again for room, and how often it found none."""
    counted = torch.cuda.memory_stats()
    return counted["num_alloc_retries"], counted["num_ooms"]


def as_graphs(model: nn.Module) -> bool:
    """Whether the step has become CUDA graphs."""
    managed_forward = model.__dict__["forward"]
    choice = getattr(managed_forward, "choice", None)
    return bool(choice is not None and choice.taken) or any(e and e.graphed for e in managed_forward.admitted.values())


def clocked_parts() -> dict[str, float]:
    """Seconds that go into measuring calls, searching plans and trying steps, from now on."""
    from outcore.cost import cost_cache
    from outcore.memory.saved_tensors import plan_call, trial_steps

    spent: dict[str, float] = {}

    def clocked(module: Any, name: str, part: str) -> None:
        run = getattr(module, name)

        def around(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                result = run(*args, **kwargs)
                if part == "trying":
                    spent[f"reserved in try {int(spent.get('trying, times', 0))}"] = result / 2**20
                return result
            finally:
                spent[part] = spent.get(part, 0.0) + time.perf_counter() - begin
                spent[f"{part}, times"] = spent.get(f"{part}, times", 0) + 1

        setattr(module, name, around)

    clocked(cost_cache, "measure", "measuring")
    clocked(plan_call, "plan_memory", "searching")
    clocked(trial_steps, "_reserved", "trying")
    return spent


def timed(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer, bf16: bool) -> list[float]:
    """Seconds of steps, after three that warm up."""
    found = []
    for i in range(3 + STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        take_step(model, x, optimizer, bf16, i)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found[3:]


def one(name: str, share: float, bf16: bool, wall: bool, options: dict[str, Any], pipe: Any) -> None:
    """One network, in a process of its own."""
    row: dict[str, Any] = {
        "network": name,
        "precision": "bf16" if bf16 else "tf32",
        "share": share,
        "wall": wall,
        **options,
    }
    try:
        _one(row, name, share, bf16, wall, options)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:200]
        frames = traceback.extract_tb(error.__traceback__)
        row["where"] = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames if "outcore" in f.filename][-8:]
    pipe.send(row)


def _one(row: dict[str, Any], name: str, share: float, bf16: bool, wall: bool, options: dict[str, Any]) -> None:
    import outcore
    from outcore.cost import cost_cache
    from outcore.memory.saved_tensors import plan_cache

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    state = copy.deepcopy(model.state_dict())  # on the host: the wall is around the training alone
    model, x = model.cuda().train(), x.cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    plain = timed(model, x, optimizer, bf16)
    reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()

    def gradients() -> list[torch.Tensor]:
        model.load_state_dict(state)
        take_step(model, x, torch.optim.SGD(model.parameters(), 0.0), bf16, 7)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want, repeated = gradients(), gradients()
    same = [torch.equal(a, b) for a, b in zip(want, repeated, strict=True)]
    host = [g.cpu() for g in want]
    del want, repeated, optimizer
    model.load_state_dict(state)
    model.zero_grad()
    torch.cuda.empty_cache()
    budget = int(share * reserved)
    if wall:
        torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    torch.cuda.reset_peak_memory_stats()
    cache = tempfile.mkdtemp()
    os.environ["OUTCORE_CACHE"] = cache

    def manage() -> tuple[float, list[str]]:
        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as told, torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            warnings.simplefilter("always")
            outcore.within(model, (x,), memory=budget, optimizer=optimizer, loss=loss_of, quiet=True, **options)
        return time.perf_counter() - begin, [str(w.message)[:300] for w in told]

    spent = clocked_parts()
    planning_s, told = manage()
    plan = outcore.memory_plan(model)
    row |= {"budget": budget, "planning_s": planning_s, "told": told, "state": str(getattr(plan, "state", ""))}
    row |= {"of_planning_s": dict(spent), "predicted_x": plan.slowdown if hasattr(plan, "slowdown") else None}
    cost_cache._KNOWN.clear()
    plan_cache._KNOWN.clear()
    second_s, _ = manage()
    shutil.rmtree(cache, ignore_errors=True)
    plan_peak = outcore.memory_plan(model).peak_bytes if hasattr(outcore.memory_plan(model), "peak_bytes") else 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = trouble()
    first: list[float] = []
    row |= {"first_steps": first, "retries_by_step": (by_step := []), "seconds_by_step": (seconds := [])}
    for i in range(STEADY):
        torch.cuda.reset_peak_memory_stats()
        begin, looked_again = time.perf_counter(), trouble()[0]
        take_step(model, x, optimizer, bf16, i)
        torch.cuda.synchronize()
        first.append(torch.cuda.max_memory_reserved() / budget)
        by_step.append(trouble()[0] - looked_again)
        seconds.append(time.perf_counter() - begin)
    ours = timed(model, x, optimizer, bf16)
    peak = torch.cuda.max_memory_reserved()
    retries, refused = (now - then for now, then in zip(trouble(), before, strict=True))
    active = torch.cuda.max_memory_allocated()
    torch.cuda.set_per_process_memory_fraction(1.0)
    free = timed(model, x, optimizer, bf16) if wall else ours
    found = gradients()
    equal = sum(torch.equal(a, b.cpu()) for a, b in zip(host, found, strict=True))
    row |= {
        "plain_ms": 1e3 * statistics.median(plain),
        "plain_reserved": reserved,
        "plain_allocated": allocated,
        "second_start_s": second_s,
        "calls": len(outcore.memory_plan(model).keeping.order),
        "as_graphs": as_graphs(model),
        "why_live": getattr(getattr(model.__dict__["forward"], "choice", None), "reason", ""),
        "predicted": plan_peak,
        "ours_ms": 1e3 * statistics.median(ours),
        "ratio": statistics.median(ours) / statistics.median(plain),
        "reserved": max(peak, int(max(first) * budget)),
        "allocated": active,
        "retries": retries,
        "refused": refused,
        "without_wall_ms": 1e3 * statistics.median(free),
        "gradients": len(host),
        "bitwise": equal,
        "plain_repeats": sum(same),
    }


def shown(row: dict[str, Any]) -> str:
    """A row in one line."""
    if "error" in row:
        return str([row["error"], row.get("where"), row.get("told"), row.get("first_steps"), row.get("of_planning_s")])
    parts = {part: round(value, 1) for part, value in row["of_planning_s"].items()}
    return (
        f"{row['ratio']:.2f}x (predicted {row['predicted_x'] or 0:.2f}x, "
        f"without wall {row['without_wall_ms'] / row['plain_ms']:.2f}x) at "
        f"{row['reserved'] / row['plain_reserved']:.2f} reserved ({row['reserved'] / row['budget']:.2f} of budget, "
        f"allocated {row['allocated'] / row['budget']:.2f}), planning {row['planning_s']:.1f} s {parts}, "
        f"again {row['second_start_s']:.1f} s, retries {row['retries']}, refused {row['refused']}, "
        f"{row['bitwise']}/{row['gradients']} (plain {row['plain_repeats']}), {row['calls']} calls"
        f"{', as graphs' if row['as_graphs'] else ''} {row['why_live'][:160]} {row['told']}"
        f"{[round(v, 2) for v in row['first_steps']]} {row['retries_by_step']}"
        f" longest {max(row['seconds_by_step']):.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--graphs", choices=["on", "off"])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began, rows = time.perf_counter(), []
    context = mp.get_context("spawn")
    for name in given.only or NETWORKS:
        if time.perf_counter() - began > given.seconds:
            break
        here, there = context.Pipe()
        options = {} if given.graphs is None else {"graphs": given.graphs == "on"}
        process = context.Process(target=one, args=(name, given.share, not given.tf32, given.wall, options, there))
        process.start()
        row = here.recv() if here.poll(180) else {"network": name, "error": "took more than three minutes"}
        process.join(3)
        process.kill()
        rows.append(row)
        print(f"{name:28s} {shown(row)}", flush=True)
        facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": rows}
        (given.out / f"default-{'wall-' if given.wall else ''}{given.share}.json").write_text(
            json.dumps(facts, indent=1)
        )


if __name__ == "__main__":
    main()
