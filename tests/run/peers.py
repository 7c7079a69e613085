"""The same stages under torch.distributed.pipelining, and a network of MONAI's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import outcore
from tests.run.networks import CASES, Case
from tests.run.training import batches_of, plain, train


def pipelined(kind: str, pieces: int) -> dict[str, torch.Tensor]:
    """Gradients of this rank's part of the chain under torch's own runtime."""
    from torch.distributed import pipelining

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = CASES["chain"].job.build()
    names = [n for stage in CASES["chain"].cuts[size][rank : rank + 1] for n in stage]
    part = torch.nn.Sequential(*(model.get_submodule(n) for n in names))
    inputs, targets = batches_of("chain", 1, 8)[0]
    micro = inputs[: 8 // pieces]
    given, made = micro.clone().requires_grad_(rank > 0), micro.clone().requires_grad_()
    stage = pipelining.PipelineStage(part, rank, size, torch.device("cpu"), input_args=(given,), output_args=(made,))
    schedule = getattr(pipelining, kind)(stage, n_microbatches=pieces, loss_fn=F.mse_loss)
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=targets, losses=[])
    else:
        schedule.step()
    return {f"{n}.{k}": p.grad for n in names for k, p in model.get_submodule(n).named_parameters()}


def _register() -> None:
    from monai.networks.nets import BasicUNetPlusPlus

    from outcore.planner import split, weights_from_shapes

    def batch(size: int) -> tuple[Any, Any]:
        return torch.randn(size, 1, 32, 32).double(), torch.randn(size, 2, 32, 32).double()

    def loss(output: list[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return sum(((F.mse_loss(o, target)) for o in output), torch.zeros((), dtype=target.dtype))

    job = outcore.Job(
        model=lambda: BasicUNetPlusPlus(
            spatial_dims=2, out_channels=2, features=(4, 4, 6, 6, 8, 4), deep_supervision=True
        ).double(),
        batch=batch,
        loss=loss,
        size=8,
    )
    graph = job.capture()
    weights = weights_from_shapes(graph)
    cuts = {n: split(graph, weights, stages=n).names for n in (2, 4)}
    CASES["unet++"] = Case(job, cuts)


def monai(plan: dict[str, Any], steps: int) -> dict[str, Any]:
    _register()
    return train("unet++", plan, steps, 8)


def monai_plain(pieces: int, steps: int) -> dict[str, Any]:
    _register()
    return plain("unet++", pieces, steps, 8)
