"""Buckets: parameters that are fetched, updated and written back together, in the order in which the model uses
them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from outcore.graph import Graph
from outcore.memory.offload.copy_streams import CopyStreams
from outcore.memory.offload.host_storage import OffDeviceStorage, off_device_storage
from outcore.memory.param_offload.device_window import AllocatorWindow, FixedWindow
from outcore.memory.param_offload.flat_buffer import FlatBuffer, lay_out, movable
from outcore.memory.replay.replay_buffer import Geometry, SavedHandle
from outcore.planner.memory.buckets import OffloadableParam, OffloadableParams, limits
from outcore.planner.memory.state_policy import StatePolicy

if TYPE_CHECKING:
    from outcore.memory.param_offload.residency import ParamResidency

Use = tuple[str, nn.Module, Sequence[nn.Parameter]]
"""A call, the module in whose forward it happens, and the parameters it reads."""


class Bucket:
    """Parameters that are moved together.

    Args:
        number: its place in the order of use.
        parameters: what it holds.
        weights: the flat buffer they are in, None where they stay on the device.
    """

    def __init__(self, number: int, parameters: Sequence[nn.Parameter], weights: FlatBuffer | None) -> None:
        self.number, self.parameters, self.weights = number, tuple(parameters), weights
        self.trained = tuple(p for p in parameters if p.requires_grad)
        self.gradients_ready: set[int] = set()
        """Parameters (ids) whose gradients backward has accumulated."""
        self.updated = False
        """Whether it was updated in this step's backward, before ``optimizer.step()``."""


class BucketTensor(SavedHandle):
    """A saved tensor that lies in the memory of a bucket: when backward unpacks it, the bucket is fetched."""

    __slots__ = ("bucket", "member", "residency")

    def __init__(self, tensor: torch.Tensor, bucket: Bucket, residency: ParamResidency) -> None:
        assert bucket.weights is not None
        self.tensor, self.cell, self.device, self.position = None, None, None, 0
        self.geometry, self.bucket, self.residency = Geometry.of(tensor), bucket, residency
        at = self.geometry.offset * tensor.element_size()
        members = bucket.weights.members
        self.member = members[bisect_right([m.offset for m in members], at) - 1].tensor
        self.version = self.member._version

    def unpack(self) -> torch.Tensor:
        """The saved tensor, as a view of where the bucket is now."""
        assert self.geometry is not None and self.bucket.weights is not None
        if self.member._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {list(self.member.shape)} is at version {self.member._version}; expected version "
                f"{self.version}"
            )
        self.residency.fetch(self.bucket, backward=True)
        place = self.bucket.weights.place
        assert place is not None
        dtype, size, stride, offset = self.geometry
        empty = torch.empty(0, dtype=dtype, device=place.memory.device)
        return empty.set_(place.memory.untyped_storage(), offset, size, stride)


def make_buckets(
    parameters: Iterable[nn.Parameter], policy: StatePolicy, device: torch.device, copy_streams: CopyStreams
) -> tuple[list[Bucket], OffDeviceStorage | None]:
    """Pack parameters into buckets, trained and frozen ones apart; returns them and their off-device storage, if
    any."""
    ordered = list({id(p): p for p in parameters}.values())
    place = {id(p): i for i, p in enumerate(ordered)}
    most, first = limits(policy, sum(p.numel() * p.element_size() for p in ordered))
    laid = [
        row
        for trained in (True, False)
        for row in lay_out([p for p in ordered if p.requires_grad is trained], most, first)
    ]
    laid.sort(key=lambda row: min(place[id(m.tensor)] for m in row[0]))
    if policy.parameters == "keep" or not laid:
        return [Bucket(i, _parameters(m.tensor for m in members), None) for i, (members, _) in enumerate(laid)], None
    total = sum(size for _, size in laid)
    storage = off_device_storage(device, total)
    fixed, loose = FixedWindow(device, total, copy_streams), AllocatorWindow(device, copy_streams)
    buckets, at = [], 0
    for i, (members, size) in enumerate(laid):
        window = fixed.part(at) if policy.stage_bytes is None else loose
        flat_buffer = FlatBuffer(f"parameters {i}", members, storage.memory[at : at + size], window, copy_streams)
        flat_buffer.rebind()
        buckets.append(Bucket(i, _parameters(m.tensor for m in members), flat_buffer))
        at += size
    return buckets, storage


def calls_of(graph: Graph) -> list[tuple[str, str, Sequence[str]]]:
    """Name, block and parameters of every call of a graph."""
    return [(name, call.block, call.parameters) for name, call in graph.calls.items()]


def uses_of(model: nn.Module, calls: Iterable[tuple[str, str, Sequence[str]]]) -> list[Use]:
    """The calls that read parameters which can be moved.

    Args:
        model: the model.
        calls: name, block and names of parameters of each call, in order.
    """
    named: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    fixed = {id(p) for m in model.modules() if isinstance(m, nn.RNNBase) for p in m.parameters()}
    # cuDNN wants the weights of a recurrent layer in one piece that it has laid out itself.
    calls = list(calls)
    taken = [names for call, _, names in calls if call.rpartition(".")[2].startswith("data()")]
    # A forward that takes p.data may write to it, and torch would not count that.
    fixed |= {id(named[n]) for names in taken for n in names if n in named}
    found: list[Use] = []
    for call, block, names in calls:
        read = [named[n] for n in names if n in named and id(named[n]) not in fixed and movable(named[n])]
        if read:
            found.append((call, _module(model, block), read))
    return found


def offloadable_of(model: nn.Module, uses: Sequence[Use]) -> OffloadableParams:
    """The names and sizes of the parameters that `uses` reads, as the planner takes them."""
    names: dict[int, str] = {}
    others: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if names.setdefault(id(p), name) != name:
            others[name] = names[id(p)]
    calls: dict[str, tuple[str, ...]] = {}
    for call, _, parameters in uses:
        calls[call] = (*calls.get(call, ()), *(names[id(p)] for p in parameters))
    read = {id(p): p for _, _, parameters in uses for p in parameters}
    items = (OffloadableParam(names[i], p.numel() * p.element_size(), p.requires_grad) for i, p in read.items())
    return OffloadableParams(tuple(items), calls, others)


def _module(model: nn.Module, block: str) -> nn.Module:
    """The module of a block, or the one in whose forward a function is called."""
    while True:
        try:
            return model.get_submodule(block)
        except AttributeError:
            block = block.rpartition(".")[0]


def _parameters(tensors: Iterable[torch.Tensor]) -> list[nn.Parameter]:
    found = []
    for tensor in tensors:
        assert isinstance(tensor, nn.Parameter)
        found.append(tensor)
    return found
