"""BERT-base in fp32, plain and offloading inside CUDA graphs: how many gradients are those of the first plain step?

    python benchmarks/within-exactness/attention.py --out attention.json

Memory-efficient attention adds up the gradient of its queries in no fixed order, unless deterministic operations
are asked for. Whether a plain step shows it depends on what else the device does, so plain steps run alone and beside
copies to the host. Under a plan they run with the copies that the plan makes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import outcore
from outcore.program.policies import OFFLOAD

Gradients = dict[str, torch.Tensor]


def main() -> None:
    """Both ways of adding up."""
    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, default=Path("attention.json"))
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--length", type=int, default=256)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--steps", type=int, default=8)
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for fixed in (False, True):
        torch.use_deterministic_algorithms(fixed)
        for how, equal, farthest in ways(chosen):
            rows.append(
                {"order": "fixed" if fixed else "torch's own", "how": how, "equal": equal, "farthest": farthest}
            )
            print(rows[-1], flush=True)
            told = {"torch": torch.__version__, "python": platform.python_version(), "date": str(date.today())}
            on = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
            chosen.out.write_text(json.dumps({"on": on, **told, "batch": chosen.batch, "rows": rows}, indent=1) + "\n")


def ways(chosen: argparse.Namespace) -> Any:
    """Each way to run a step, with the number of equal gradients of every step, and the largest relative distance."""
    from transformers import BertConfig, BertForMaskedLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(num_hidden_layers=chosen.layers, attn_implementation="sdpa")).to(device).train()
    ids = torch.randint(5, 30000, (chosen.batch, chosen.length), device=device)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    asked["attention_mask"][:, -chosen.length // 8 :] = 0

    def step(before: Callable[[], None] = lambda: None) -> Gradients:
        model.zero_grad()
        torch.manual_seed(3)
        before()
        kernels = [SDPBackend.EFFICIENT_ATTENTION] if device == "cuda" else [SDPBackend.MATH]
        with sdpa_kernel(kernels):
            model(**asked).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    first = step()

    def compared(run: Callable[[], Gradients]) -> tuple[list[str], float]:
        equal, farthest = [], 0.0
        for _ in range(chosen.steps):
            got = run()
            differing = [n for n in first if not torch.equal(first[n], got[n])]
            equal.append(f"{len(first) - len(differing)} of {len(first)}")
            distances = [float((first[n] - got[n]).norm() / first[n].norm()) for n in differing]
            farthest = max(farthest, *distances) if distances else farthest
        return equal, farthest

    yield "plain", *compared(step)
    if device == "cuda":
        yield "plain, beside copies", *compared(lambda: step(Copies()))
    outcore.within(model, (), asked, memory=None, optimizer=0.0, measure_s=1.0, quiet=True)
    keeping = outcore.memory_plan(model).keeping
    leaving = [b for b in keeping.buffers.values() if b.kind == "value" and OFFLOAD in keeping.choices(b)]
    leaving.sort(key=lambda b: -b.bytes)
    plan = {b.name: "offload" for b in leaving[:40]}
    for graphs in (False, True) if device == "cuda" else (False,):
        settings = {"plan": plan, "costs": keeping.costs, "graphs": graphs}
        outcore.within(model, (), asked, memory=None, optimizer=0.0, quiet=True, **settings)
        yield f"{len(plan)} values offloaded{', graphs' if graphs else ''}", *compared(step)
    outcore.release(model)


class Copies:
    """Copies to the host and back, as many as take about a step."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.above = torch.empty(2**26, dtype=torch.uint8, device="cuda")
        self.below = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)

    def __call__(self) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(60):
                self.below.copy_(self.above, non_blocking=True)
                self.above.copy_(self.below, non_blocking=True)


if __name__ == "__main__":
    main()
