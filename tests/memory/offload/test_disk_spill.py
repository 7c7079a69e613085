"""Host memory that spills to the disk: the same bytes come back, whatever the order and the room; its prediction."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.machine import Device, HostLink, Link, Machine
from outcore.memory.offload import bandwidth, host_limit
from outcore.memory.offload.disk_spill import SpillBackend, SpilledBuffer
from outcore.memory.saved_tensors import managed_forward
from outcore.planner.memory.copy_schedule import OffloadTarget, tier_of
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.explain import explain
from outcore.planner.memory.plan import plan_memory
from tests.memory.oracle import policies

CPU = torch.device("cpu")


def _bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8)


def _leave(tier: SpillBackend, flat: torch.Tensor) -> SpilledBuffer:
    """Copy bytes out, and overwrite where they were."""
    trip = tier.evict(flat)
    trip.wait_out()
    flat.zero_()
    return trip


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40_000), min_size=1, max_size=12),
    host=st.integers(0, 100_000),
    ahead=st.integers(0, 3),
    any_order=st.booleans(),
    planned=st.floats(0, 1),
)
def test_the_same_bytes_come_back(sizes: list[int], host: int, ahead: int, any_order: bool, planned: float) -> None:
    tier = SpillBackend(CPU, int(planned * sum(sizes)), host)
    free = tier.arena.free_bytes
    for _ in range(2):
        originals = [_bytes(size) for size in sizes]
        trips = [_leave(tier, flat.clone()) for flat in originals]
        order = list(reversed(range(len(sizes))))
        if any_order:
            random.Random(host).shuffle(order)
        for at, i in enumerate(order):
            for j in order[at : at + ahead]:
                trips[j].fetch()
            assert torch.equal(trips[i].bytes_back(), originals[i])
            if i % 3 == 0:  # a graph that is kept asks again
                assert torch.equal(trips[i].bytes_back(), originals[i])
        del trips
    assert tier.arena.free_bytes == free
    assert tier.scratch.arena.free_bytes == tier.scratch.arena.size
    tier.close()


def test_what_left_first_goes_on_and_the_rest_stays() -> None:
    tier = SpillBackend(CPU, 10 * 4096, 4 * 4096)
    trips = [_leave(tier, _bytes(4096)) for _ in range(10)]
    assert [trip.on_disk for trip in trips] == [True] * 6 + [False] * 4
    trips.pop().bytes_back()
    trips[-1].fetch()  # the place of the one that is back is free: the latest on the disk is read ahead
    assert [trip.on_disk for trip in trips] == [True] * 5 + [False] * 4


def test_what_was_fetched_for_nothing_leaves_no_trace() -> None:
    tier = SpillBackend(CPU, 4 * 4096, 2 * 4096)
    trips = [_leave(tier, _bytes(4096)) for _ in range(4)]
    trips[0].fetch()
    del trips
    assert tier.arena.free_bytes == tier.arena.size and tier.scratch.arena.free_bytes == tier.scratch.arena.size


def test_a_disk_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(outcore.OutcoreError, match="OUTCORE_SCRATCH"):
        SpillBackend(CPU, 2**20, 2**10)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(6)
        ]
        self.layers = nn.Sequential(*layers, nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 256, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("host", ["0KiB", "40KiB", "200KiB"])
def test_gradients_are_those_of_plain_training(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTCORE_HOST_MEMORY", host)
    made: list[SpillBackend] = []

    def as_below_a_gpu(device: torch.device, size: int) -> SpillBackend:
        made.append(SpillBackend(device, size, host_limit.host_limit_bytes()))
        return made[-1]

    monkeypatch.setattr(managed_forward, "tier_for", as_below_a_gpu)
    model, x = Net(), torch.randn(8, 4, 16, 16)
    twin = copy.deepcopy(model)
    graph = outcore.capture(model, (x,))
    costs = by_bytes(account(graph), 1e10)
    policy = policies(StepModel(graph, costs, 0.0, OffloadTarget(1e11, 1e11, least_bytes=1)), "offload")
    outcore.within(model, (x,), memory=None, plan=policy, quiet=True)
    for _ in range(3):
        for ours, plain in zip(_step(model, x), _step(twin, x), strict=True):
            assert torch.equal(ours, plain)
    assert made and made[0].spilled_bytes >= 0.9 * made[0].over_bytes > 0  # parts of the arena are rounded up


# The plan


def _keeping(tier: OffloadTarget) -> StepModel:
    graph = outcore.capture(Net(), (torch.randn(64, 4, 16, 16),))
    return StepModel(graph, by_bytes(account(graph), 1e9), 0.0, tier)


def test_the_wait_grows_as_room_and_disk_shrink() -> None:
    link = OffloadTarget(1e10, 1e10, least_bytes=1)
    keeping = _keeping(link)
    policy = policies(keeping, "offload")
    free = keeping.evaluate(policy)
    assert free.transfers is not None and free.transfers.further_bytes == 0
    size, before = free.transfers.bytes, free.transfers.stall_s
    for share in (0.8, 0.5, 0.2, 0.0):
        for rate in (1e12, 1e8, 1e7):
            keeping.tier = replace(link, capacity_bytes=int(share * size), beyond=OffloadTarget(rate, rate))
            found = keeping.evaluate(policy).transfers
            assert found is not None and (1 - share) * size <= found.further_bytes <= size
            if rate == 1e12 and share > 0:  # as if it were memory
                assert found.stall_s == pytest.approx(free.transfers.stall_s, rel=0.05, abs=1e-4)
            if rate == 1e7:  # all is written and read while hardly anything is computed
                assert found.stall_s >= found.further_bytes / rate
                assert found.stall_s >= before
                before = found.stall_s


def test_without_a_disk_no_more_leaves_than_there_is_room_for() -> None:
    graph = outcore.capture(Net(), (torch.randn(64, 4, 16, 16),))
    costs = by_bytes(account(graph), 1e9)
    link = OffloadTarget(1e10, 1e10, least_bytes=1)
    everything = plan_memory(graph, costs, budget_bytes=None, tier=link).plain_bytes
    for room_bytes in (0, 300_000, 600_000):
        plan = plan_memory(
            graph, costs, budget_bytes=int(0.75 * everything), tier=replace(link, capacity_bytes=room_bytes)
        )
        assert plan.peak_bytes <= 0.75 * everything
        moved = plan.outcome.transfers
        assert moved is None or moved.bytes <= room_bytes


def test_the_explanation_tells_of_the_disk() -> None:
    graph = outcore.capture(Net(), (torch.randn(64, 4, 16, 16),))
    tier = OffloadTarget(1e10, 1e10, 100_000, least_bytes=1, beyond=OffloadTarget(1e10, 1e10))
    policy = policies(StepModel(graph, costs := by_bytes(account(graph), 1e9), 0.0, tier), "offload")
    plan = plan_memory(graph, costs, budget_bytes=None, tier=tier, policy=policy)
    assert "of it by way of the disk" in explain(plan)


def test_a_machine_says_how_much_room_its_host_has() -> None:
    gpu, cpu = Device("V100", "cuda", 16 << 30, 9e11, {}), Device("host", "cpu", 10 << 30, 1e11, {})
    link = Link(1e10, 1e10, 1.5e10)
    machine = Machine("small host", (gpu,), cpu, HostLink(link, link), disk=Link(2e9, 3e9, 4e9))
    tier = tier_of(machine)
    assert tier is not None and tier.capacity_bytes == 8 << 30 and tier.beyond == OffloadTarget(2e9, 3e9)


def test_the_room_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_limit.host_limit_bytes() > 0
    monkeypatch.setenv("OUTCORE_HOST_MEMORY", "3GiB")
    assert host_limit.host_limit_bytes() == 3 << 30


def test_the_disk_is_measured() -> None:
    disk = bandwidth.measured_disk()
    assert 1e6 < disk.out_bytes_per_s < 1e12 and 1e6 < disk.in_bytes_per_s < 1e12
