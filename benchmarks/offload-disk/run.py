"""A step whose values leave a GPU for a host with less and less memory: the rest goes on to the disk.

    python run.py --out results/DATE-h200.json [--side 2048] [--device cpu --side 64]

The network keeps nothing of 4 MiB or more on the device between forward and backward, so that the host's room is what
counts. Every row is a fresh model from the same weights; its gradients are compared with plain training's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

SHARES = (1.0, 0.75, 0.5, 0.25, 0.05)
"""Of what leaves the device, the host's room."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()

    import torch

    from tests.foreign.shim import define_torchvision_operators

    define_torchvision_operators()
    import torchvision

    import outcore
    from outcore.memory.offload.bandwidth import measured_disk
    from outcore.memory.offload.disk_spill import SpillBackend
    from outcore.memory.offload.host_limit import host_limit_bytes
    from outcore.memory.saved_tensors import managed_forward

    device = torch.device(given.device)
    if device.type == "cpu":  # the tier that is below a GPU
        managed_forward.tier_for = lambda where, size: SpillBackend(where, size, host_limit_bytes())  # type: ignore[assignment]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    weights = torchvision.models.resnet50().state_dict()
    x = torch.randn(1, 3, given.side, given.side, device=device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def trained(model: Any) -> dict[str, Any]:
        times = []
        for _ in range(given.steps):
            model.zero_grad()
            wait()
            start = time.perf_counter()
            model(x).square().mean().backward()
            wait()
            times.append(time.perf_counter() - start)
        return {"ms": 1e3 * statistics.median(times), "first_ms": 1e3 * times[0]}

    def made() -> Any:
        model = torchvision.models.resnet50()
        model.load_state_dict(weights)
        return model.to(device)

    disk = measured_disk()
    rows: list[dict[str, Any]] = []
    environment = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "side": given.side,
        "disk_out_bytes_per_s": disk.out_bytes_per_s,
        "disk_in_bytes_per_s": disk.in_bytes_per_s,
        "date": time.strftime("%Y-%m-%d"),
    }

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)
        Path(given.out).write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")

    plain = made()
    note({"how": "plain", **trained(plain)})
    gradients = [p.grad.clone() for p in plain.parameters()]
    del plain
    policy, size = _everything(made(), x)
    costs = outcore.measure(outcore.capture(made(), (x,)), device, time_limit_s=6.0)
    for share in SHARES:
        os.environ["OUTCORE_HOST_MEMORY"] = str(int(share * 1.02 * size))
        model = outcore.within(made(), (x,), memory=None, plan=policy, costs=costs, quiet=True)
        plan = outcore.memory_plan(model)
        moved = plan.outcome.transfers
        seen = trained(model)
        equal = [torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True)]
        told = {"predicted_over_plain": plan.slowdown, "bytes": moved.bytes, "disk_bytes": moved.further_bytes}
        note({"how": "outcore", "room": share, **seen, **told, "equal": f"{sum(equal)}/{len(equal)}"})
        outcore.release(model)
        del model


def _everything(model: Any, x: Any) -> tuple[dict[str, str], int]:
    """The policy by which whatever is large leaves, and its bytes."""
    import outcore
    from outcore.cost.measured.saved_bytes import account
    from outcore.cost.predicted.rough import by_bytes
    from outcore.planner.memory.copy_schedule import OffloadTarget
    from outcore.planner.memory.evaluate import StepModel
    from outcore.program.policies import OFFLOAD

    graph = outcore.capture(model, (x,))
    least = 4 * 2**20 if x.is_cuda else 4096
    keeping = StepModel(graph, by_bytes(account(graph), 1e12), 0.0, OffloadTarget(1e11, 1e11, least_bytes=least))
    leaving = [b for b in keeping.buffers.values() if OFFLOAD in keeping.choices(b)]
    return {b.name: "offload" for b in leaving}, sum(b.bytes for b in leaving)


if __name__ == "__main__":
    main()
