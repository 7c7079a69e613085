"""A joint graph in numbers: which buffer every value is in, how large it is, and how long its operation takes.

A *value* is a node of the joint graph, a *buffer* the memory of one or several of them: views share the buffer of what
they view, and the parts of an operation with several results have one each. An operation that Inductor can fuse has no
buffer of its own unless somebody needs it in memory; which ones do depends on what is saved, and is found for every
choice anew (`outcore.compiled.lifetimes`). An operation of a library takes what it was calibrated to take on the device
(`outcore.compiled.times.node_times`), else its arithmetic or its traffic, whichever is longer; a fused kernel its
traffic.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from outcore.compiled.times.host_times import library_work, simple_operation_s
from outcore.compiled.times.node_times import calibrated_seconds
from outcore.compiled.torch_partitioner import TracedStep
from outcore.cost.measured.in_network_ratio import STREAMED
from outcore.errors import MachineError
from outcore.graph.strides import is_dense
from outcore.machine.device import Device
from outcore.machine.known import known
from outcore.memory.offload.bandwidth import tier_below
from outcore.planner.memory.copy_schedule import OffloadTarget

__all__ = ["JointGraph", "Rates"]

_EFFICIENCY = 0.6
"""Share of a device's arithmetic rate that libraries reach in training."""
_REDUCTIONS = frozenset(
    "sum mean prod amax amin max min var var_mean std std_mean any all argmax argmin logsumexp "
    "prepare_softmax_online nansum cumsum".split()
)


@dataclass(frozen=True)
class Rates:
    """How fast a device computes and moves."""

    bytes_per_s: float
    flops_per_s: dict[torch.dtype, float]
    launch_s: float = 0.0
    link: OffloadTarget | None = None
    """The memory that values can leave for; none where they stay."""
    device: Device | None = None
    """Where operations may have calibrated times."""
    host_s: float = 0.0
    """What the host takes to issue a simple operation; nothing on a CPU, or where steps are CUDA graphs."""

    @classmethod
    def of(cls, device: torch.device, *, link: bool = False) -> Rates:
        """The rates of a device of this machine: of a GPU from its catalogue or a probe, of a CPU rough ones, since
        only their ratio matters for a choice; with `link`, those of the copies to the memory below it as measured."""
        kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        below = None
        if link:
            below = tier_below(device, sys.maxsize, spills=False)
        if device.type != "cuda":
            return cls(1e10, dict.fromkeys(kinds, 3e10), link=below)
        here = next(one for one in known().devices if one.kind == "cuda")
        rates = {}
        for kind in kinds:
            tf32 = kind is torch.float32 and torch.backends.cuda.matmul.allow_tf32
            with contextlib.suppress(MachineError):
                rates[kind] = _EFFICIENCY * here.rate("tf32" if tf32 else kind)
        host_s = simple_operation_s(device)
        return cls(STREAMED * here.bandwidth_bytes_per_s, rates, here.launch_s, below, here, host_s)


class JointGraph:
    """The nodes of a joint graph by number, in the order of computing."""

    def __init__(self, partition: TracedStep, rates: Rates) -> None:
        self.partition, self.rates = partition, rates
        self.nodes: list[fx.Node] = [node for node in partition.graph.nodes if node.op != "output"]
        self.index = index = {node: number for number, node in enumerate(self.nodes)}
        count = len(self.nodes)
        self.arguments = [[index[a] for a in node.all_input_nodes] for node in self.nodes]
        self.given = [node.op != "call_function" for node in self.nodes]
        self.is_forward = [node in partition.forward for node in self.nodes]
        self.is_backward = [node in partition.backward for node in self.nodes]
        self.fixed = [node in partition.fixed for node in self.nodes]
        self.fusible = [node in partition.fusible or _scatters_constants(node) for node in self.nodes]
        self.reduces = [_name(node) in _REDUCTIONS for node in self.nodes]
        self.by_rows = [self.reduces[i] and _reduces_rows(node) for i, node in enumerate(self.nodes)]
        """Whether a reduction is over the last dimensions alone."""
        self.elements = [max(map(_elements, (node, *node.all_input_nodes))) for node in self.nodes]
        """Over how many numbers the kernel of an operation goes."""
        self.joins = [_name(node) == "cat" for node in self.nodes]
        self.source = [self._source(number) for number in range(count)]
        """What a view views, an element is an element of; itself otherwise."""
        self.whole = [self._whole(i) for i in range(count)]
        """Of one of several results of an operation, the operation; else -1."""
        self.parts: dict[int, list[int]] = {}
        for number, whole in enumerate(self.whole):
            if whole >= 0:
                self.parts.setdefault(whole, []).append(number)
        self.bytes = [_bytes(node) if self.source[i] == i else 0 for i, node in enumerate(self.nodes)]
        self.tensor = [isinstance(node.meta.get("val"), torch.Tensor) for node in self.nodes]
        self.fills = [self._fills(i) for i in range(count)]
        """Whether a value is the whole of its buffer."""
        library = [node for i, node in enumerate(self.nodes) if not self.fusible[i]]
        self.calibrated = calibrated_seconds(library, rates.device) if rates.device is not None else {}
        self.seconds = [self._seconds(i) for i in range(count)]
        """Arithmetic of operations that are not fused."""
        self.work = [0.0 if self.fusible[i] else library_work(n.target) for i, n in enumerate(self.nodes)]
        """Of the host, to call them."""
        self.converted = frozenset(self._converted()) if partition.channels_last else frozenset()
        """Inputs of the graph, images and weights of convolutions, of which Inductor makes a copy with channels last
        when the forward begins, and hands that to the backward."""
        self.outputs = [index[node] for node in partition.outputs]
        self.gradients = [index[node] for node in partition.gradients]
        self.tangents = [i for i, node in enumerate(self.nodes) if self.given[i] and self.is_backward[i]]
        users = [
            min((index[user] for user in self.nodes[t].users if user in index), default=count) for t in self.tangents
        ]
        self.first_backward = min(users, default=count)
        self.forward_order = [i for i in range(count) if self.is_forward[i] and not self.given[i]]

    def _converted(self) -> Iterator[int]:
        for i, node in enumerate(self.nodes):
            if node.target is torch.ops.aten.convolution.default and self.is_forward[i]:
                for a in self.arguments[i][:2]:
                    value = self.nodes[a].meta.get("val")
                    if self.given[a] and isinstance(value, torch.Tensor) and not _channels_are_last(value):
                        yield a

    def _source(self, number: int) -> int:
        """The value whose buffer a value is in."""
        node = self.nodes[number]
        if node.op != "call_function" or not node.all_input_nodes:
            return number
        first = self.index[node.all_input_nodes[0]]
        if node.target is operator.getitem:
            whole = self.nodes[first]
            return self.source_of(first) if _is_view(whole) else number
        return self.source_of(first) if _is_view(node) else number

    def source_of(self, number: int) -> int:
        """The value that owns the buffer, through all views between."""
        while (above := self._source(number)) != number:
            number = above
        return number

    def _whole(self, number: int) -> int:
        node = self.nodes[number]
        return self.index[node.args[0]] if node.target is operator.getitem and self.source[number] == number else -1  # type: ignore[index]

    def _fills(self, number: int) -> bool:
        value = self.nodes[number].meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        whole = self.bytes[self.source[number]]
        return value.nbytes == whole > 0 and is_dense(value.shape, value.stride())

    def _seconds(self, number: int) -> float:
        node = self.nodes[number]
        if node in self.calibrated:
            return self.calibrated[node]
        packet = getattr(node.target, "overloadpacket", None)
        if self.fusible[number] or packet not in flop_registry:
            return 0.0
        value = node.meta.get("val")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        try:
            flops = flop_registry[packet](*args, **kwargs, out_val=value)
        except (TypeError, ValueError, AttributeError, AssertionError):
            return 0.0
        kinds = [t.dtype for t in torch.utils._pytree.tree_leaves((args, value)) if isinstance(t, torch.Tensor)]
        rate = min((self.rates.flops_per_s[k] for k in kinds if k in self.rates.flops_per_s), default=1e12)
        return float(flops) / rate


def _channels_are_last(value: torch.Tensor) -> bool:
    return value.dim() not in (4, 5) or value.is_contiguous(
        memory_format=torch.channels_last if value.dim() == 4 else torch.channels_last_3d
    )


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.rpartition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _reduces_rows(node: fx.Node) -> bool:
    """Whether the dimensions that a reduction is over are the last ones, in the order of memory."""
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    dims = node.args[1] if len(node.args) > 1 else None
    if not isinstance(value, torch.Tensor) or not isinstance(dims, int | list | tuple):
        return False
    over = {int(d) % max(1, value.dim()) for d in ([dims] if isinstance(dims, int) else dims) if isinstance(d, int)}
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    return 0 < len(over) < value.dim() and set(order[value.dim() - len(over) :]) == over


def _scatters_constants(node: fx.Node) -> bool:
    """Whether a number is put into places of a constant, which Inductor computes as a comparison: the gradient of a
    cross-entropy."""
    onto = node.args[0] if node.args else None
    return node.target is torch.ops.aten.scatter.value and isinstance(onto, fx.Node) and _name(onto) == "full"


def _is_view(node: fx.Node) -> bool:
    """Whether an operation returns its first argument seen in another way."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target is torch.ops.aten._unsafe_view.default:
        return True
    returned = target._schema.returns
    aliased = returned[0].alias_info if returned else None
    return aliased is not None and not aliased.is_write and not target._schema.is_mutable


def _bytes(node: fx.Node) -> int:
    """The memory of a value; of several results their own values tell."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return int(value.untyped_storage().nbytes()) if value.layout is torch.strided else value.nbytes
    except (RuntimeError, NotImplementedError):
        return value.numel() * value.element_size()
