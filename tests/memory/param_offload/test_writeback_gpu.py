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
    here = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    home = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    copy_streams = CudaCopyStreams(device)
    turn = copy_streams.turn([list(zip(a.chunk(4), b.chunk(4), strict=True)) for a, b in zip(here, home, strict=True)])
    assert isinstance(turn, CudaRoundTripCopy)
    for i in range(6):
        for memory in here:
            memory.fill_(i)
        for memory, mark in zip(here, turn.book(), strict=True):
            mark.wait()
            memory.fill_(100 + i)  # a copy that is still coming would undo it
        torch.cuda.synchronize()
        assert all(mark.done() for mark in turn.marks)
        assert all(bool((memory == i).all()) for memory in home)
        assert all(bool((memory == 100 + i).all()) for memory in here)
    assert turn.graph is not None
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
    trips = keeper(model).trips
    assert [len(parts) for parts in trips.parts.values()] == [1, 2, 2]
    turns = [trip.turn for trip in (*trips.updates.values(), trips.stays) if trip is not None]
    assert len(turns) == 3 and all(isinstance(turn, CudaRoundTripCopy) and turn.graph is not None for turn in turns)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(p.isfinite().all() for p in plain.parameters())
    outcore.release(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
