"""One rank of a training over a real link: steps alone, of DDP and of FSDP2 in turn. Started by run.py, in a namespace.

A machine that others use too changes its speed within seconds. So the three ways of training are stepped in turn, with
a probe of the link in every round, and what is compared comes from the same rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from networks import NETWORKS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STRATEGIES = ("data_parallel", "sharded")


def main() -> None:
    out, rounds = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for network in NETWORKS:
        steps = {strategy: stepped(network, strategy) for strategy in ("alone", *STRATEGIES)}
        times: dict[str, list[float]] = {name: [] for name in (*steps, *PROBES)}
        for number in range(rounds + 1):
            for name, step in steps.items():
                times[name].append(timed(step))
            for name, (collective, nbytes) in PROBES.items():
                if number < 1 + PROBED:
                    times[name].append(timed(lambda c=collective, n=nbytes: c(n)))
        found[network] = {
            name: {"step_s": statistics.median(took[1:]), "all_s": [round(t, 5) for t in took[1:]]}
            for name, took in times.items()
        }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def stepped(network: str, strategy: str) -> Callable[[], None]:
    """A step: alone (all ranks at once, without a word between them), or by a strategy."""
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
    loss, optimizer = job.loss, job.optimizer(trained.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss(trained(x), target).backward()
        optimizer.step()

    return step


def all_reduce(nbytes: int) -> None:
    dist.all_reduce(torch.ones(nbytes // 4))


def gather(nbytes: int) -> None:
    """To so many bytes on each rank."""
    count, ranks = nbytes // 4, dist.get_world_size()
    dist.all_gather_into_tensor(torch.empty(count // ranks * ranks), torch.ones(count // ranks))


PROBED = 3
"""Rounds with a probe; large ones take long over slow links."""
SMALL, LARGE = 64, 16 << 20
PROBES: dict[str, tuple[Callable[[int], None], int]] = {
    "small": (all_reduce, SMALL),
    "large": (all_reduce, LARGE),
    "gathered": (gather, LARGE),
}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
