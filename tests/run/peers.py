"""The same stages under torch.distributed.pipelining."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.run.networks import CASES
from tests.run.training import batches_of


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
