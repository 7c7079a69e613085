"""The end of a residual block whose branch is scaled, as one operation: layer scale, stochastic depth and the sum.

In ConvNeXt, CaiT and similar networks a branch is multiplied by a parameter per channel, then in training by a random
number per image, then added to the input of the block. Torch makes a pass over memory of each, under autocast in single
precision although the branch is in half of it, and in backward the scale's gradient takes a product that is written and
read again. Bytes per element, the branch in bf16:

                 torch                                                          here
    forward      read 2, write 4; read 4, write 4; read 8, write 4              read 6, write 4
    backward     read 4, write 4; read 4, write 4; read 4, write 2;             read 6, write 2
                 read 6, write 4; read 4

Where a layer behind the sum casts it, as the next block's first convolution does, the copy is written in the same pass,
and its gradient is added in backward's: 2 bytes more instead of 6 forward, 6 instead of 18 backward.

What is saved is what was saved before: the branch. The products return their input as it is, and the sum does all of
it, so the network is rewritten (`outcore.memory.op_fusion.rewrite`): between the branch and the sum there is no buffer
any more. The scale's gradient is summed in another order than torch's, so results must be allowed to be *reassociated*.
Gradients of gradients do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from outcore.cost.costs import CallCost, Costs, Gradient
from outcore.cost.saved import Saved
from outcore.graph import Graph
from outcore.graph.record.recording import Ref, Step
from outcore.kernels.row_blocks import parts_bytes
from outcore.machine.clock import TimedRuns
from outcore.memory.op_fusion.layer_scale_match import ScaledBranch, scaled_branches
from outcore.memory.op_fusion.layer_scale_sum import LayerScaleSum
from outcore.memory.op_fusion.pattern import ReaderPatterns
from outcore.memory.op_fusion.profitability import RATE, ahead, less
from outcore.memory.op_fusion.rewrite import Rewrite, as_it_is, copy_of, written_later

Scales = Mapping[str, ScaledBranch]
"""By the call of the sum."""
_DEVICES = {"cuda"}
_ISSUE = 2.0
"""Host time over that of torch's products and sum: an estimate."""
_NOTHING = TimedRuns.of([0.0])


def scales_of(graph: Graph, model: nn.Module, costs: Costs, device: torch.device) -> dict[str, ScaledBranch]:
    """The sums of a scaled branch that can be one operation."""
    if device.type not in _DEVICES:
        return {}

    def trained(row: ScaledBranch) -> bool:
        ends = ((row.products[0], row.input), (row.call, row.branch))
        return all(any(g.of == value for g in costs.calls[call].gradients) for call, value in ends)

    after = ReaderPatterns(graph, model)
    rows = {name: row for name, row in scaled_branches(graph, model).items() if trained(row)}
    return {name: _with_copy(row, after, costs) for name, row in rows.items()}


def _with_copy(row: ScaledBranch, after: ReaderPatterns, costs: Costs) -> ScaledBranch:
    """The branch with the cast copy that a layer would make of the sum, if one does and the sum is not overwritten
    before."""
    (out,) = after.graph.calls[row.call].outputs
    found = [
        (name, copy)
        for name in after.readers(out)
        if (copy := copy_of(out, costs.calls[name], after.graph)) is not None and not after.hooked(name)
    ]
    if len(found) != 1 or written_later(after.graph, out, row.call):
        return row
    ((name, copy),) = found
    assert copy.derived is not None
    return replace(row, reader=name, copy=copy.of, copy_kind=copy.derived.dtype)


def worth_it(scales: Scales, graph: Graph, costs: Costs, rate: float, *, issued: bool) -> dict[str, ScaledBranch]:
    """Those that save the device most, as long as the host keeps ahead."""
    fused = Rewrite(graph, costs)
    saved, added = {}, {}
    for name, row in scales.items():
        calls = (name, *row.products)
        touched = (*calls, row.reader) if row.reader else calls
        before = sum(fused.rows[c].time_s for c in touched)
        _costs(fused, row, rate)
        saved[name] = before - sum(fused.rows[c].time_s for c in touched)
        added[name] = fused.rows[name].dispatch_s - sum(costs.calls[c].dispatch_s for c in calls)
    taken = ahead(saved, added, costs, issued=issued)
    return {name: row for name, row in scales.items() if name in taken}


def rewrite(to: Rewrite, scales: Scales, rate: float) -> None:
    """Replace scaled branches and their sums by one operation each in a network."""
    steps = to.graph.recording.calls()
    for name, row in scales.items():
        _costs(to, row, rate)
        (out,) = to.calls[name].outputs
        if (before := to.values[out].alias_of) is not None:
            to.renamed(before, out)
        x = to.values[row.input]
        for value in row.between:
            to.values[value] = replace(to.values[value], alias_of=x.base, dtype=x.dtype, bytes=x.bytes)
        given = row.input
        for product in row.products:
            call = to.calls[product]
            given = given if product == row.products[0] else next(v for v in call.inputs if v != row.noise)
            to.calls[product] = replace(call, inputs=(given,), parameters=(), mutates=())
            to.steps[product] = replace(steps[product], target=as_it_is, args=(Ref("value", given),))
        more = () if row.noise is None else (row.noise,)
        to.calls[name] = replace(
            to.calls[name], inputs=(row.branch, row.residual, *more), parameters=(row.scale,), mutates=()
        )
        noise = None if row.noise is None else Ref("value", row.noise)
        args = (Ref("value", row.branch), Ref("state", row.scale), noise, Ref("value", row.residual))
        kinds = [getattr(torch, kind) for kind in (to.values[out].dtype, row.copy_kind) if kind]
        to.steps[name] = replace(steps[name], target=LayerScaleSum(row.dim, *kinds), args=args, kwargs={})
        if row.reader:
            _hand_copy(to, row, steps[row.reader])
        if row.noise is not None:
            drawn = to.values[row.noise]
            consumers = tuple(name if c == row.products[-1] else c for c in drawn.consumers)
            to.values[row.noise] = replace(drawn, consumers=consumers)


def _hand_copy(to: Rewrite, row: ScaledBranch, reader: Step) -> None:
    """Make the copy a second output of the sum, which its reader reads instead of the sum."""
    (out,) = to.calls[row.call].outputs
    value, size = to.values[out], to.rows[row.call].outputs[row.copy]
    to.values[row.copy] = replace(
        value, name=row.copy, dtype=row.copy_kind, bytes=size, consumers=(row.reader,), alias_of=None
    )
    to.values[out] = replace(value, consumers=tuple(c for c in value.consumers if c != row.reader))
    to.calls[row.call] = replace(to.calls[row.call], outputs=(out, row.copy))
    to.steps[row.call] = replace(to.steps[row.call], outputs=(out, row.copy))
    call = to.calls[row.reader]
    to.calls[row.reader] = replace(call, inputs=tuple(row.copy if v == out else v for v in call.inputs))
    step = to.steps.get(row.reader, reader)
    to.steps[row.reader] = replace(
        step, args=tuple(Ref("value", row.copy) if a == Ref("value", out) else a for a in step.args)
    )


def _costs(to: Rewrite, row: ScaledBranch, rate: float) -> None:
    """Change the costs of the products and the sum."""
    graph, cost, product = to.graph, to.rows[row.call], to.rows[row.products[0]]
    (out,), x = graph.calls[row.call].outputs, to.values[row.input]
    size, rows = graph.values[out].bytes, RATE * rate
    old = [to.rows[name] for name in (*row.products, row.call)]
    kept = [Saved(x.base, "value", to.values[x.base].bytes)]
    if row.noise is not None:
        noise = graph.values[row.noise].base
        kept.append(Saved(noise, "value", graph.values[noise].bytes))
    kept += [s for s in product.saved if s.kind == "parameter"]
    width = graph.values[row.branch].shape[row.dim]
    for name in row.products:
        of = to.rows[name]
        given = next(g.of for g in of.gradients if g.of in (row.input, *row.between))
        gradient = Gradient(given, 0, graph.calls[name].outputs[0])
        to.rows[name] = CallCost(of.call, of.block, of.type, _NOTHING, _NOTHING, of.time_source, gradients=(gradient,))
    copied = math.prod(x.shape) * 2 if row.reader else 0
    handed = Gradient(row.residual, size) if copied else Gradient(row.residual, 0, out)
    to.rows[row.call] = replace(
        cost,
        forward=_timed([c.forward for c in old], (x.bytes + 2 * size + copied) / rows),
        backward=_timed([c.backward for c in old], (2 * x.bytes + size + (copied + size if copied else 0)) / rows),
        outputs={out: size} | ({row.copy: copied} if copied else {}),
        output_bytes=size + copied,
        parameter_bytes=product.parameter_bytes,
        saved=tuple(kept),
        gradients=(
            Gradient(row.branch, x.bytes),
            *(handed for g in cost.gradients if g.of == row.residual),
            *(g for g in product.gradients if g.of == row.scale),
        ),
        arriving={},
        workspace_forward_bytes=0,
        workspace_backward_bytes=parts_bytes(math.prod(x.shape), width, 1),
    )
    if row.reader:
        of = to.rows[row.reader]
        issued = of.forward is not None and of.forward.dispatch_s
        to.rows[row.reader] = replace(
            of,
            saved=tuple(Saved(row.copy, "value", copied) if s.of == row.copy else s for s in of.saved),
            gradients=tuple(Gradient(row.copy, copied) if g.of == out else g for g in of.gradients),
            forward=less(of.forward, (size + copied) / rows if issued else 0.0),
            backward=less(of.backward, (size + copied) / rows if issued else 0.0),
        )


def _timed(before: list[TimedRuns | None], seconds: float) -> TimedRuns | None:
    """The time of one pass instead of several; on a CPU it is what they took."""
    known = [t for t in before if t is not None]
    if not known:
        return None
    took, issue = sum(t.median_s for t in known), sum(t.dispatch_s for t in known)
    return TimedRuns.of([min(took, seconds) if issue else took], dispatch_s=_ISSUE * issue)
