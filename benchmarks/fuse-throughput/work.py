"""What a step of one model has to compute and to move, counted on tensors without memory.

    python work.py --out results/DATE-work.json

Held against the time of a graphed serial step (report.py), it says how much of the GPU that step leaves unused: the
share of its matrix rate, and of its memory bandwidth if every operation reads and writes everything once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(Path(__file__).resolve().parent)]

from measures import adam  # noqa: E402

from tests.fusion.workloads import USUAL, Workload  # noqa: E402


class Counter(TorchDispatchMode):
    """FLOPs, and bytes that operations read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        if not func.is_view and "empty" not in str(func):
            self.operations += 1
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return result


def count(workload: Workload, amp: bool, mode: FakeTensorMode) -> dict[str, Any]:
    model, batch = workload.build(0), workload.batch()
    with mode:
        losses: list[tuple[Callable[..., Any], torch.optim.Optimizer]]
        if workload.adversarial:
            losses = [(o.loss, o.optimizer(model, 0)) for o in workload.objectives(adam).values()]
        else:
            losses = [(lambda m, x, y: F.cross_entropy(m(x), y), adam(model.parameters()))]

        def step() -> None:
            for loss, optimizer in losses:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                    found = loss(model, *batch)
                found.backward()

        step()
        with Counter() as seen:
            step()
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
    update = 7 * weights  # Adam reads weight, gradient and two moments, and writes three
    return {"flops": seen.flops, "bytes": seen.bytes + update, "operations": seen.operations, "weight_bytes": weights}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows, mode = [], FakeTensorMode(allow_non_fake_inputs=True)
    for name, workload in USUAL.items():
        for precision in ("tf32", "amp"):
            rows.append({"workload": name, "precision": precision, **count(workload, precision == "amp", mode)})
            print(rows[-1], flush=True)
    given.out.write_text(json.dumps({"environment": {"torch": torch.__version__}, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
