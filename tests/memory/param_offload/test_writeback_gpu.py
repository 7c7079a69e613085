"""Trips on a GPU: copies as graphs, each part with a mark of its own, the weights of plain training."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.memory.offload.copy_streams import CudaCopyStreams, CudaRoundTripCopy
from tests.memory.param_offload.test_offloader_loops import keeper

pytestmark = pytest.mark.gpu


def test_who_waits_for_a_part_comes_after_it() -> None:
    device = torch.device("cuda")
    sizes = (3 * 2**20, 200 * 2**20)
    on_device = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    off_device = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    copy_streams = CudaCopyStreams(device)
    round_trip = copy_streams.round_trip(
        [list(zip(a.chunk(4), b.chunk(4), strict=True)) for a, b in zip(on_device, off_device, strict=True)]
    )
    assert isinstance(round_trip, CudaRoundTripCopy)
    for i in range(6):
        for memory in on_device:
            memory.fill_(i)
        for memory, event in zip(on_device, round_trip.start(), strict=True):
            event.wait()
            memory.fill_(100 + i)  # a copy that is still coming would undo it
        torch.cuda.synchronize()
        assert all(event.done() for event in round_trip.events)
        assert all(bool((memory == i).all()) for memory in off_device)
        assert all(bool((memory == 100 + i).all()) for memory in on_device)
    assert round_trip.graph is not None
    copy_streams.close()


def wide() -> nn.Module:
    """Three buckets: of 4 MiB, 64 MiB with a part that leaves beside the first, 64 MiB in two parts."""
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16384), nn.ReLU(), nn.Linear(16384, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 4)).cuda()


def nothing(_: nn.Module) -> None:
    pass


def scaled(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


@pytest.mark.parametrize("between", [nothing, scaled])
def test_buckets_in_parts_are_those_of_plain_training(between: Callable[[nn.Module], None]) -> None:
    model, plain = wide(), wide()
    images = torch.randn(8, 1024, device="cuda")
    optimizer, twin = (torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9) for m in (model, plain))
    costs = by_bytes(account(outcore.capture(model, (images,))), 1e12)
    state = {"parameters": "offload", "update": "backward"}
    outcore.within(model, (images,), memory=None, optimizer=optimizer, costs=costs, state=state, quiet=True)
    for i in range(12):
        for net, opt in ((model, optimizer), (plain, twin)):
            opt.zero_grad()
            loss = net(images).square().mean()
            if i % 3 == 2:
                between(net)
            loss.backward()
            opt.step()
    writebacks = keeper(model).writebacks
    assert [len(parts) for parts in writebacks.parts.values()] == [1, 2, 2]
    round_trips = [
        writeback.round_trip
        for writeback in (*writebacks.after_update.values(), writebacks.delayed)
        if writeback is not None
    ]
    assert len(round_trips) == 3 and all(
        isinstance(round_trip, CudaRoundTripCopy) and round_trip.graph is not None for round_trip in round_trips
    )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(p.isfinite().all() for p in plain.parameters())
    outcore.release(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
