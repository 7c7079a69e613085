"""One rank of a training over a real link: steps alone, of DDP and of FSDP2 in turn. Started by run.py, in a namespace.

A machine that others use too changes its speed within seconds. So the three ways of training are stepped in turn, with
probes of the link in the same rounds: the collectives that training uses, in four sizes, with what each takes of the
processor (the process's own time) beside what it takes in all.
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
    cores = sorted(os.sched_getaffinity(0))
    apart = max(1, len(cores) // int(os.environ["WORLD_SIZE"]))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) * apart % len(cores)]} if apart > 1 else set(cores))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"cores": len(cores)}
    for network in NETWORKS:
        steps = {strategy: stepped(network, strategy) for strategy in ("alone", *STRATEGIES)}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*steps, *PROBES)}
        for number in range(rounds + 1):
            for name, step in steps.items():
                times[name].append(timed(step))
            for name, probe in PROBES.items():  # in three rounds: large ones take long over slow links
                if number in (0, 1, (rounds + 1) // 2, rounds):
                    times[name].append(timed(probe))
        found[network] = {
            name: {
                "step_s": statistics.median(wall for wall, _ in took[1:]),
                "core_s": statistics.median(core for _, core in took[1:]),
                "all_s": [round(wall, 5) for wall, _ in took[1:]],
            }
            for name, took in times.items()
        }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a call that all ranks begin together, and how long this process had a core meanwhile."""
    dist.barrier()
    start, own = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - own


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
    share = max(1, nbytes // 4 // dist.get_world_size())
    dist.all_gather_into_tensor(torch.empty(share * dist.get_world_size()), torch.ones(share))


def scatter(nbytes: int) -> None:
    """Of so many bytes on each rank."""
    share = max(1, nbytes // 4 // dist.get_world_size())
    dist.reduce_scatter_tensor(torch.empty(share), torch.ones(share * dist.get_world_size()))


SIZES = (64, 256 << 10, 2 << 20, 16 << 20)
PROBES: dict[str, Callable[[], None]] = {
    f"{collective.__name__} {nbytes}": lambda c=collective, n=nbytes: c(n)  # type: ignore[misc]
    for collective in (all_reduce, gather, scatter)
    for nbytes in SIZES
}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
