"""Time and memory of a step: plain, torch.compile at its own budgets, and `outcore.within(..., compile=True)`.

    python benchmarks/within-compiled/run.py -o results.json [--cases resnet50,gpt] [--seconds 500] [--device cpu]

Each way trains the same network on the same batch with the same optimizer. Peaks are what the allocator reserves (on a
CPU, live bytes by torch's profiler); ours also runs under `torch.cuda.set_per_process_memory_fraction` at its budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import outcore

STEPS, WARM = 10, 3


class Cast(nn.Module):
    """A network under bf16 autocast."""

    def __init__(self, network: nn.Module, bf16: bool) -> None:
        super().__init__()
        self.network, self.bf16 = network, bf16

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns; of a language model the loss."""
        with torch.autocast("cuda" if next(self.parameters()).is_cuda else "cpu", torch.bfloat16, enabled=self.bf16):
            found = self.network(*args, **kwargs)
        return found.loss if hasattr(found, "loss") else found


def case(name: str, device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A network with its batch; on a CPU a small one."""
    torch.manual_seed(0)
    small = device == "cpu"
    if name.startswith("gpt"):
        from transformers import GPT2Config, GPT2LMHeadModel

        size = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 500, "n_positions": 64} if small else {}
        model = GPT2LMHeadModel(GPT2Config(use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **size))
        ids = torch.randint(0, 500, (2, 64) if small else (8, 1024), device=device)
        return Cast(model, not small).to(device), (), {"input_ids": ids, "labels": ids}
    if small:
        layers = [
            nn.Sequential(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for i in range(4)
        ]
        model: nn.Module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        return model, (torch.randn(2, 3, 64, 64),), {}
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    if name in ("resnet50", "densenet121", "convnext_tiny"):
        images = (
            torch.randn(1, 3, 4096, 4096, device=device)
            if name == "resnet50"
            else torch.randn(64, 3, 224, 224, device=device)
        )
    else:
        images = torch.randn(64, 3, 224, 224, device=device)
    model = Cast(model, True).to(device).to(memory_format=torch.channels_last)
    return model, (images.to(memory_format=torch.channels_last),), {}


def train(model: nn.Module, run: Any, args: Any, kwargs: Any, optimizer: Any, device: str) -> dict[str, Any]:
    """Median time of a step, and what was reserved."""

    def step() -> None:
        output = run(*args, **kwargs)
        loss = output if output.dim() == 0 else output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    if device == "cpu":
        from outcore.compiled.measured_peak import measured_peak

        own = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        return {"ms": 0.0, "peak_bytes": own + measured_peak(step, torch.device("cpu"))}
    gc.collect()
    torch.cuda.synchronize()
    first = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return {
        "ms": sorted(times)[STEPS // 2],
        "peak_bytes": torch.cuda.max_memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "first_steps_bytes": first,
    }


def measured(name: str, device: str, wrap: Callable[[nn.Module, Any, Any, Any], Any], limit: int | None = None) -> Any:
    """One way of training, on a fresh network."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else min(1.0, limit / total))
    began = time.perf_counter()
    try:
        model, args, kwargs = case(name, device)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        run = wrap(model, args, kwargs, optimizer)
        ready = time.perf_counter() - began
        row = train(model, run, args, kwargs, optimizer, device)
        row["prepare_s"], row["all_s"] = ready, time.perf_counter() - began
        if "forward" in model.__dict__:
            plan = outcore.memory_plan(model)
            row["plan"] = plan.explain()
            row["predicted_bytes"], row["corrected_bytes"] = plan.peak_bytes, getattr(plan, "corrected_bytes", None)
        return row
    except Exception as error:
        return {
            "error": f"{type(error).__name__}: {str(error)[:400]}",
            "least_bytes": getattr(error, "least_bytes", None),
        }
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> None:
    """Run the cases and write what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", type=Path, required=True)
    parser.add_argument("--cases", default="resnet50,gpt")
    parser.add_argument("--budgets", default="1.0,0.5,0.1")
    parser.add_argument("--ours", default="1.0,0.6,0.4")
    parser.add_argument("--eager", default="")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--overhead", action="store_true")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    if asked.device == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    rows: list[dict[str, Any]] = []

    def add(name: str, way: str, row: dict[str, Any], **more: Any) -> dict[str, Any]:
        rows.append({"case": name, "way": way, **more, **row})
        device = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
        document = {"torch": torch.__version__, "device": device, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        asked.o.write_text(json.dumps(document, indent=1))
        print(name, way, {k: v for k, v in row.items() if k != "plan"}, flush=True)
        return row

    for name in asked.cases.split(","):
        plain = add(name, "plain", measured(name, asked.device, lambda m, a, k, o: m))
        base = plain.get("peak_bytes", 0)
        for text in filter(None, asked.ours.split(",")):
            if time.monotonic() > end:
                break
            budget = int(float(text) * base)

            def ours(m: nn.Module, a: Any, k: Any, o: Any, budget: int = budget) -> nn.Module:
                return outcore.within(m, a, k, memory=budget, compile=True, optimizer=o)

            add(name, "ours", measured(name, asked.device, ours, budget), budget_bytes=budget, share=float(text))
        for text in filter(None, asked.eager.split(",")):
            if time.monotonic() > end:
                break
            budget = int(float(text) * base)

            def by_call(m: nn.Module, a: Any, k: Any, o: Any, budget: int = budget) -> nn.Module:
                return outcore.within(m, a, k, memory=budget, exact="reassociated", optimizer=o)

            row = measured(name, asked.device, by_call, budget)
            add(name, "ours, not compiled", row, budget_bytes=budget, share=float(text))
        for text in filter(None, asked.budgets.split(",")):
            if time.monotonic() > end:
                break
            with torch._functorch.config.patch(activation_memory_budget=float(text)):
                add(
                    name,
                    "compile",
                    measured(name, asked.device, lambda m, a, k, o: torch.compile(m)),
                    share=float(text),
                )
        if asked.overhead and time.monotonic() < end:
            overhead = measured(name, asked.device, lambda m, a, k, o: torch.compile(m, mode="reduce-overhead"))
            add(name, "reduce-overhead", overhead)


if __name__ == "__main__":
    main()
