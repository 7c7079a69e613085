"""What is streamed, in which passes, and where it stops.

The streamed part is a set of nodes that holds all nodes before them. It runs in *stages*, each one pass over the
tiles:

    stage 0:  image ──▶ tiles ──▶ statistics of the first norm
    stage 1:  image ──▶ tiles (with those statistics) ──▶ statistics of the second norm
    ...
    last:     image ──▶ tiles (with all statistics) ──▶ boundary map, or the global pool

A *barrier* is a value that must be finished before a later pass can use it: statistics of a norm, the pool of a
squeeze-excite block, or a map that is *kept* so that later stages start from it and not from the image. Without
barriers there is one stage. Between stages the small global nodes run once, as they were recorded.

Backward is the same stages in reverse order: each tile is run again with gradients on, and gets its slice of the
gradient of each map and its share of the gradient of each reduction. What arrives at a kept map, a statistic or a
parameter adds up; by linearity the sum over tiles is the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from outcore.errors import StreamError
from outcore.graph.parts import ancestors
from outcore.stream.network import RegionNetwork, RegionNode


@dataclass(frozen=True)
class TilePass:
    """One pass over the tiles, and the global nodes that run before it."""

    globals: tuple[RegionNode, ...]
    nodes: tuple[RegionNode, ...]
    """Local nodes, in order."""
    reductions: tuple[RegionNode, ...]
    maps: tuple[str, ...]
    """Values assembled from tiles."""
    sources: tuple[str, ...]
    """Images and kept maps that it reads regions of."""
    smalls: tuple[str, ...]
    """Global values that every tile reads."""

    @property
    def makes(self) -> tuple[str, ...]:
        """Values that are whole after it: maps, and what reductions give."""
        return (*self.maps, *(r.output for r in self.reductions))

    @property
    def targets(self) -> dict[str, str]:
        """What tiles partition: each map, and the operand of each reduction."""
        return {m: m for m in self.maps} | {r.output: r.values[0] for r in self.reductions}


@dataclass(frozen=True)
class TilePasses:
    """The stages, and the values that leave them."""

    stages: tuple[TilePass, ...]
    boundary: tuple[str, ...]
    """Values that the untiled tail, or the user, gets."""
    calls: frozenset[str]
    """Recorded calls that are streamed; the others run untiled."""
    stopped: tuple[tuple[str, str], ...]
    """Where streaming stops although it was not asked to: (block, reason)."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Maps that later passes start from."""
        read = {v for stage in self.stages for v in (*stage.sources, *(i for n in stage.globals for i in n.values))}
        return tuple(m for stage in self.stages for m in stage.maps if m in read)

    @property
    def passing(self) -> tuple[str, ...]:
        """Maps that only the untiled tail reads."""
        kept = set(self.kept)
        return tuple(m for stage in self.stages for m in stage.maps if m not in kept)


def reach(network: RegionNetwork, *, statistics: bool) -> tuple[set[str], dict[str, str]]:
    """The values that can be streamed, and why others next to them cannot.

    Args:
        network: the nodes.
        statistics: whether values behind a barrier count.
    """
    fine: set[str] = set(network.graph.inputs)
    behind: set[str] = set()
    why: dict[str, str] = {}
    for _, together in itertools.groupby(network.nodes.values(), key=lambda n: n.call):
        nodes = list(together)
        for node in nodes:
            reason = _why_not(network, node, fine, behind, statistics)
            if reason is not None:  # a call is streamed with all that it returns, or not at all
                fine -= {n.output for n in nodes}
                why.update({node.output: reason} if reason else {})
                break
            fine.add(node.output)
            if _is_barrier(network, node) or any(v in behind for v in node.values):
                behind.add(node.output)
    if not statistics:  # what is behind a barrier without being streamed itself belongs to the rest
        fine -= {v for v in behind if v in network.nodes and network.nodes[v].kind == "global"}
    return fine, why


def _why_not(
    network: RegionNetwork, node: RegionNode, fine: set[str], behind: set[str], statistics: bool
) -> str | None:
    """Why a node cannot be streamed: empty if something before it cannot, None if it can."""
    if any(v not in fine for v in node.values):
        return ""
    if node.kind == "opaque":
        return node.reason
    if node.kind != "global" and not statistics and any(v in behind for v in node.values):
        return "it uses statistics of the whole image, which takes further passes (statistics=True allows them)"
    if _reads_untiled_map(network, node):
        return "it joins its tiles with a map that is not made of tiles (resized from a global value)"
    return None


def _reads_untiled_map(network: RegionNetwork, node: RegionNode) -> bool:
    """Whether a node needs, of a value that is made at once, the pixels of its tile: what is global is given to all
    tiles alike."""
    if node.kind != "local" or node.rule is None:
        return False
    for number, ref in enumerate(node.operands):
        if ref.kind != "value" or network.is_streamed(ref.name):
            continue
        for dim, size in enumerate(network.shapes[ref.name]):
            there = node.rule.follow(number, dim) if size > 1 else None
            if there is not None and network.axes[node.output][there] is not None:
                return True
    return False


def divide(
    network: RegionNetwork,
    *,
    boundary: Iterable[str] | None = None,
    statistics: bool = False,
    keep: Collection[str] = (),
) -> TilePasses:
    """Decide what is streamed and put it into stages.

    Args:
        network: the nodes.
        boundary: blocks or values after which streaming stops; none for as far as it goes.
        statistics: whether further passes for norms and pools over the whole image are accepted.
        keep: values that are put together and kept, so that later stages start from them.

    Raises:
        StreamError: nothing can be streamed, or not as far as asked.
    """
    fine, why = reach(network, statistics=statistics)
    wanted = set(fine) if boundary is None else _asked(network, boundary, fine, why)
    local = [n for n in network.nodes.values() if n.output in wanted and n.kind in ("local", "reduction")]
    chosen = {n.output for n in network.closure([n.output for n in local])}
    if not chosen:
        raise _nothing(network, why)
    calls = frozenset(c for v in chosen for c in (network.nodes[v].call, *network.nodes[v].absorbed))
    chosen |= {n.output for n in network.nodes.values() if n.call in calls}
    outside = [n for n in network.nodes.values() if n.call not in calls]
    leaving = {v for n in outside for v in n.values} | set(network.graph.outputs)
    result = tuple(v for v in network.nodes if v in chosen and v in leaving)
    stages = _stages(network, [n for n in network.nodes.values() if n.output in chosen], result, set(keep))
    stopped = tuple((network.block_of(v), reason) for v, reason in why.items())
    return TilePasses(stages, result, calls, stopped if boundary is None else ())


def _is_barrier(network: RegionNetwork, node: RegionNode) -> bool:
    """Whether a streamed operand becomes a global value."""
    streamed = any(network.is_streamed(v) for v in node.values)
    return streamed and not network.is_streamed(node.output)


def _stages(
    network: RegionNetwork, nodes: list[RegionNode], boundary: tuple[str, ...], keep: set[str]
) -> tuple[TilePass, ...]:
    """The passes over the image in which some nodes are computed."""
    levels = _levels(network, nodes, boundary, keep)
    known = set(network.graph.inputs)
    passes = []
    for index in range(levels.last + 1):
        small = tuple(n for n in nodes if n.kind == "global" and levels.of[n.output] == index)
        known |= {n.output for n in small}
        targets = [v for v, at in levels.materialised.items() if at == index]
        reductions = tuple(network.nodes[v] for v in targets if network.nodes[v].kind == "reduction")
        maps = tuple(v for v in targets if network.nodes[v].kind == "local")
        inner = [n for n in network.closure([*maps, *(r.values[0] for r in reductions)], known) if n.kind == "local"]
        read = dict.fromkeys(v for n in (*inner, *reductions) for v in n.values if v in known)
        passes.append(
            TilePass(
                small,
                tuple(inner),
                reductions,
                maps,
                tuple(v for v in read if network.is_streamed(v)),
                tuple(v for v in read if not network.is_streamed(v)),
            )
        )
        known |= {v for v in targets if levels.ready[v] > index}
    return tuple(passes)


@dataclass
class _Levels:
    """In which pass each value is computed."""

    of: dict[str, int]
    ready: dict[str, int]
    """The pass from which on a value may be used without computing it again."""
    materialised: dict[str, int] = field(default_factory=dict)
    """Values that a pass puts together as a whole."""

    @property
    def last(self) -> int:
        """The last pass."""
        return max((*self.materialised.values(), *self.of.values()), default=0)


def _levels(network: RegionNetwork, nodes: list[RegionNode], boundary: tuple[str, ...], keep: set[str]) -> _Levels:
    """The pass of every node: the first in which all that it reads can be had."""
    inputs = dict.fromkeys(network.graph.inputs, 0)
    levels = _Levels(inputs, dict(inputs))
    users = {v for n in nodes for v in n.values}
    for node in nodes:
        # Statistics of a map that is being put together are taken in the same pass.
        early = node.kind == "reduction"
        reached = (levels.of[v] if early and network.is_streamed(v) else levels.ready[v] for v in node.values)
        at = max(reached, default=0)
        levels.of[node.output] = levels.ready[node.output] = at
        if node.kind == "global":
            continue
        barrier = _is_barrier(network, node)
        kept = node.output in keep and node.output in users
        if barrier or kept or node.output in boundary:
            levels.materialised[node.output] = at
        if (barrier or kept) and node.output in users:
            levels.ready[node.output] = at + 1
    return levels


def _asked(network: RegionNetwork, boundary: Iterable[str], fine: set[str], why: dict[str, str]) -> set[str]:
    wanted: set[str] = set()
    for name in boundary:
        found = [v for v in network.nodes if v == name or network.nodes[v].call == name]
        found = found or _leaving(network, name)
        behind = network.closure(found)
        for node in behind:
            if node.output not in fine:
                at = next((n.output for n in behind if n.output in why), node.output)
                raise StreamError(
                    f"streaming cannot reach {name}: {network.block_of(at)} stops it ({why.get(at, node.reason)}); "
                    "give an earlier boundary, or leave it out to stream as far as it goes"
                )
            wanted.add(node.output)
    return wanted


def _leaving(network: RegionNetwork, block: str) -> list[str]:
    """The values of a block that are used outside of it; of a folded part, those of what it was folded into."""
    network.graph[block]  # raises if there is no such block
    inside = {c.name for c in network.graph.calls.values() if block in (c.block, *ancestors(c.block))}
    nodes = {n.output for n in network.nodes.values() if inside & {n.call, *n.absorbed}}
    used = {v for n in network.nodes.values() if n.output not in nodes for v in n.values}
    return [v for v in nodes if v in used or v in network.graph.outputs]


def _nothing(network: RegionNetwork, why: dict[str, str]) -> StreamError:
    if not network.inputs:
        return StreamError("no input is an image: (batch, channels, pixels...) is what can be streamed")
    first = next(iter(why.items()), None)
    if first is None:
        return StreamError("the network does nothing with its image before its output")
    block = network.block_of(first[0])
    return StreamError(
        f"nothing can be streamed: the first operation on the image is {block}, and {first[1]}; put convolutions or "
        "pools before it, or plan without streaming (recompute and offload need no tiles)"
    )
