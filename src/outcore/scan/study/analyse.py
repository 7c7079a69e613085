"""Could a scan pay for a chain of layers? The study of the BPPSA paper, for any captured network.

The network is cut wherever a single value crosses; what lies between two cuts is a *link* with one Jacobian per sample.
Back-propagation takes one step per link, each a product of a sparse Jacobian and a vector. A scan takes few steps, but
multiplies Jacobians, which fill up as their receptive fields grow. This report counts both, level by level, without
running anything: FLOPs along the critical path (the largest of each level, all others running beside it), all FLOPs,
and the bytes of the products. The best number of levels (the paper's hybrid: tree below, one by one above) is chosen
for the scan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outcore.errors import ScanError
from outcore.graph import Graph
from outcore.graph.parts import Call
from outcore.scan.study.sparsity import JACOBIAN, JacobianPattern, dense, identity, of_layer

_BYTES_PER_NONZERO = 8
"""A float32 and a 32-bit column."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One step of the chain: a layer, or a part that branches and meets again."""

    name: str
    type: str
    rows: int
    columns: int
    nonzeros: float
    sparsity: float
    step_flops: float
    """Of one step of back-propagation through it, per sample."""
    known: bool
    """Whether all its layers are in the table; a layer that is not counts as dense."""


@dataclass(frozen=True, slots=True)
class ScanLevel:
    """One level of the scan."""

    phase: str
    """``up``, ``middle`` or ``down``."""
    products: int
    critical_flops: float
    total_flops: float
    sparsity: float
    """Of what was multiplied; of the fullest one."""
    bytes: float
    """What the products of this level take, all samples."""


@dataclass(frozen=True)
class Analysis:
    """What `analyse` found."""

    model: str
    batch: int
    links: tuple[ChainLink, ...]
    levels: tuple[ScanLevel, ...]
    """Of the whole tree."""
    alternatives: tuple[float, ...]
    """FLOPs per sample along the critical path with 0, 1, 2, … levels of products; with 0, plain
    back-propagation."""

    @property
    def sequential_flops(self) -> float:
        """FLOPs per sample along the critical path of ordinary back-propagation: all of them."""
        return sum(link.step_flops for link in self.links)

    @property
    def tree_levels(self) -> int:
        """Levels of products that give the shortest critical path."""
        return min(range(len(self.alternatives)), key=self.alternatives.__getitem__)

    @property
    def critical_flops(self) -> float:
        """FLOPs per sample along the critical path of the best scan."""
        return self.alternatives[self.tree_levels]

    @property
    def total_flops(self) -> float:
        """FLOPs per sample of the whole tree."""
        return sum(level.total_flops for level in self.levels)

    @property
    def peak_bytes(self) -> float:
        """Bytes of all Jacobians and products that the whole tree keeps, all samples."""
        jacobians = sum(link.nonzeros for link in self.links) * self.batch * _BYTES_PER_NONZERO
        return jacobians + sum(level.bytes for level in self.levels)

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of ordinary back-propagation, and of the scan."""
        return len(self.links), sum(1 if level.phase != "middle" else level.products for level in self.levels)

    @property
    def pays(self) -> bool:
        """Whether some number of levels makes the critical path shorter."""
        return self.tree_levels > 0

    @property
    def verdict(self) -> str:
        """In one sentence."""
        ratio = self.sequential_flops / max(1.0, self.critical_flops)
        if self.pays:
            return (
                f"a scan could pay: with {self.tree_levels} levels of products its critical path has "
                f"{ratio:.2f}x fewer FLOPs than the {len(self.links)} steps of back-propagation"
            )
        if len(self.alternatives) < 2:
            return f"a scan does not pay: {len(self.links)} links are too few"
        worse = self.alternatives[1] / max(1.0, self.sequential_flops)
        return (
            f"a scan does not pay: one level of products already makes the critical path {worse:.3g}x as long "
            f"as the {len(self.links)} steps of back-propagation, and the whole tree keeps "
            f"{_short(self.peak_bytes)}B"
        )

    def to_json(self) -> dict[str, Any]:
        """The chain, the paths by levels of products, and the verdict, as plain values."""
        return {
            "links": [asdict(link) for link in self.links],
            "critical_flops_by_levels": list(self.alternatives),
            "peak_bytes": self.peak_bytes,
            "pays": self.pays,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.links)} links, batch {self.batch}", ""]
        lines.append(f"{'link':32} {'layer':14} {'Jacobian':>19} {'zeros':>9} {'FLOPs of a step':>16}")
        for link in self.links:
            size = f"{link.rows} x {link.columns}"
            known = "" if link.known else "  taken as dense"
            lines.append(
                f"{link.name[:32]:32} {link.type[:14]:14} {size:>19} {link.sparsity:>9.4%} "
                f"{_short(link.step_flops):>16}{known}"
            )
        lines += [
            "",
            f"{'level':8} {'products':>9} {'critical FLOPs':>15} {'all FLOPs':>10} {'zeros':>9} {'bytes':>9}",
        ]
        for level in self.levels:
            lines.append(
                f"{level.phase:8} {level.products:9} {_short(level.critical_flops):>15} "
                f"{_short(level.total_flops):>10} {level.sparsity:>9.4%} {_short(level.bytes):>9}"
            )
        paths = ", ".join(f"{n}: {_short(flops)}" for n, flops in enumerate(self.alternatives))
        lines += ["", f"critical FLOPs by levels of products: {paths}", self.verdict]
        return "\n".join(lines)


def analyse(graph: Graph, *, density: float | Mapping[str, float] = 1.0) -> Analysis:
    """Whether back-propagation through a captured network could be scanned with profit.

    >>> import outcore, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    >>> found = analyse(outcore.capture(net, torch.zeros(1, 1, 8, 8)))
    >>> [f"{link.type} {link.rows} x {link.columns}" for link in found.links]
    ['Conv2d 144 x 64', 'ReLU 144 x 144', 'MaxPool2d 36 x 144']

    Args:
        graph: what `outcore.capture` returned; batch first.
        density: share of weights that are not pruned, for all layers or by name of the block.

    Raises:
        ScanError: the graph has no chain of values from an input to an output.
    """
    links = _links(graph, density)
    if not links:
        raise ScanError(f"{graph.model} has no layer between its input and its output; nothing to analyse")
    patterns = [pattern for pattern, _ in links]
    batch = graph.values[graph.inputs[0]].shape[0]
    scans = [_scan(patterns, n, batch) for n in range(_halvings(len(links)) + 1)]
    chain = tuple(link for _, link in links)
    return Analysis(graph.model, batch, chain, tuple(scans[-1]), tuple(_critical(levels) for levels in scans))


def _halvings(n: int) -> int:
    """How often a chain can be halved as `outcore.scan.affine` does it."""
    return 0 if n < 3 else 1 + _halvings((n - 1) // 2)


def _critical(levels: list[ScanLevel]) -> float:
    return sum(level.critical_flops for level in levels)


def _links(graph: Graph, density: float | Mapping[str, float]) -> list[tuple[JacobianPattern, ChainLink]]:
    """The chain: patterns between places where a single value crosses."""
    entry = graph.inputs[0]
    shapes = {entry: tuple(graph.values[entry].shape[1:])}
    reach: dict[str, JacobianPattern] = {entry: identity(shapes[entry])}
    pending: list[Call] = []
    flops, known, found = 0.0, True, []
    alive = {entry}
    calls = list(graph.calls.values())
    for place, call in enumerate(calls):
        inputs = [v for v in call.inputs if v in reach]
        if not inputs:
            continue
        out = call.outputs[0]
        parts = [_pattern(graph, call, v, out, shapes, density) for v in inputs]
        flops += sum(2 * p.nonzeros for p, _ in parts)
        known = known and all(k for _, k in parts)
        total = None
        for (pattern, _), v in zip(parts, inputs, strict=True):
            through = pattern.after(reach[v])[0]
            total = through if total is None else total.joined(through)
        assert total is not None
        reach[out] = total
        pending.append(call)
        alive = {v for v in (*alive, out) if _used_later(graph, v, calls[place + 1 :])}
        if alive == {out}:
            block = graph.blocks[call.block]
            rows, columns = total.shape
            name = pending[0].block if len(pending) == 1 else f"{pending[0].block} … {call.block}"
            kind = block.type if len(pending) == 1 else f"{len(pending)} layers"
            found.append((total, ChainLink(name, kind, rows, columns, total.nonzeros, total.sparsity, flops, known)))
            reach, pending, flops, known = {out: identity(shapes[out])}, [], 0.0, True
    return found


def _used_later(graph: Graph, value: str, calls: list[Call]) -> bool:
    return value in graph.outputs or any(value in call.inputs for call in calls)


def _pattern(
    graph: Graph,
    call: Call,
    value: str,
    out: str,
    shapes: dict[str, tuple[int, ...]],
    density: float | Mapping[str, float],
) -> tuple[JacobianPattern, bool]:
    """The pattern of one call with respect to one of its inputs, and whether its layer is known."""
    block, given = graph.blocks[call.block], shapes[value]
    shape = tuple(graph.values[out].shape[1:])
    if JACOBIAN.find(block.type) == "reshape" and math.prod(shape) == math.prod(given):
        shapes[out] = given  # a flattened map is still a map; the layer that reads it decides
        return identity(given), True
    if JACOBIAN.find(block.type) == "dense" and len(shape) == 1:
        shape = shape + (1,) * (len(given) - 1)
    shapes[out] = shape
    share = density if isinstance(density, float | int) else density.get(call.block, 1.0)
    if len(shape) == len(given):
        found = of_layer(block.type, block.detail or call.detail, given, shape, training=graph.training, density=share)
        if found is not None:
            return found, True
        return dense(shape, given), False
    # Another number of dimensions: everything depends on everything, in the input's dimensions.
    shapes[out] = (math.prod(shape),) + (1,) * (len(given) - 1)
    return dense(shapes[out], given), False


def _scan(patterns: list[JacobianPattern], tree_levels: int, batch: int) -> list[ScanLevel]:
    """Levels of the scan from the last link to the first, with `tree_levels` halvings."""
    elements = list(reversed(patterns))
    ups, downs = [], []
    for _ in range(tree_levels):
        if len(elements) < 3:
            break
        pairs = (len(elements) - 1) // 2
        products = [elements[2 * i].after(elements[2 * i + 1]) for i in range(pairs)]
        flops = [f for _, f in products]
        made = [p for p, _ in products]
        ups.append(_level("up", made, flops, sum(p.nonzeros for p in made) * batch * _BYTES_PER_NONZERO))
        applied = [elements[2 * i] for i in range(pairs + 1)]
        applied += [elements[-1]] if len(elements) % 2 == 0 else []
        downs.append(_level("down", applied, [2 * p.nonzeros for p in applied], 0.0))
        elements = made
    steps = [2 * p.nonzeros for p in elements]
    middle = ScanLevel("middle", len(elements), sum(steps), sum(steps), _fullest(elements), 0.0)
    return [*ups, *([middle] if elements else []), *reversed(downs)]


def _level(phase: str, patterns: list[JacobianPattern], flops: list[float], size: float) -> ScanLevel:
    return ScanLevel(phase, len(patterns), max(flops), sum(flops), _fullest(patterns), size)


def _fullest(patterns: list[JacobianPattern]) -> float:
    return min((p.sparsity for p in patterns), default=1.0)


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}E"
