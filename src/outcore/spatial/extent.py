"""How far into a network its image can be split over ranks.

Nodes with a rule are computed part by part; reductions (statistics of norms, global pools) by what all ranks add up;
small values that depend on those alone are computed on every rank alike. The first node that needs all of an image at
once (attention over all places, a head that flattens) ends the split part: what it reads is gathered, and what follows
runs as it is. Element-wise dropout ends it as well: its mask is drawn in the order of the whole tensor, which no rank
holds. Dropout of whole channels draws one number per sample and channel, and every rank draws the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

from outcore.graph.record.recording import Ref
from outcore.stream.network import RegionNetwork, RegionNode
from outcore.stream.rules.pointwise import Dropout
from outcore.stream.rules.reduce import Largest, Mean, Moments

__all__ = ["SplitExtent", "is_image", "is_one_map", "split_extent"]


@dataclass(frozen=True)
class SplitExtent:
    """The part of a network that runs on parts of the image."""

    nodes: tuple[RegionNode, ...]
    """In order."""
    boundary: tuple[str, ...]
    """Values that what follows, or the user, gets whole."""
    calls: frozenset[str]
    """The recorded calls of these nodes."""
    stopped: tuple[tuple[str, str], ...]
    """Where the split part ends although the network goes on: (block, reason)."""


def split_extent(network: RegionNetwork, counts: tuple[int, ...], within: Collection[str] | None = None) -> SplitExtent:
    """The nodes that can run on parts, as far as they go.

    Args:
        network: the nodes.
        counts: ranks along each pixel axis.
        within: calls to look at; all, if not given.
    """
    fine: set[str] = set(network.graph.inputs)
    why: dict[str, str] = {}
    for call, together in itertools.groupby(network.nodes.values(), key=lambda n: n.call):
        nodes = list(together)
        if within is not None and call not in within:
            continue
        for node in nodes:
            reason = "" if any(v not in fine for v in node.values) else _why_not(network, node, counts)
            if reason is not None:
                fine -= {n.output for n in nodes}
                why.update({node.output: reason} if reason else {})
                break
            fine.add(node.output)
    split = [n.output for n in network.nodes.values() if n.output in fine and n.kind in ("local", "reduction")]
    chosen = {n.output for n in network.closure(split)}
    calls = frozenset(network.nodes[v].call for v in chosen)
    nodes = [n for n in network.nodes.values() if n.call in calls]
    outside = [n for n in network.nodes.values() if n.call not in calls]
    leaving = {v for n in outside for v in n.values} | set(network.graph.outputs)
    boundary = tuple(n.output for n in nodes if n.output in leaving)
    stopped = tuple((network.block_of(v), reason) for v, reason in why.items())
    return SplitExtent(tuple(nodes), boundary, calls, stopped)


def is_one_map(network: RegionNetwork, extent: SplitExtent) -> bool:
    """Whether all that the network returns is one map in parts, so that a loss over its pixels can be taken on each."""
    outputs, result = network.graph.outputs, network.recording.result
    every = extent.calls >= network.graph.calls.keys() and extent.boundary == tuple(outputs)
    return every and len(outputs) == 1 and isinstance(result, Ref) and is_image(network, outputs[0])


def is_image(network: RegionNetwork, value: str) -> bool:
    """Whether the dimensions of a value are samples, channels and pixels, of which the last are split."""
    axes = network.axes[value]
    placed = all(axis is None or axis == dim - 2 for dim, axis in enumerate(axes))
    return network.is_streamed(value) and len(axes) == network.rank + 2 and placed


def _why_not(network: RegionNetwork, node: RegionNode, counts: tuple[int, ...]) -> str | None:
    """Why a node whose operands are split cannot be; None if it can."""
    if node.kind == "opaque":
        return node.reason
    if isinstance(node.rule, Dropout) and not node.rule.whole_channels:
        return "its mask is drawn for the whole tensor at once, which no rank holds (dropout of channels can be split)"
    reduction = node.reduction
    if isinstance(reduction, Mean | Largest):
        axes = network.axes[node.values[0]]
        left = [d for d, a in enumerate(axes) if a is not None and counts[a] > 1 and d not in reduction.dims]
        if left:
            return f"it reduces over some of the split dimensions and leaves dimension {left[0]}"
    elif reduction is not None and not isinstance(reduction, Moments):
        return f"{type(reduction).__name__} has no sum over ranks"
    return None
