"""Data parallelism and sharding around a model under `within(..., compile=True)`."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import outcore
from outcore.compiled.compiled_forward import CompiledForward
from outcore.compiled.in_place import install_compiled_forward
from outcore.compiled.plan import CompiledPlan
from outcore.compiled.settings import CompileSettings
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import EngineError, OutcoreError
from tests.compiled.oracle import BOUND
from tests.run.pool import pool

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
ROWS = (48, 48, 20)
"""Of the batches; the last one is of another size, and compiled when the model is wrapped already."""


def network() -> nn.Sequential:
    """Linear layers with norms and activations."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU()) for _ in range(2)]
    return nn.Sequential(*layers).double()


def data_parallel(kernels: bool) -> list[float]:
    """See `_steps`."""
    return _steps(lambda model: nn.parallel.DistributedDataParallel(model), kernels)


def sharded(kernels: bool) -> list[float]:
    """See `_steps`."""
    return _steps(lambda model: fully_shard(model), kernels)


def refused() -> str:
    """What is said of blocks that are sharded one by one."""
    model = network()
    _compiled(model, kernels=False)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    with pytest.raises(OutcoreError) as error:
        model(torch.randn(ROWS[0], 24, dtype=torch.float64))
    return str(error.value)


def _compiled(model: nn.Module, kernels: bool) -> None:
    example = torch.randn(ROWS[0], 24, dtype=torch.float64)
    if kernels:
        outcore.within(model, (example,), memory="85%", compile=True, optimizer=0.0, quiet=True)
    else:
        install_compiled_forward(model, (example,), {}, CompileSettings(None, OptimizerCost.of(0.0), kernels=False))
    assert isinstance(outcore.memory_plan(model), CompiledPlan)


def _steps(around: Callable[[nn.Module], nn.Module], kernels: bool) -> list[float]:
    """The largest differences of gradients, and of weights in the end, from the same around a plain model; each rank
    has batches of its own."""
    torch._dynamo.reset()
    model = network()
    twin = copy.deepcopy(model)
    _compiled(model, kernels)
    wrapped, plain = around(model), around(twin)
    found = []
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (wrapped, plain)]
    for number, rows in enumerate(ROWS):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        batch = torch.randn(rows, 24, dtype=torch.float64, generator=generator)
        for each, optimizer in zip((wrapped, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(batch).square().sum().backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        found += [_difference(p.grad, q.grad) for p, q in pairs]
        for optimizer in optimizers:
            optimizer.step()
    found += [_difference(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    assert len(model.__dict__["forward"].entries) >= 2
    return found


def _difference(one: torch.Tensor | None, two: torch.Tensor | None) -> float:
    assert one is not None and two is not None
    one, two = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (one.detach(), two.detach()))
    return float((one - two).abs().max() / max(1.0, float(two.abs().max())))


def test_data_parallel_and_sharded_around_a_compiled_model(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for function in (data_parallel, sharded):
            assert all(off < BOUND for off in function(False))
        assert "sharded one by one" in (told := refused()) and "before fully_shard" in told
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def test_an_engine_refuses_a_compiled_model() -> None:
    model = network()
    model.__dict__["forward"] = CompiledForward(model, None, CompileSettings(None, OptimizerCost.of(0.0)))
    with pytest.raises(EngineError, match=r"outcore.release\(model\) it first"):
        outcore.Engine(model, example=torch.randn(2, 24), loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=needs_compiler)])
def test_data_parallel_and_sharded_around_a_compiled_model_on_two_ranks(kernels: bool) -> None:
    with pool() as ranks:
        for function in (data_parallel, sharded):
            assert all(off < BOUND for found in ranks.run(function, 2, kernels) for off in found)
