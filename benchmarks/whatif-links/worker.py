"""One rank of a training over a real link: a probe, then DDP and FSDP2. Started by run.py, in a namespace."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from networks import NETWORKS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STRATEGIES = ("data_parallel", "sharded")


def main() -> None:
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"probe": probe()}
    for network in NETWORKS:
        found[network] = {s: trained(network, s, 12 if s == "alone" else steps) for s in ("alone", *STRATEGIES)}
        again = trained(network, "alone", 12)
        found[network]["alone"] = {"step_s": (found[network]["alone"]["step_s"] + again["step_s"]) / 2}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def trained(network: str, strategy: str, steps: int) -> dict[str, float]:
    """Median time of a step: alone (all ranks at once, without a word between them), or by a strategy."""
    job, size = NETWORKS[network], dist.get_world_size()
    model = job.build().train()
    (x,), _, target = job.example()
    trained: torch.nn.Module = model
    if strategy == "data_parallel":
        trained = torch.nn.parallel.DistributedDataParallel(model)
    elif strategy == "sharded":
        mesh = init_device_mesh("cpu", (size,))
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
    assert job.optimizer is not None and job.loss is not None
    optimizer = job.optimizer(trained.parameters())
    times = []
    for step in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        job.loss(trained(x), target).backward()
        optimizer.step()
        if step >= 2:
            times.append(time.perf_counter() - start)
    return {"step_s": statistics.median(times), "fastest_s": min(times), "steps": len(times)}


def probe() -> dict[str, float]:
    """Seconds of an all-reduce of few and of many bytes."""
    found = {}
    for name, count, runs in (("small_s", 16, 8), ("large_s", 1 << 20, 3)):
        values = torch.ones(count)
        dist.all_reduce(values)
        start = time.perf_counter()
        for _ in range(runs):
            dist.all_reduce(values)
        found[name] = (time.perf_counter() - start) / runs
    return found | {"large_bytes": 4 << 20}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
