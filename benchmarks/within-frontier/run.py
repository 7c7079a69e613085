"""Step time against peak memory: plain PyTorch, outcore.within at several budgets, and the peers, in one run.

    python benchmarks/within-frontier/run.py --out results/ [--models resnet50,unet] [--sizes 32x224,1x4096]

A step is forward, loss, backward and an SGD step. The peak is the allocator's own; the time is the median of steps
timed with CUDA events. Every row is one way of training the same weights on the same batch.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import time
import types
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import outcore

SHARES = (1.0, 0.5, 0.33, 0.0)
"""Budgets, over the predicted peak of plain training; 0 stands for the smallest."""


def build(name: str) -> nn.Module:
    if name == "unet":
        return outcore.models.UNet()
    import torchvision

    if name == "inception_v3":
        return torchvision.models.inception_v3(init_weights=False, aux_logits=False)
    return getattr(torchvision.models, name)()


BLOCKS = {
    "resnet50": ("Bottleneck",),
    "densenet121": ("_Transition", "_DenseBlock"),
    "convnext_tiny": ("CNBlock",),
    "inception_v3": tuple(f"Inception{x}" for x in "ABCDE"),
    "unet": ("Encoder", "Decoder", "DoubleConv", "Down", "Up", "Block"),
    "vgg19": (),
}


def checkpoint_blocks(name: str, model: nn.Module) -> nn.Module:
    """torch.utils.checkpoint around every block; for VGG around every part between pools."""
    if name == "vgg19":
        parts, part = [], []
        for layer in model.features:
            part.append(layer)
            if isinstance(layer, nn.MaxPool2d):
                parts.append(nn.Sequential(*part))
                part = []
        model.features = nn.Sequential(*parts)
        targets = list(model.features)
    else:
        targets = [m for m in model.modules() if type(m).__name__ in BLOCKS[name]]
        if not targets:
            targets = [m for m in model.children() if next(m.parameters(), None) is not None]
    for module in targets:
        inner = module.forward

        def forward(self, *args, inner=inner, **kwargs):
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

        module.forward = types.MethodType(forward, module)
    return model


class Bench:
    """One way of training."""

    def __init__(self, model: nn.Module, images: torch.Tensor, bf16: bool) -> None:
        self.model, self.images, self.bf16 = model, images, bf16
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def loss(self) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.bf16):
            out = self.model(self.images)
        return out.float().square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()

    def measure(self, runs: int = 7) -> dict:
        for _ in range(3):
            self.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
        events[0].record()
        for i in range(runs):
            self.step()
            events[i + 1].record()
        torch.cuda.synchronize()
        times = sorted(events[i].elapsed_time(events[i + 1]) for i in range(runs))
        return {"ms": times[len(times) // 2], "peak": torch.cuda.max_memory_allocated()}


def gradients(bench: Bench) -> list[torch.Tensor]:
    bench.optimizer.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    bench.loss().backward()
    return [p.grad.clone() for p in bench.model.parameters()]


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def case(name: str, batch: int, side: int, bf16: bool, peers: list[str], shares: list[float], rows: list[dict]) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    original = build(name)
    side_ = side if name != "inception_v3" or side > 299 else 299
    images = torch.randn(batch, 3, side_, side_)
    key = {"model": name, "batch": batch, "side": side_, "precision": "bf16 channels_last" if bf16 else "tf32"}

    def fresh() -> Bench:
        model = copy.deepcopy(original).cuda()
        x = images.cuda()
        if bf16:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        return Bench(model, x, bf16)

    def add(how: str, make, **more) -> dict | None:
        clean()
        start = time.time()
        try:
            row = {**key, "how": how, **make(), **more}
        except torch.OutOfMemoryError:
            row = {**key, "how": how, "error": "out of memory", **more}
        except Exception as error:
            row = {**key, "how": how, "error": f"{type(error).__name__}: {str(error)[:300]}", **more}
        row["wall_s"] = round(time.time() - start, 1)
        rows.append(row)
        print(json.dumps(row), flush=True)
        clean()
        return row

    plain = add("plain", lambda: fresh().measure())
    state: dict = {}

    def ours(share: float, graphs: bool = False) -> dict:
        bench = fresh()
        base = state.get("plain_bytes")
        start = time.time()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            if base is None or share >= 1:
                memory = None
            elif share == 0:
                memory = 0
            else:
                memory = int(share * base)
            if share == 0:
                try:
                    outcore.within(
                        bench.model, (bench.images,), memory=1, optimizer=0.0, costs=state["costs"], quiet=True
                    )
                except outcore.OutcoreError as error:
                    text = str(error)
                    memory = int(text.partition('memory="')[2].partition("MiB")[0]) * 2**20
                    memory = int(memory * 1.05)
            outcore.within(
                bench.model,
                (bench.images,),
                memory=memory,
                optimizer=0.0,
                costs=state.get("costs"),
                measure_s=5,
                graphs=graphs,
                quiet=True,
            )
        plan = outcore.memory_plan(bench.model)
        state.setdefault("costs", bench.model.forward.costs)
        state.setdefault("plain_bytes", plan.plain_bytes)
        planned = time.time() - start
        result = bench.measure()
        result["reserved"] = torch.cuda.max_memory_reserved()
        counts: dict[str, int] = {}
        for how in plan.policy.values():
            counts[how] = counts.get(how, 0) + 1
        return {
            **result,
            "budget": memory,
            "predicted_peak": plan.peak_bytes,
            "predicted_slowdown": plan.slowdown,
            "predicted_plain_ms": plan.keeping.plain_s * 1e3,
            "policies": counts,
            "plan_s": round(planned, 1),
        }

    for share in shares:
        row = add(f"outcore {share or 'least'}", lambda share=share: ours(share))
        if row and plain and "ms" in row and "ms" in plain:
            print(f"   -> {row['ms'] / plain['ms']:.3f}x at {row['peak'] / plain['peak']:.3f}", flush=True)

    if "graphs" in peers and side <= 512:
        for share in [s for s in shares if 0 < s < 1]:
            add(f"outcore {share} graphs", lambda share=share: ours(share, graphs=True))

    if "checkpoint" in peers:

        def checkpointed() -> dict:
            bench = fresh()
            checkpoint_blocks(name, bench.model)
            return bench.measure()

        add("checkpoint per block", checkpointed)
    if "save_on_cpu" in peers:

        def offloaded() -> dict:
            bench = fresh()
            inner = bench.step

            def step() -> None:
                with torch.autograd.graph.save_on_cpu(pin_memory=True):
                    inner()

            bench.step = step
            return bench.measure(runs=3)

        add("save_on_cpu", offloaded)
    for budget in [float(p.removeprefix("compile")) for p in peers if p.startswith("compile")]:

        def compiled(budget: float = budget) -> dict:
            import torch._functorch.config as config

            torch._dynamo.reset()
            config.activation_memory_budget = budget
            bench = fresh()
            bench.model = torch.compile(bench.model)
            return bench.measure()

        add(f"compile budget {budget}", compiled)
    if "equal" in peers:

        def equal() -> dict:
            torch.backends.cudnn.deterministic = True
            try:
                want, again = gradients(fresh()), gradients(fresh())
                bench = fresh()
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
                    memory = int(0.45 * state["plain_bytes"])
                    outcore.within(
                        bench.model, (bench.images,), memory=memory, optimizer=0.0, costs=state["costs"], quiet=True
                    )
                got = gradients(bench)
            finally:
                torch.backends.cudnn.deterministic = False
            same = sum(torch.equal(a, b) for a, b in zip(want, got, strict=True))
            control = sum(torch.equal(a, b) for a, b in zip(want, again, strict=True))
            return {"parameters": len(want), "bitwise_equal": same, "plain_again_equal": control}

        add("gradients at 0.45", equal)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--models", default="resnet50,vgg19,inception_v3,densenet121,unet,convnext_tiny")
    parser.add_argument("--sizes", default="32x224,1x4096")
    parser.add_argument("--precisions", default="tf32,bf16")
    parser.add_argument("--peers", default="checkpoint,save_on_cpu,equal")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    end = time.time() + args.seconds
    rows: list[dict] = []
    environment = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "outcore": outcore.__version__,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{time.strftime('%Y-%m-%d')}-frontier.json"
    for size in args.sizes.split(","):
        batch, side = map(int, size.split("x"))
        for name in args.models.split(","):
            for precision in args.precisions.split(","):
                if time.time() > end:
                    break
                case(
                    name,
                    batch,
                    side,
                    precision == "bf16",
                    args.peers.split(","),
                    [float(s) for s in args.shares.split(",")],
                    rows,
                )
                path.write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
