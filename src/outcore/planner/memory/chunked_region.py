"""Where a last layer and its loss can run in chunks of rows, and what a step takes then.

A region begins with a product with a weight (the logits of a language model) and goes on with operations that treat
every row by itself, until sums over all rows, or a few numbers of each, are left. Nothing else may read what is in
between; the model may return it. Run in chunks (`outcore.memory.chunked_loss`), none of it is ever whole: a step has
a chunk, and from the sum on the gradients of the layer's operands, which are made in the same chunk:

    plain    | logits ---- log-probabilities ---- their gradient |        rows x columns, each
    chunks   | chunk, chunk, … | gradient of the layer's input and weight |

The times are those of the plain calls, all of them in forward, and for every further chunk that of adding to the
gradient of the weight. So more chunks take less memory and more time, and the planner may choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import nn

from outcore.cost.costs import CallCost, Costs
from outcore.graph import Call, Graph
from outcore.graph.record.keys import hooks_of
from outcore.machine.clock import TimedRuns
from outcore.planner.memory.row_wise import HEADS, MODULES, PER_ROW, ROW_WISE, SUMS

_SLOWER = 0.02
"""Share of the region's own time that adding up gradients may take before fewer chunks are preferred."""
_MOST_CHUNKS = 256
_HALF = ("float16", "bfloat16")
_LEAST_BYTES = 1 << 18
"""A result that is smaller is not worth it."""


@dataclass(frozen=True)
class ChunkedRegion:
    """A last layer, what is made of its result row by row, and the chunks it runs in."""

    head: str
    """The call of the layer."""
    inside: tuple[str, ...]
    """The calls that treat its rows, in order."""
    ends: tuple[str, ...]
    """The calls that are left with few numbers; none where the loss comes after the model."""
    rows: int
    row_bytes: int
    """What a row takes for a moment, in all these calls together."""
    operand_bytes: int
    """Gradients of the layer's input and parameters."""
    weight_bytes: int
    wide_bytes: int
    """In half precision: a copy of the weight, and its gradient in float32 twice, as sum and as summand."""
    seconds: float
    """Of the region, forward and backward."""
    chunks: int = 1

    @property
    def rows_per_chunk(self) -> int:
        """How many rows one chunk has."""
        return max(1, -(-self.rows // self.chunks))

    @property
    def chunk_bytes(self) -> int:
        """Bytes that one chunk of rows takes."""
        return self.rows_per_chunk * self.row_bytes

    def further_s(self, rate: float) -> float:
        """What all chunks but the first take: the gradient of the weight is read and written again."""
        return (self.chunks - 1) * 3 * self.weight_bytes / rate

    def candidates(self, rate: float) -> list[ChunkedRegion]:
        """Numbers of chunks to try: as many as hardly cost anything, then more and more."""
        first = 1 + int(_SLOWER * self.seconds * rate / max(1, 3 * self.weight_bytes))
        first = max(8, min(first, _MOST_CHUNKS, self.rows))
        tried = sorted({min(self.rows, n) for n in (first, 4 * first, 16 * first)})
        return [replace(self, chunks=n) for n in tried]

    def applied(self, graph: Graph, costs: Costs, rate: float) -> tuple[Graph, Costs]:
        """The network and its costs with the region in chunks."""
        made = {v for name in (self.head, *self.inside) for v in graph.calls[name].outputs}
        values = {name: replace(value, bytes=0) if name in made else value for name, value in graph.values.items()}
        rows = dict(costs.calls)
        for name in (self.head, *self.inside, *self.ends):
            rows[name] = self._row(name, graph.calls[name], rows[name], made, rate)
        block = graph.calls[self.head].block  # what it saves stays: the lazy result holds it too
        blocks = {**graph.blocks, block: replace(graph.blocks[block], kind="opaque")}
        return replace(graph, values=values, blocks=blocks), replace(costs, calls=rows)

    def _row(self, name: str, call: Call, cost: CallCost, made: set[str], rate: float) -> CallCost:
        """The cost of one call of the region."""
        nothing = TimedRuns(0.0, 0.0, 0.0, 0.0, 1)
        last = self.ends[-1] if self.ends else self.head
        seconds = self.seconds + self.further_s(rate) if name == last else 0.0
        kept = tuple(s for s in cost.saved if s.kind != "derived" and s.of not in made)
        at_head = name == self.head
        held = self.operand_bytes + self.wide_bytes if name == last else 0
        return replace(
            cost,
            forward=replace(nothing, min_s=seconds, median_s=seconds, max_s=seconds, mean_s=seconds),
            backward=nothing if cost.backward is not None else None,
            outputs={v: 0 if v in made else size for v, size in cost.outputs.items()},
            output_bytes=sum(size for v, size in cost.outputs.items() if v not in made),
            saved=kept,
            gradients=cost.gradients if at_head else tuple(replace(g, bytes=0) for g in cost.gradients),
            workspace_forward_bytes=self.chunk_bytes + held if name == last else 0,
            workspace_backward_bytes=held if not at_head else 0,
        )

    def __str__(self) -> str:
        return f"{self.head} and its loss in {self.chunks} chunks of {self.rows_per_chunk} rows"


def find_region(graph: Graph, costs: Costs, *, loss_bytes: int = 0, loss_after: bool = False) -> ChunkedRegion | None:
    """The region with the largest result, if there is one that is worth it.

    Args:
        graph: the network.
        costs: of its calls.
        loss_bytes: what the loss holds beside the output.
        loss_after: whether the user's own loss treats rows of the output one by one, so that the last layer may be what
            the network ends with.
    """
    found = [r for call in graph.calls.values() if (r := _region(graph, costs, call, loss_bytes, loss_after))]
    return max(found, key=lambda region: region.rows * region.row_bytes, default=None)


def _region(graph: Graph, costs: Costs, head: Call, loss_bytes: int, loss_after: bool) -> ChunkedRegion | None:
    """The region that begins with a call."""
    if not _is_head(graph, head) or not head.grad:
        return None
    result = graph.values[head.outputs[0]]
    if result.bytes < _LEAST_BYTES or not result.requires_grad:
        return None
    inside, ends, summed = [], [], False
    values, waiting = {result.name}, [result.name]
    while waiting:
        for name in graph.values[waiting.pop()].consumers:
            call = graph.calls[name]
            kind = kind_of(graph, call)
            if call.mutates or name in inside or name in ends:
                if call.mutates:
                    return None
                continue
            if kind in ROW_WISE and set(call.inputs) <= values:
                inside.append(name)
                values.update(call.outputs)
                waiting += call.outputs
            elif kind in SUMS | PER_ROW:
                ends.append(name)
                summed |= kind in SUMS
            else:
                return None
    returned = values.intersection(graph.outputs)
    if not summed and not (loss_after and returned and not ends):
        return None
    order = {name: i for i, name in enumerate(graph.calls)}
    inside, ends = sorted(inside, key=order.__getitem__), sorted(ends, key=order.__getitem__)
    rows = math.prod(result.shape[:-1])
    calls = [costs.calls[name] for name in (head.name, *inside, *ends)]
    held = sum(s.bytes for c in calls[1:] for s in c.saved if s.kind == "derived")
    held += sum(size for c in calls for v, size in c.outputs.items() if v in values)
    held += sum(g.bytes for c in calls[1:] for g in c.gradients if g.of in values)
    held += max(max(c.workspace_forward_bytes, c.workspace_backward_bytes) for c in calls)
    held += (loss_bytes + result.bytes) if not ends else 0
    gradients = calls[0].gradients
    weight_bytes = sum(g.bytes for g in gradients if g.of in costs.parameters or g.of not in graph.values)
    return ChunkedRegion(
        head.name,
        tuple(inside),
        tuple(ends),
        rows,
        -(-held // rows),
        sum(g.bytes for g in gradients),
        max(1, weight_bytes),
        10 * result.shape[-1] * graph.values[head.inputs[0]].shape[-1] if result.dtype in _HALF else 0,
        sum(c.time_s for c in calls),
    )


def kind_of(graph: Graph, call: Call) -> str:
    """The function that a call is, if it is a layer that calls one."""
    kind = graph.blocks[call.block].type
    return MODULES.get(kind, kind)


def _is_head(graph: Graph, call: Call) -> bool:
    """Whether a call is a product with a weight, of a layer without hooks."""
    block = graph.blocks[call.block]
    if block.type not in HEADS or block.kind == "opaque" or len(call.outputs) != 1 or call.mutates:
        return False
    shape = graph.values[call.outputs[0]].shape
    if len(shape) < 2 or shape[-1] < 2:
        return False
    if block.kind != "module":
        return len(call.inputs) == 1 and bool(call.parameters)
    module = graph.module.model.get_submodule(call.block)
    return type(module) is nn.Linear and not hooks_of(module) and len(call.inputs) == 1
