"""What people put around a model and inside it: compilation, data parallelism, sharding, checkpoints."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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


def _layers(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(count)]


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "block by block"])
@pytest.mark.parametrize("half", [False, True], ids=["", "parameters of bfloat16"])
def test_sharded_before(one_rank: None, blocks: bool, half: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None)
    model, x = network(), images()
    if half:  # which norms over batches do not take
        model, x = nn.Sequential(*_layers(6)), torch.randn(512, 64)
    twin = copy.deepcopy(model)
    for net in (model, twin):
        for block in list(net.children())[1:6] if blocks else ():
            fully_shard(block, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
    optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (model, twin)]
    types = [type(m) for m in model.modules()]
    outcore.within(model, (x,), memory=None, optimizer=optimizers[0], measure_s=0.1, quiet=True)
    plain = outcore.memory_plan(model).plain_bytes
    outcore.within(model, (x,), memory=int(0.7 * plain), optimizer=optimizers[0], measure_s=0.1, quiet=True)
    assert [type(m) for m in model.modules()] == types
    assert all(hasattr(p, "device_mesh") and p.grad is None for p in model.parameters())
    for seed, size in enumerate((1.0, 1.0, 0.5, 2.0)):
        batch = torch.cat([x] * int(size)) if size >= 1 else x[: len(x) // 2]
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            told = "sharded one by one" if blocks else "larger than the one that was planned"
            larger = size > 1 and net is model
            with pytest.warns(UserWarning, match=told) if larger else contextlib.nullcontext():
                step(net, batch, seed)
            optimizer.step()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(torch.equal(p.full_tensor(), q.full_tensor()) for p, q in pairs)  # type: ignore[attr-defined]
    assert managed(model).plan.policy
    with pytest.raises(OutcoreError, match="leave state= away"):
        outcore.within(model, (x,), memory=None, state={"parameters": "offload"}, optimizer=optimizers[0])


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
