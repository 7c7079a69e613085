"""What people put around a model and inside it: compilation, data parallelism, sharding, checkpoints."""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.errors import OutcoreError

from .test_within import budgeted, images, managed, network, same, step


def test_compiled_around() -> None:
    model = budgeted(network(), 0.6)
    duplicate = outcore.release(copy.deepcopy(model))
    compiled = torch.compile(model, backend="eager")
    with pytest.warns(UserWarning, match="torch.compile around it has no effect"):
        step(compiled, images())  # type: ignore[arg-type]
    step(duplicate, images())
    assert same(model, duplicate)
    with LiveBytes([*model.parameters(), *model.buffers(), images()]) as live, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(compiled, images())  # type: ignore[arg-type]
    step(duplicate, images())
    held = managed(model).plan.keeping.plain.moments[0].bytes
    assert live.peak + held.weights + held.inputs <= 1.05 * outcore.memory_plan(model).peak_bytes
    compiled.eval()
    with torch.no_grad():
        assert torch.equal(compiled(images()), duplicate.eval()(images()))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_data_parallel_around(one_rank: None) -> None:
    model = network()
    duplicate = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(budgeted(model, 0.6))
    for seed in range(2):
        step(wrapped, images(), seed), step(duplicate, images(), seed)
        assert same(model, duplicate)


def test_sharded_around(one_rank: None) -> None:
    model = network()
    duplicate = copy.deepcopy(model)
    fully_shard(budgeted(model, 0.6))
    step(model, images()), step(duplicate, images())
    pairs = zip(model.parameters(), duplicate.parameters(), strict=True)
    assert all(torch.equal(p.grad.full_tensor(), q.grad) for p, q in pairs)  # type: ignore[union-attr]
    with pytest.raises(OutcoreError, match="before fully_shard"):
        outcore.within(outcore.release(model), (images(),), memory=None)


def test_checkpoint_inside() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = network(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(checkpoint(self.inner, x, use_reentrant=False)))

    torch.manual_seed(0)
    model = Checkpointed()
    duplicate = copy.deepcopy(model)
    x = images()
    outcore.within(
        model, (x,), memory=None, optimizer=0.0, costs=by_bytes(account(outcore.capture(model, (x,))), 1e9), quiet=True
    )
    step(model, x), step(duplicate, x)
    assert same(model, duplicate)
