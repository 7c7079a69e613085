"""Small graphs made by hand, with weights: what partitioning is tested on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from hypothesis import strategies as st

from outcore.graph import Block, Call, Graph, Value
from outcore.planner import CallWeight, CallWeights
from outcore.planner.partition.units import find_units
from outcore.planner.partition.weighted_units import WeightedUnits, weigh


@dataclass(frozen=True)
class Net:
    """A graph with its weights."""

    graph: Graph
    weights: CallWeights

    @property
    def pieces(self) -> WeightedUnits:
        return weigh(self.graph, self.weights, find_units(self.graph, self.weights))


def build(
    inputs: list[list[int]],
    times: list[float],
    *,
    sizes: list[int] | None = None,
    keeps: list[set[int]] | None = None,
    parameters: list[int] | None = None,
    outputs: set[int] | None = None,
    workspace: list[int] | None = None,
    update_workspace: tuple[float, float] = (0.0, 0.0),
    batch: int = 1,
) -> Net:
    """A network of calls ``c0, c1, ...``: `inputs[i]` are the calls whose results call i reads, -1 the model's input.

    `keeps[i]` says whose results call i keeps for backward (its own is i).
    """
    n = len(inputs)
    sizes = sizes or [8] * n
    readers: dict[int, list[int]] = {i: [] for i in range(-1, n)}
    for i, sources in enumerate(inputs):
        for source in sources:
            readers[source].append(i)
    ends = (outputs or set()) | {i for i in range(n) if not readers[i]}

    def value(i: int) -> str:
        return "x" if i < 0 else f"c{i}#0:out"

    values = {}
    for i in range(-1, n):
        size = 4 if i < 0 else sizes[i]
        users = tuple(f"c{j}#0" for j in readers[i])
        producer = None if i < 0 else f"c{i}#0"
        values[value(i)] = Value(value(i), (batch, size), (size, 1), "uint8", size, i >= 0, producer, users, None)
    blocks = {"": Block("", "container", "Net", "", tuple(f"c{i}" for i in range(n)), 1, 0, "net.py:1")}
    calls = {}
    for i in range(n):
        owned = (f"c{i}.weight",) if parameters and parameters[i] else ()
        blocks[f"c{i}"] = Block(f"c{i}", "module", "Layer", "", (), 1, 0, "net.py:1")
        read = tuple(value(s) for s in dict.fromkeys(inputs[i]))
        calls[f"c{i}#0"] = Call(f"c{i}#0", f"c{i}", read, (value(i),), owned, (), (), (), "net.py:1", "", True)
    graph = Graph("net.Net", True, ("x",), tuple(value(i) for i in sorted(ends)), blocks, calls, values)
    rows = {}
    for i in range(n):
        kept = {value(k): (4 if k < 0 else sizes[k]) for k in (keeps[i] if keeps else set())}
        owned = calls[f"c{i}#0"].parameters
        rows[f"c{i}#0"] = CallWeight(times[i], 2 * times[i], kept, workspace[i] if workspace else 0, owned)
    owned_bytes = {f"c{i}.weight": b for i, b in enumerate(parameters or []) if b}
    return Net(graph, CallWeights(rows, owned_bytes, 1.0, update_workspace=update_workspace))


@st.composite
def nets(draw: st.DrawFn, most: int = 9) -> Net:
    """Random networks with branches, skips, several outputs, shared memory and parameters."""
    n = draw(st.integers(2, most))
    inputs = []
    for i in range(n):
        sources = st.integers(-1, i - 1) if i else st.just(-1)
        inputs.append(draw(st.lists(sources, min_size=1, max_size=3, unique=True)))
    whole = st.integers(1, 9)
    keeps = [set(draw(st.lists(st.sampled_from([*inputs[i], i]), max_size=2))) for i in range(n)]
    return build(
        inputs,
        [float(t) for t in draw(st.lists(whole, min_size=n, max_size=n))],
        sizes=draw(st.lists(whole, min_size=n, max_size=n)),
        keeps=keeps,
        parameters=draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
        outputs=set(draw(st.lists(st.integers(0, n - 1), max_size=1))),
        workspace=draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)),
        update_workspace=draw(st.sampled_from([(0.0, 0.0), (3.0, 0.0), (0.0, 9.0), (1.0, 4.0)])),
    )


def valid_cuts(pieces: WeightedUnits, count: int) -> Iterator[list[int]]:
    """Every way to put units into so many stages without data flowing backwards or a stage staying empty."""
    n = len(pieces)

    def extend(stage_of: list[int]) -> Iterator[list[int]]:
        i = len(stage_of)
        if i == n:
            if len(set(stage_of)) == count:
                yield list(stage_of)
            return
        first = max((stage_of[u] for u in pieces.units.before[i]), default=0)
        for k in range(first, count):
            stage_of.append(k)
            yield from extend(stage_of)
            stage_of.pop()

    return extend([])


def row_cuts(n: int, count: int) -> Iterator[list[int]]:
    """Every way to cut a row of n units into so many stages."""
    for ends in product(range(1, n), repeat=count - 1):
        if all(a < b for a, b in pairwise(ends)):
            yield [sum(i >= e for e in ends) for i in range(n)]
