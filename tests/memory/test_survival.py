"""What training loops do besides one forward and one backward: interrupted, accumulated, on two ranks, for long."""

from __future__ import annotations

import copy
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.cost.predicted.step_memory import memory_curve
from outcore.errors import OutcoreError, PlanError
from outcore.memory.offload import backends
from outcore.memory.saved_tensors import managed_forward as managed_forwards
from tests.foreign.sample import sometimes

from ..run.pool import pool
from .test_within import budgeted, gradients, images, managed, network, same, step
from .test_within_wrapped import one_rank

__all__ = ["one_rank"]

BY_HAND = {"0.1#0:out": "offload", "1.1#0:out": "recompute", "1.0#0:out": "recompute", "2.1#0:out": "offload"}


def deep() -> tuple[nn.Module, torch.Tensor]:
    """A model of which some is offloaded and some made again."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(512, 64)
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    return outcore.within(model, (x,), memory=None, plan=BY_HAND, costs=costs, quiet=True), x


@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("what", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_the_middle_of_forward_leaves_nothing(layer: int, what: type[BaseException]) -> None:
    model, x = deep()
    twin = outcore.release(copy.deepcopy(model))
    calm = True

    def explode(*_: object) -> None:
        if not calm:
            raise what("in the middle")

    handle = model[layer].register_forward_hook(explode)  # type: ignore[index]
    step(model, x)
    tier = managed(model).tier
    assert isinstance(tier, backends.DiskBackend)
    free, calm = tier.arena.free_bytes, False
    with pytest.raises(what, match="in the middle"):
        model(x)
    handle.remove()
    gc.collect()
    assert tier.arena.free_bytes == free
    step(model, x), step(twin, x)
    assert same(model, twin)


def test_hooks_that_come_and_go_are_seen() -> None:
    model = budgeted(network(), 0.6)
    twin = outcore.release(copy.deepcopy(model))
    calls: list[str] = []
    step(model, images())
    handle = model[1].register_forward_hook(lambda *_: calls.append("called"))  # type: ignore[index]
    model.load_state_dict(twin.state_dict())
    step(model, images()), step(twin, images())
    assert same(model, twin)
    calls.clear()
    for present in (True, False):
        step(model, images())
        assert calls == ["called"]
        if present:
            handle.remove()


LOOP = """
    import signal, torch, outcore
    from torch import nn
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background of a shell
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(512, 64)
    outcore.within(model, (x,), memory=None, plan={"0.1#0:out": "offload", "2.1#0:out": "offload"}, quiet=True)
    while True:
        model(x).sum().backward()
        print("step", flush=True)
"""


def test_ctrl_c_ends_a_loop_at_once_and_leaves_no_file(tmp_path: Path) -> None:
    environment = {**os.environ, "OUTCORE_SCRATCH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(LOOP)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline() == "step\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in error.splitlines()[-1]
    assert "Exception ignored" not in error
    assert not list(tmp_path.iterdir())


def test_gradients_of_several_batches_add_up() -> None:
    model = network()
    twin = copy.deepcopy(model)
    budgeted(model, 0.5)
    for net in (model, twin):
        net.zero_grad()
        for seed in range(3):
            torch.manual_seed(seed)
            (net(images() * (1 + seed)).square().sum() / 3).backward()
    assert same(model, twin)


def test_inference_goes_straight_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = budgeted(network(), 0.6)
    step(model, images())

    def never(*_: object, **__: object) -> None:
        raise AssertionError("inference is nobody's business")

    for name in ("ReplayPass", "key_of", "recorded"):
        monkeypatch.setattr(managed_forwards, name, never)
    for net in (model, model.eval()):
        with torch.no_grad():
            net(images())
        with torch.inference_mode():
            net(images())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loop_with_a_scaler_that_once_overflows(dtype: torch.dtype) -> None:
    model = network()
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=dtype):
        budgeted(model, 0.8)
    for net in (model, twin):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20 if dtype == torch.float16 else 128.0)
        for seed in range(4):
            optimizer.zero_grad()
            torch.manual_seed(seed)
            with torch.autocast("cpu", dtype=dtype):
                output = net(images())
            scaler.scale(output.float().square().sum() * (1e30 if seed == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's, while it compiles
def test_a_compiled_part_inside_is_kept_whole() -> None:
    torch.manual_seed(0)
    body = [nn.Linear(64, 64), nn.Tanh(), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64), nn.Tanh()]
    model = nn.Sequential(*body, nn.Linear(64, 8))
    twin = copy.deepcopy(model)
    model[2] = torch.compile(model[2], backend="eager")  # type: ignore[assignment]
    x = torch.randn(256, 64)
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    outcore.within(model, (x,), memory=None, plan={"4#0:out": "offload"}, costs=costs, quiet=True)
    step(model, x), step(twin, x)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
    with pytest.raises(PlanError, match="must stay whole; keep it"):
        outcore.within(model, (x,), memory=None, plan={"1#0:out": "offload"}, costs=costs, quiet=True)


def test_another_image_size_is_planned_again_and_one_that_does_not_fit_is_as_small_as_it_can_be() -> None:
    model = network()
    twin = copy.deepcopy(model)
    budgeted(model, 0.6)
    budget = managed(model).settings.budget_bytes
    assert budget is not None
    smaller = images(side=40)
    step(model, smaller), step(twin, smaller)
    assert same(model, twin)
    assert all(entry is None or entry.plan.peak_bytes <= budget for entry in managed(model).admitted.values())
    larger = images(side=160)
    with pytest.warns(UserWarning, match="larger than the one that was planned for, and needs"):
        step(model, larger)
    step(twin, larger)
    assert same(model, twin)
    over = [e.plan.peak_bytes for e in managed(model).admitted.values() if e is not None and e.plan.peak_bytes > budget]
    plain = memory_curve(outcore.capture(twin, (larger,)), account(outcore.capture(twin, (larger,))), optimizer=2.0)
    assert len(over) == 1 and over[0] < 0.9 * plain.peak_bytes
    assert managed(model).settings.budget_bytes == budget
    step(model, images()), step(twin, images())
    assert same(model, twin)


def test_memory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, *_: object) -> None:
            pass

    def nothing(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch, "empty", nothing)
    with pytest.raises(OutcoreError, match=r"needs 3\.00 GiB of host memory, which is not there"):
        backends.HostBackend(torch.device("cuda"), 3 * 2**30)


# On two ranks


def data_parallel() -> list[torch.Tensor]:
    return _two_steps(lambda model: nn.parallel.DistributedDataParallel(model))


def sharded() -> list[torch.Tensor]:
    return _two_steps(lambda model: fully_shard(model))


def sharded_before() -> list[torch.Tensor]:
    return _two_steps(_sharded_by_blocks, before=True)


def _sharded_by_blocks(model: nn.Module) -> nn.Module:
    for block in list(model.children())[:6]:
        fully_shard(block)
    return fully_shard(model)


def _two_steps(around: Callable[[nn.Module], nn.Module], *, before: bool = False) -> list[torch.Tensor]:
    """Largest difference from the same around a plain model, per step; each rank has images of its own."""
    model = network()
    twin = copy.deepcopy(model)
    if before:
        wrapped, plain = around(model), around(twin)
        settings: dict[str, Any] = {"optimizer": 0.0, "measure_s": 0.1, "quiet": True}
        outcore.within(model, (images(),), memory=None, **settings)
        outcore.within(model, (images(),), memory=int(0.6 * outcore.memory_plan(model).plain_bytes), **settings)
    else:
        wrapped, plain = around(budgeted(model, 0.6)), around(twin)
    found = []
    for seed in range(2):
        x = images() * (1 + dist.get_rank())
        step(wrapped, x, seed), step(plain, x, seed)
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        found.append(torch.stack([(_whole(p.grad) - _whole(q.grad)).abs().max() for p, q in pairs]).max())
    assert isinstance(managed(model), managed_forwards.ManagedForward) and outcore.memory_plan(model).policy
    return found


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@sometimes
def test_data_parallel_and_sharded_around_on_two_ranks() -> None:
    with pool() as ranks:
        for function in (data_parallel, sharded, sharded_before):
            assert all(not difference for found in ranks.run(function, 2) for difference in found)


def test_blocks_may_be_sharded_one_by_one(one_rank: None) -> None:
    """Their parameters are not there between forward and backward, so what is made with them is kept."""
    model = network()
    twin = copy.deepcopy(model)
    budgeted(model, 0.6)
    for net in (model, twin):
        for block in list(net.children())[:6]:
            fully_shard(block)
        fully_shard(net)
    for seed in range(2):
        assert torch.equal(step(model, images(), seed), step(twin, images(), seed))
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(_whole(p.grad), _whole(q.grad)) for p, q in pairs)


def test_blocks_within_budgets_of_their_own_may_be_sharded(one_rank: None) -> None:
    model = network()
    twin = copy.deepcopy(model)
    x = images()
    for block in list(model.children())[:3]:
        costs = by_bytes(account(outcore.capture(block, (x,))), 1e9)
        outcore.within(block, (x,), memory=None, plan={"1#0:out": "recompute"}, costs=costs, quiet=True)
        x = torch.empty_like(x[:, :1]).expand(-1, 8, -1, -1).contiguous().requires_grad_()
        fully_shard(block)
    fully_shard(model)
    step(model, images()), step(twin, images())
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(_whole(p.grad), _whole(q.grad)) for p, q in pairs)
    assert all(len(managed(block).admitted) == 1 for block in list(model.children())[:3])


# For long


@pytest.mark.slow
def test_a_thousand_steps_leave_nothing_behind() -> None:
    model, x = deep()
    tier = managed(model).tier
    assert isinstance(tier, backends.DiskBackend)
    free, objects, size = tier.arena.free_bytes, 0, 0
    for i in range(1000):
        step(model, x)
        if i == 99:
            gc.collect()
            objects, size = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.collect()
    assert tier.arena.free_bytes == free
    assert len(gc.get_objects()) <= objects + 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= size + 4096  # KiB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_thousand_steps_on_a_gpu_leave_nothing_behind() -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))).to(device)
    x = torch.randn(512, 64, device=device)
    outcore.within(model, (x,), memory=None, plan=BY_HAND, measure_s=2.0, quiet=True)
    tier = managed(model).tier
    assert isinstance(tier, backends.HostBackend)

    def levels() -> tuple[int, int, int, int]:
        torch.cuda.synchronize()
        gc.collect()
        tier.settle()
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pinned, tier.arena.free_bytes

    for i in range(1000):
        step(model, x)
        if i == 99:
            early = levels()
    assert levels() == early


def test_a_copy_that_never_began_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = backends.DiskBackend(4096)
    free = tier.arena.free_bytes

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tier.workers, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.evict(torch.zeros(1024, dtype=torch.uint8))
    gc.collect()
    assert tier.arena.free_bytes == free
    tier.close()
