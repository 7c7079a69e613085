"""Graphs for the tests of the pictures: made by hand, or drawn at random, without recording a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from outcore.graph.graph import Graph
from outcore.graph.parts import ROOT, Block, Call, Value, ancestors, parent


class Maker:
    """Builds a graph call by call, in the order of execution."""

    def __init__(self, inputs: Sequence[str] = ("x",), shape: Sequence[int] = (2, 3, 32, 32)) -> None:
        self.blocks = {ROOT: Block(ROOT, "container", "Net", "", (), 1, 0, "net.py:1")}
        self.calls: dict[str, Call] = {}
        self.values: dict[str, Value] = {}
        self.inputs = tuple(inputs)
        for name in inputs:
            self._value(name, None, shape)

    def call(
        self,
        path: str,
        *reads: str,
        type: str = "Conv2d",
        detail: str = "",
        parameters: int = 0,
        shape: Sequence[int] = (2, 8, 16, 16),
        outputs: int = 1,
    ) -> str:
        """Call a leaf block; return the name of the (first) value it makes."""
        for p in (*ancestors(path), path):
            if p not in self.blocks:
                self.blocks[p] = Block(p, "container", "Part", "", (), 1, 0, "net.py:2")
                above = self.blocks[parent(p)]
                self.blocks[above.path] = replace(above, children=(*above.children, p))
        number = sum(call.block == path for call in self.calls.values())
        kind = "function" if path.endswith("()") else "module"
        name = f"{path}#{number}"
        self.blocks[path] = Block(path, kind, type, detail, (), number + 1, parameters, "net.py:3")
        for p in (ROOT, *ancestors(path)):
            self.blocks[p] = replace(self.blocks[p], parameters=self.blocks[p].parameters + parameters)
        made = tuple(f"{name}:{i}" if outputs > 1 else f"{name}:out" for i in range(outputs))
        scope = tuple(f"{p}#0" for p in ancestors(path))
        self.calls[name] = Call(name, path, reads, made, (), (), (), scope, "net.py:3", detail, True)
        for value in made:
            self._value(value, name, shape)
        for value in reads:
            self.values[value] = replace(self.values[value], consumers=(*self.values[value].consumers, name))
        return made[0]

    def graph(self, *outputs: str) -> Graph:
        """The finished graph."""
        return Graph("net.Net", True, self.inputs, outputs, self.blocks, self.calls, self.values)

    def _value(self, name: str, producer: str | None, shape: Sequence[int]) -> None:
        size = 4 * math.prod(shape)
        self.values[name] = Value(name, tuple(shape), (), "float32", size, True, producer, (), None)


def unet(levels: int = 4) -> Graph:
    """Encoders, decoders and the skips between them."""
    make, value = Maker(), "x"
    kept = []
    for i in range(levels):
        value = make.call(f"encoder{i}.conv", value, parameters=100)
        kept.append(value)
    for i in reversed(range(levels - 1)):
        value = make.call(f"decoder{i}.up", value, type="ConvTranspose2d", parameters=50)
        value = make.call(f"decoder{i}.cat()", value, kept[i], type="cat")
    return make.graph(make.call("head", value))


def branches() -> Graph:
    """Four branches of different lengths that are concatenated, as in Inception."""
    make = Maker()
    start = make.call("stem", "x")
    ends = []
    for i, length in enumerate((1, 2, 3, 2)):
        value = start
        for j in range(length):
            value = make.call(f"branch{i}_{j}", value)
        ends.append(value)
    return make.graph(make.call("cat()", *ends, type="cat"))


def stack(repeats: int = 5, *, mask: bool = False, two_back: bool = False) -> Graph:
    """Identical blocks one after the other, perhaps with a common mask or reading the last two values."""
    make = Maker(("x", "mask") if mask else ("x",))
    last = before = make.call("stem", "x")
    for i in range(repeats):
        a = make.call(f"layers.{i}.conv", last, detail="8, 8", parameters=64)
        extra = [before] if two_back else ["mask"] if mask else []
        b = make.call(f"layers.{i}.add()", a, *extra, type="add")
        last, before = b, last
    return make.graph(make.call("head", last, parameters=10))


@st.composite
def random_graphs(draw: st.DrawFn, largest: int = 16) -> Graph:
    """Leaves in nested containers, each reading some earlier values."""
    make = Maker(("x", "y")[: draw(st.integers(1, 2))])
    values = list(make.inputs)
    path: list[str] = []
    for i in range(draw(st.integers(1, largest))):
        for _ in range(draw(st.integers(0, 2))):
            if path and draw(st.booleans()):
                path.pop()
        if len(path) < 3 and draw(st.integers(0, 2)) == 0:
            path.append(f"part{i}")
        near = values[-4:] if draw(st.booleans()) else values
        reads = draw(st.lists(st.sampled_from(near), max_size=3, unique=True))
        outputs = draw(st.sampled_from([1, 1, 1, 2]))
        first = make.call(".".join([*path, f"leaf{i}"]), *reads, outputs=outputs, parameters=i)
        values += [v for v in make.values if v.startswith(first.rpartition(":")[0] + ":")]
    unread = [v for v in values if not make.values[v].consumers and v not in make.inputs]
    return make.graph(*unread[-3:])
