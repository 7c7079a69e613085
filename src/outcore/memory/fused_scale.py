"""The end of a residual block whose branch is scaled, as one operation: layer scale, stochastic depth and the sum.

In ConvNeXt, CaiT and their kind a branch is multiplied by a parameter per channel, then in training by a random number
per image, then added to what the block was given. Torch makes a pass over memory of each, under autocast in single
precision although the branch is in half of it, and in backward the scale's gradient takes a product that is written and
read again. Bytes a number, the branch in bf16:

                 torch                                                          here
    forward      read 2, write 4; read 4, write 4; read 8, write 4              read 6, write 4
    backward     read 4, write 4; read 4, write 4; read 4, write 2;             read 6, write 2
                 read 6, write 4; read 4

What is kept is what was kept before: the branch. The products hand on what they are given, and the sum does it all, so
the network is rewritten (`outcore.memory.rewriting`): between the branch and the sum there is no memory any more. The
scale's gradient is summed in another order than torch's, so results must be allowed to be *reassociated*. Gradients of
gradients do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outcore.cost.costs import CallCost, Costs, Gradient, Saved
from outcore.graph import Graph
from outcore.graph.recording import Ref
from outcore.machine.clock import Timing
from outcore.memory.norm_choice import RATE, ahead
from outcore.memory.renorm import dense
from outcore.memory.rewriting import Rewriting
from outcore.memory.rows import parts_bytes
from outcore.memory.scaled_branches import Scaled, scaled_branches

__all__ = ["Scales", "rewrite", "scales_of", "worth_it"]

Scales = Mapping[str, Scaled]
"""By the call of the sum."""
_DEVICES = {"cuda"}
_ISSUE = 2.0
"""Host time over that of torch's products and sum: an estimate."""
_NOTHING = Timing.of([0.0])


def scales_of(graph: Graph, model: nn.Module, costs: Costs, device: torch.device) -> dict[str, Scaled]:
    """The sums whose branch is scaled, where that can be one operation."""
    if device.type not in _DEVICES:
        return {}

    def trained(row: Scaled) -> bool:
        ends = ((row.products[0], row.input), (row.call, row.branch))
        return all(any(g.of == value for g in costs.calls[call].gradients) for call, value in ends)

    return {name: row for name, row in scaled_branches(graph, model).items() if trained(row)}


def worth_it(scales: Scales, graph: Graph, costs: Costs, rate: float, *, issued: bool) -> dict[str, Scaled]:
    """Those that save the device most, as long as the host keeps ahead."""
    fused = Rewriting(graph, costs)
    saved, added = {}, {}
    for name, row in scales.items():
        calls = (name, *row.products)
        _costs(fused, row, rate)
        saved[name] = sum(costs.calls[c].time_s for c in calls) - fused.rows[name].time_s
        added[name] = _dispatch_s(fused.rows[name]) - sum(_dispatch_s(costs.calls[c]) for c in calls)
    taken = ahead(saved, added, costs, issued=issued)
    return {name: row for name, row in scales.items() if name in taken}


def _dispatch_s(cost: CallCost) -> float:
    return sum(t.dispatch_s for t in (cost.forward, cost.backward) if t is not None)


def rewrite(to: Rewriting, scales: Scales, rate: float) -> None:
    """Have scaled branches as one operation with their sums in a network."""
    assert to.graph.executable is not None
    steps = {s.name: s for s in to.graph.executable[1].steps if s.kind != "guard"}
    for name, row in scales.items():
        _costs(to, row, rate)
        (out,) = to.calls[name].outputs
        if (before := to.values[out].alias_of) is not None:
            to.renamed(before, out)
        x = to.values[row.input]
        for value in row.between:
            to.values[value] = replace(to.values[value], alias_of=x.alias_of or x.name, dtype=x.dtype, bytes=x.bytes)
        given = row.input
        for product in row.products:
            call = to.calls[product]
            given = given if product == row.products[0] else next(v for v in call.inputs if v != row.noise)
            to.calls[product] = replace(call, inputs=(given,), parameters=(), mutates=())
            to.steps[product] = replace(steps[product], target=_as_it_is, args=(Ref("value", given),))
        more = () if row.noise is None else (row.noise,)
        to.calls[name] = replace(
            to.calls[name], inputs=(row.branch, row.residual, *more), parameters=(row.scale,), mutates=()
        )
        noise = None if row.noise is None else Ref("value", row.noise)
        args = (Ref("value", row.branch), Ref("state", row.scale), noise, Ref("value", row.residual))
        kind = getattr(torch, to.values[out].dtype)
        to.steps[name] = replace(steps[name], target=_ScaledSum(row.dim, kind), args=args, kwargs={})
        if row.noise is not None:
            drawn = to.values[row.noise]
            consumers = tuple(name if c == row.products[-1] else c for c in drawn.consumers)
            to.values[row.noise] = replace(drawn, consumers=consumers)


def _costs(to: Rewriting, row: Scaled, rate: float) -> None:
    """What products and sum take then."""
    graph, cost, product = to.graph, to.rows[row.call], to.rows[row.products[0]]
    (out,), x = graph.calls[row.call].outputs, to.values[row.input]
    size, rows = graph.values[out].bytes, RATE * rate
    old = [to.rows[name] for name in (*row.products, row.call)]
    kept = [Saved(x.alias_of or x.name, "value", to.values[x.alias_of or x.name].bytes)]
    if row.noise is not None:
        noise = graph.values[row.noise].alias_of or row.noise
        kept.append(Saved(noise, "value", graph.values[noise].bytes))
    kept += [s for s in product.saved if s.kind == "parameter"]
    width = graph.values[row.branch].shape[row.dim]
    for name in row.products:
        of = to.rows[name]
        handed = next(g for g in of.gradients if g.of in (row.input, *row.between))
        gradient = Gradient(handed.of, 0, graph.calls[name].outputs[0])
        to.rows[name] = CallCost(of.call, of.block, of.type, _NOTHING, _NOTHING, of.time_source, gradients=(gradient,))
    to.rows[row.call] = replace(
        cost,
        forward=_timed([c.forward for c in old], (x.bytes + 2 * size) / rows),
        backward=_timed([c.backward for c in old], (2 * x.bytes + size) / rows),
        outputs={out: size},
        output_bytes=size,
        parameter_bytes=product.parameter_bytes,
        saved=tuple(kept),
        gradients=(
            Gradient(row.branch, x.bytes),
            *(Gradient(g.of, 0, out) for g in cost.gradients if g.of == row.residual),
            *(g for g in product.gradients if g.of == row.scale),
        ),
        arriving={},
        workspace_forward_bytes=0,
        workspace_backward_bytes=parts_bytes(math.prod(x.shape), width, 1),
    )


def _timed(before: list[Timing | None], seconds: float) -> Timing | None:
    """The time of a pass instead of several; on a CPU it is what they took."""
    known = [t for t in before if t is not None]
    if not known:
        return None
    took, issue = sum(t.median_s for t in known), sum(t.dispatch_s for t in known)
    return Timing.of([min(took, seconds) if issue else took], dispatch_s=_ISSUE * issue)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class _ScaledSum:
    """The sum of a residual and a branch that is scaled."""

    def __init__(self, dim: int, kind: torch.dtype) -> None:
        self.dim, self.kind = dim, kind

    def __call__(
        self, x: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        width, numbers = x.shape[self.dim], x.numel()
        whole = dense(x) and x.stride() == residual.stride() and x.stride(self.dim) == 1 and scale.numel() == width
        outermost = noise is None or noise.numel() == 1 or x.stride(0) * noise.numel() == numbers
        if not whole or not outermost or not numbers:
            by = scale.reshape([width if i == self.dim else 1 for i in range(x.dim())])
            return (residual + (x * by if noise is None else x * by * noise)).to(self.kind)
        result: torch.Tensor = _Sum.apply(x, scale, noise, residual, self.dim, self.kind)  # type: ignore[no-untyped-call]
        return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor,
        noise: torch.Tensor | None,
        residual: torch.Tensor,
        dim: int,
        kind: torch.dtype,
    ) -> torch.Tensor:
        """All in one pass."""
        ctx.save_for_backward(x, scale, noise)
        ctx.dim, ctx.kind = dim, residual.dtype
        if x.is_cuda:
            from outcore.memory.scale_triton_kernels import summed

            out = torch.empty_like(x, dtype=kind)
            summed(x, scale, noise, residual, out)
            return out
        by = _factor(x, scale, noise, dim)
        return torch.empty_like(x, dtype=kind).copy_(residual.to(by.dtype) + x.to(by.dtype) * by)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Of branch and scale in one pass; the residual's is handed on."""
        x, scale, noise = ctx.saved_tensors
        g = gradient
        if g.stride() != x.stride():
            g = torch.empty_like(x, dtype=g.dtype).copy_(g)
        if x.is_cuda:
            from outcore.memory.scale_triton_kernels import gradients

            back, total = gradients(g, x, scale, noise, sums=ctx.needs_input_grad[1])
        else:
            by = _factor(x, scale, noise, ctx.dim)
            back = torch.empty_like(x).copy_(g.to(by.dtype) * by)
            along = g.to(by.dtype) * x.to(by.dtype)
            along = along if noise is None else along * noise.to(by.dtype)
            total = along.sum([i for i in range(x.dim()) if i != ctx.dim])
        of_scale = None if total is None else total.to(scale.dtype).view(scale.shape)
        return back, of_scale, None, gradient.to(ctx.kind), None, None


def _factor(x: torch.Tensor, scale: torch.Tensor, noise: torch.Tensor | None, dim: int) -> torch.Tensor:
    """What every number of a branch is multiplied by."""
    precision = torch.promote_types(x.dtype, torch.float32)
    by = scale.detach().to(precision).reshape([x.shape[dim] if i == dim else 1 for i in range(x.dim())])
    return by if noise is None else by * noise.to(precision)
