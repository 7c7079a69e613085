"""Running one rank's part of a network, forward; backward is autograd's.

Nodes run in the order of the network on every rank. A rank that owns nothing of a value passes over its node, but takes
part in every message and every sum that it is expected in. Small values are computed on every rank alike, from the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from outcore.graph.record.recording import Context, Ref, Step, Tape
from outcore.ops.region import Region
from outcore.spatial.communicator import Communicator
from outcore.spatial.exchange import Token, Transfer, new_token
from outcore.spatial.layout import SplitLayout
from outcore.spatial.statistics import Statistics, largest, normalise, take_statistics, total
from outcore.stream.call import RuleContext, widening_rule
from outcore.stream.execute.execution import update_statistics
from outcore.stream.execute.tile_run import fork, modes
from outcore.stream.network import RegionNode
from outcore.stream.rules.border import sliced
from outcore.stream.rules.convolve import ConvolutionRule
from outcore.stream.rules.normalise import Apply
from outcore.stream.rules.pointwise import Dropout
from outcore.stream.rules.pool import MaxPool
from outcore.stream.rules.reduce import Largest, Mean, wide
from outcore.stream.source import ImageRows

__all__ = ["SplitRun", "SplitState"]


@dataclass(frozen=True)
class SplitState:
    """What a rank computes with, beside the layout."""

    comm: Communicator
    device: torch.device
    model: nn.Module
    """Where parameters, buffers and modules are found by name."""
    constants: Mapping[str, torch.Tensor]
    steps: Mapping[str, Step]
    """The recorded calls by name, for small values."""
    ambient: Context
    before: Callable[[str], None] = lambda call: None
    """Called with the name of each call before it runs: seeds what it draws, and notes where the rank is."""


@dataclass
class SplitRun:
    """One forward on one rank."""

    layout: SplitLayout
    state: SplitState
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """What readers see: the held region, or a small value whole."""
    token: Token | None = None
    """The end of the chain of communicating nodes; None without gradients."""

    def __post_init__(self) -> None:
        self.network, self.rank = self.layout.network, self.state.comm.rank
        self.regions = self.layout.ranks[self.rank]
        self.grid = self.layout.grid
        self._posted: dict[str, tuple[Transfer, torch.Tensor | None]] = {}
        self._ahead: dict[str, Transfer] = {}
        self._statistics: dict[str, Statistics] = {}
        self._handed: dict[tuple[str, str, int], torch.Tensor] = {}
        self._readers, self._last = _readers(self.layout, self.rank)
        self._done: set[str] = set()
        self._at = self.layout.positions

    def run(self, inputs: Mapping[str, torch.Tensor | ImageRows]) -> dict[str, torch.Tensor]:
        """The values of the boundary, whole on the ranks that get them, or in parts where the layout gathers nothing;
        small ones on every rank."""
        if torch.is_grad_enabled():
            self.token = new_token(self.state.device)
        for name, tensor in inputs.items():
            self._take_input(name, tensor)
        for node in self.layout.extent.nodes:
            for value in self.layout.completed.get(node.output, ()):
                self._complete(value)
            if node.output in self.layout.borders:
                self._post_borders(node)
            self._node(node)
            if node.output in self.layout.exchanges:
                self._post(node)
            for value in self._last.get(node.output, ()):
                self.values.pop(value, None)
        return self._gather()

    # Values

    def _take_input(self, name: str, tensor: torch.Tensor | ImageRows) -> None:
        """Bring to the device what this rank needs of an input; of one that is not in memory, read no more than
        that."""
        if not self.network.is_streamed(name):
            self.values[name] = tensor.to(self.state.device)
        elif (region := self.regions.held.get(name)) is not None:
            if isinstance(tensor, ImageRows):
                self.values[name] = tensor.part(region, self.state.device)
                return
            whole = tuple((0, n) for n in tensor.shape)
            self.values[name] = sliced(tensor, whole, region).to(self.state.device)

    def _tensor(self, ref: Ref) -> torch.Tensor:
        if ref.kind == "constant":
            return self.state.constants[ref.name]
        holder, _, leaf = ref.name.rpartition(".")
        found: torch.Tensor = getattr(self.state.model.get_submodule(holder), leaf)
        return found

    def _operand(self, node: RegionNode, index: int, region: Region, reader: str | None = None) -> torch.Tensor:
        ref = node.operands[index]
        if ref.kind != "value":
            tensor = self._tensor(ref)
            return sliced(tensor, tuple((0, n) for n in tensor.shape), region)
        return self._read(ref.name, reader or node.output, index, region)

    def _read(self, value: str, reader: str, index: int, region: Region) -> torch.Tensor:
        """A region of a value for one of its readers."""
        tensor = self.values[value]
        streamed = self.network.is_streamed(value)
        held = self.regions.held[value] if streamed else tuple((0, n) for n in tensor.shape)
        readers = self._readers.get(value, [])
        if not streamed or len(readers) < 2 or not tensor.requires_grad or not torch.is_grad_enabled():
            return sliced(tensor, held, region)
        if (value, reader, index) not in self._handed:
            parts = fork(tensor, held, [r for _, _, r, _ in readers], [f for _, _, _, f in readers])
            self._handed.update({(value, n, i): p for (n, i, _, _), p in zip(readers, parts, strict=True)})
        return self._handed.pop((value, reader, index))

    def _own(self, value: str) -> torch.Tensor | None:
        """This rank's own part of a value, without its gradient."""
        own = self.grid.own(self.network, value, self.rank)
        if own is None:
            return None
        if value in self._posted:
            made = self._posted[value][1]
            assert made is not None
            return sliced(made.detach(), self.regions.made[value], own)
        return sliced(self.values[value].detach(), self.regions.held[value], own)

    def _has_gradient(self, value: str) -> bool:
        return self.network.graph.values[value].requires_grad if value in self.network.graph.values else True

    # Nodes

    def _node(self, node: RegionNode) -> None:
        self.state.before(node.call)
        with modes(self.network.contexts.get(node.call)):
            if node.kind == "global":
                self._small(node)
            elif node.norm is not None:
                self._take_statistics(node)
            elif node.kind == "reduction":
                self._reduce(node)
            elif isinstance(node.rule, Apply):
                self._normalise(node, node.rule)
            elif node.output in self.regions.made:
                self.values[node.output] = self._local(node)

    def _local(self, node: RegionNode) -> torch.Tensor:
        assert node.rule is not None
        needs = self.regions.needs[node.output]
        operands = [self._operand(node, i, region) for i, region in enumerate(needs)]
        widened, rule = self.regions.widened.get(node.output), widening_rule(node.rule)
        if widened is not None and rule is not None:
            return rule.run_widened(operands, widened)
        if isinstance(node.rule, Dropout):
            return operands[0] * _channel_noise(node.rule, operands[0])
        return node.rule.run(operands, self.regions.made[node.output], RuleContext())

    def _small(self, node: RegionNode) -> None:
        """A value that every rank has whole: the recorded call, once for all that it returns."""
        if node.call in self._done:
            return
        self._done.add(node.call)
        tape = Tape(self.state.model, self.state.constants, self.values)
        tape.step(replace(self.state.steps[node.call], drop=()))

    def _take_statistics(self, node: RegionNode) -> None:
        assert node.norm is not None
        source = node.values[0]
        parts = self.grid.owners(self.network, source)
        found = take_statistics(
            node.norm.moments, self._own(source), parts, self.state.comm, 4 * self._at[node.output], self.state.device
        )
        self._statistics[node.output] = found
        if node.norm.module is not None:
            path = self.state.steps[node.call].target
            norm = replace(node.norm, module=self.state.model.get_submodule(path))
            update_statistics(norm, found.moments, found.count)

    def _normalise(self, node: RegionNode, rule: Apply) -> None:
        source, statistics = node.operands[0].name, node.operands[1].name
        needs = self.regions.needs.get(node.output)
        x = None if needs is None else self._operand(node, 0, needs[0])
        affine = [self._tensor(ref) for ref in node.operands[2:]]
        own = self.grid.own(self.network, source, self.rank)
        token = self.token if self._has_gradient(node.output) else None
        held = needs[0] if needs is not None else None
        made, token = normalise(
            x,
            affine,
            rule,
            self._statistics[statistics],
            held,
            own,
            node.shape,
            self.state.comm,
            4 * self._at[statistics],
            token,
        )
        self.token = token if token is not None else self.token
        if made is not None:
            self.values[node.output] = made

    def _reduce(self, node: RegionNode) -> None:
        source = node.values[0]
        own = self.grid.own(self.network, source, self.rank)
        part = None if own is None else self._read(source, node.output, 0, own)
        token = self.token if self._has_gradient(node.output) else None
        number = 4 * self._at[node.output]
        if isinstance(node.reduction, Mean):
            result = torch.empty(node.shape, dtype=wide(node.dtype), device=self.state.device)
            made, token = total(node.reduction, part, result, self.state.comm, number, token)
        else:
            assert isinstance(node.reduction, Largest)
            result = torch.empty(node.shape, dtype=node.dtype, device=self.state.device)
            made, token = largest(node.reduction, part, result, self.state.comm, number, token)
        self.token = token if token is not None else self.token
        self.values[node.output] = made

    # Messages

    def _transfer(self, node: RegionNode) -> Transfer:
        made, exchange = self.regions.made.get(node.output), self.layout.exchanges[node.output]
        return Transfer(exchange, self.state.comm, made, node.dtype, self.state.device)

    def _post_borders(self, node: RegionNode) -> None:
        """Compute what others need of a value, and send it."""
        rule, regions = node.rule, self.layout.borders[node.output][self.rank]
        strips = []
        for number, region in enumerate(regions):
            assert rule is not None
            self.state.before(node.call)
            with modes(self.network.contexts.get(node.call)):
                reader = _strip_name(node.output, number)
                crops = [self._operand(node, i, r, reader) for i, r in enumerate(rule.needs(region))]
                strips.append(rule.run(crops, region, RuleContext()))
        transfer = self._transfer(node)
        token = transfer.post_strips(strips, regions, self.token if self._has_gradient(node.output) else None)
        self.token = token if token is not None else self.token
        self._ahead[node.output] = transfer

    def _post(self, node: RegionNode) -> None:
        value = node.output
        made = self.values.pop(value, None)
        if value in self._ahead:
            self._posted[value] = (self._ahead.pop(value), made)
            return
        transfer = self._transfer(node)
        token = self.token if self._has_gradient(value) else None
        kept, token = transfer.post(made, token)
        self.token = token if token is not None else self.token
        self._posted[value] = (transfer, kept)

    def _complete(self, value: str) -> None:
        transfer, kept = self._posted.pop(value)
        token = self.token if self._has_gradient(value) else None
        held, token = transfer.complete(kept, token)
        self.token = token if token is not None else self.token
        if held is not None:
            self.values[value] = held

    def _gather(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for value in self.layout.extent.boundary:
            if not self.network.is_streamed(value):
                found[value] = self.values[value]
                continue
            own = self.grid.own(self.network, value, self.rank)
            made = None if own is None else self._read(value, "", 0, own)
            if (exchange := self.layout.gathers.get(value)) is None:
                found |= {} if made is None else {value: made}
                continue
            dtype = self.network.dtypes[value]
            transfer = Transfer(exchange, self.state.comm, own, dtype, self.state.device)
            token = self.token if self._has_gradient(value) else None
            kept, token = transfer.post(made, token)
            whole, token = transfer.complete(kept, token)
            self.token = token if token is not None else self.token
            if whole is not None:
                found[value] = whole
        return found


_Reader = tuple[str, int, Region, bool]
"""Node, number of the operand, region, and whether its gradient is fresh."""


def _readers(layout: SplitLayout, rank: int) -> tuple[dict[str, list[_Reader]], dict[str, list[str]]]:
    """The readers of each value on a rank, and the values that a node is the last to read."""
    network, regions = layout.network, layout.ranks[rank]
    found: dict[str, list[_Reader]] = {}
    last: dict[str, str] = {}
    for node in layout.extent.nodes:
        for value in node.values:
            last[value] = node.output
        if node.kind == "reduction" and node.norm is None:
            if (own := layout.grid.own(network, node.values[0], rank)) is not None:
                found.setdefault(node.values[0], []).append((node.output, 0, own, False))
        if node.kind != "local":
            continue
        reads = [(node.output, regions.needs.get(node.output, ()))]
        strips = layout.borders[node.output][rank] if node.output in layout.borders else ()
        if node.rule is not None:
            reads += [(_strip_name(node.output, k), node.rule.needs(strip)) for k, strip in enumerate(strips)]
        for reader, needs in reads:
            for i, (ref, region) in enumerate(zip(node.operands, needs, strict=False)):
                if ref.kind == "value" and network.is_streamed(ref.name):
                    fresh = i == 0 and isinstance(node.rule, ConvolutionRule | MaxPool)
                    found.setdefault(ref.name, []).append((reader, i, region, fresh))
    for value in filter(network.is_streamed, layout.extent.boundary):
        if (own := layout.grid.own(network, value, rank)) is not None:
            found.setdefault(value, []).append(("", 0, own, False))
    ends: dict[str, list[str]] = {}
    for value, node_name in last.items():
        if value not in layout.extent.boundary:
            ends.setdefault(node_name, []).append(value)
    return found, ends


def _strip_name(value: str, number: int) -> str:
    """The name under which a border of a value reads its operands."""
    return f"{value} border {number}"


def _channel_noise(rule: Dropout, x: torch.Tensor) -> torch.Tensor:
    """What multiplies the channels of all samples, as torch draws it for the whole tensor."""
    ones = torch.ones(*rule.shape[:2], 1, 1, dtype=x.dtype, device=x.device)
    noise: torch.Tensor = torch.nn.functional.dropout2d(ones, rule.rate, True)
    return noise.reshape(*rule.shape[:2], *(1,) * (x.dim() - 2))
