"""Layer norm as one pass over memory each way, in the types that its neighbours have.

Torch gives a row to a block of threads, and rows of an image are short. Under autocast it also computes in copies: the
input is cast to single precision, and saved so; what is written in single precision is cast again by the layer behind
it, which saves that. Here the kernel casts, in registers:

                 torch, between a convolution and a linear layer in bf16        here
    forward      read 2, write 4; read 4, write 4; read 4, write 2 bytes        read 2, write 2
    backward     read 2, write 4; read 8; read 8, write 4; read 4, write 2      read 4, write 2
    saved        4 and 2 bytes per element                                      2 and 2, the first there anyway

The other type is written only where nothing needs the values in single precision: every reader, directly or through
views, is a layer that would cast them, and no hook looks at them. Statistics are computed again in backward from the
input. Sums are taken in another order than torch's, so results must be allowed to be *reassociated*. Gradients of
gradients do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from outcore.cost.costs import Costs
from outcore.cost.saved import Saved
from outcore.graph import Graph
from outcore.graph.record.recording import Ref, Step
from outcore.kernels.row_blocks import parts_bytes
from outcore.machine.clock import TimedRuns
from outcore.memory.op_fusion.pattern import ReaderPatterns, hooked
from outcore.memory.op_fusion.profitability import RATE, ahead, less
from outcore.memory.op_fusion.rewrite import Rewrite, copy_of, written_later
from outcore.ops.registry import names


@dataclass(frozen=True)
class FusedLayerNorm:
    """A layer norm that is one pass."""

    call: str
    input: str
    width: int
    """Elements of a row."""
    kind: str
    """The type that it writes."""
    casting: tuple[str, ...] = ()
    """The calls that would have cast its output."""
    gone: frozenset[str] = frozenset()
    """Buffers that are no longer made: copies in other types, statistics."""


LayerNorms = Mapping[str, FusedLayerNorm]
"""By call."""
_DEVICES = {"cuda"}
_WIDEST = 8192
"""The most elements of a row, which one program of the kernel holds."""
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_ISSUE = 3.0
"""Host time over that of torch's layer norm: an estimate."""


def layer_norms_of(graph: Graph, model: nn.Module, costs: Costs, device: torch.device) -> dict[str, FusedLayerNorm]:
    """The layer norms that can be one pass, and the type that each would write."""
    if device.type not in _DEVICES:
        return {}
    after = ReaderPatterns(graph, model)
    found = {}
    for name, call in graph.calls.items():
        if graph.blocks[call.block].type not in names("layer_norm") or len(call.outputs) != 1:
            continue
        width = _width(after.steps[name], model)
        x = graph.values[call.inputs[0]] if call.inputs else None
        if x is None or not 0 < width <= _WIDEST or not costs.calls[name].gradients or not call.grad:
            continue
        out = graph.values[call.outputs[0]]
        known = out.stride == _contiguous(out.shape) and x.dtype in _ITEM_BYTES and out.dtype in _ITEM_BYTES
        if known and x.bytes and not written_later(graph, x.name, name):
            kind, casting = _cast(after, costs, out.name)
            copies = {c.of for reader in casting if (c := copy_of(out.name, costs.calls[reader], graph)) is not None}
            own = {saved.of for saved in costs.calls[name].saved if saved.kind == "derived"}
            found[name] = FusedLayerNorm(name, x.name, width, kind or out.dtype, casting, frozenset(copies | own))
    return found


def _width(step: Step, model: nn.Module) -> int:
    """The elements that a layer norm normalises over; 0 if a step is no known layer norm."""
    if not step.args or not isinstance(step.args[0], Ref) or step.args[0].kind != "value":
        return 0
    if step.kind == "function":
        shape = step.args[1] if len(step.args) > 1 else step.kwargs.get("normalized_shape", ())
        return math.prod(shape) if step.target is F.layer_norm and shape else 0
    module: Any = model.get_submodule(step.target)
    plain = type(module) is nn.LayerNorm and len(step.args) == 1 and not step.kwargs and not hooked(module)
    return math.prod(module.normalized_shape) if plain else 0


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _cast(after: ReaderPatterns, costs: Costs, out: str) -> tuple[str, tuple[str, ...]]:
    """The type to which all readers of a value would cast it, and these readers; empty if there is any other reader."""
    readers = after.behind_views(out)
    copies = [copy_of(out, costs.calls[name], after.graph) for name in readers]
    kinds = {"" if copy is None or copy.derived is None else copy.derived.dtype for copy in copies}
    if len(kinds) != 1 or kinds == {""} or any(after.hooked(name) for name in readers):
        return "", ()
    return kinds.pop(), tuple(readers)


def worth_it(norms: LayerNorms, graph: Graph, costs: Costs, rate: float, *, issued: bool) -> dict[str, FusedLayerNorm]:
    """Those that save the device most, as long as the host keeps ahead."""
    fused = Rewrite(graph, costs)
    saved, added = {}, {}
    for name, norm in norms.items():
        calls = (name, *norm.casting)
        before = sum(costs.calls[call].time_s for call in calls)
        _costs(fused, norm, rate)
        saved[name] = before - sum(fused.rows[call].time_s for call in calls)
        added[name] = (1 - 1 / _ISSUE) * fused.rows[name].dispatch_s
    taken = ahead(saved, added, costs, issued=issued)
    return {name: norm for name, norm in norms.items() if name in taken}


def rewrite(to: Rewrite, norms: LayerNorms, model: nn.Module, rate: float) -> None:
    """Replace layer norms by their one-pass form in a network."""
    steps = to.graph.recording.calls()
    for name, norm in norms.items():
        _costs(to, norm, rate)
        step, out = steps[name], to.graph.calls[name].outputs[0]
        module = model.get_submodule(step.target) if step.kind == "module" else None
        to.steps[name] = replace(step, kind="function", target=_LayerNorm(module, getattr(torch, norm.kind)))
        for value in to.sharing(out):
            known = to.values[value]
            size = math.prod(known.shape) * _ITEM_BYTES[norm.kind]
            to.values[value] = replace(known, dtype=norm.kind, bytes=size)


def _costs(to: Rewrite, norm: FusedLayerNorm, rate: float) -> None:
    """Change the costs of a layer norm and of its readers."""
    graph, cost = to.graph, to.rows[norm.call]
    x, out = graph.values[norm.input], graph.calls[norm.call].outputs[0]
    before, now = graph.values[out].bytes, math.prod(graph.values[out].shape) * _ITEM_BYTES[norm.kind]
    first = x.base
    kept = (*(s for s in cost.saved if s.kind == "parameter"), Saved(first, "value", graph.values[first].bytes))
    sums = 2 if any(g.of not in graph.values for g in cost.gradients) else 0
    rows, turned = RATE * rate, 0 if x.stride == _contiguous(x.shape) else x.bytes
    to.rows[norm.call] = replace(
        cost,
        forward=_timed(cost.forward, (2 * turned + x.bytes + now) / rows),
        backward=_timed(cost.backward, (2 * turned + 2 * x.bytes + now) / rows),
        outputs={out: now},
        output_bytes=now,
        saved=kept,
        workspace_forward_bytes=turned,
        workspace_backward_bytes=turned + parts_bytes(math.prod(x.shape), norm.width, sums),
    )
    shared = set(to.sharing(out))
    for name in norm.casting:
        row = to.rows[name]
        seconds = (before + now) / rows if row.forward is not None and row.forward.dispatch_s else 0.0
        to.rows[name] = replace(
            row,
            saved=(*(s for s in row.saved if s.of not in norm.gone), Saved(out, "value", now)),
            gradients=tuple(replace(g, bytes=now if g.bytes else 0) if g.of in shared else g for g in row.gradients),
            forward=less(row.forward, seconds),
            backward=less(row.backward, seconds),
        )


def _timed(now: TimedRuns | None, seconds: float) -> TimedRuns | None:
    """The time of a pass; on a CPU it is left as it is."""
    if now is None or not now.dispatch_s:
        return now
    return TimedRuns.of([min(now.median_s, seconds)], dispatch_s=_ISSUE * now.dispatch_s)


class _LayerNorm:
    """A layer norm; of a module, or a function with its arguments."""

    def __init__(self, module: nn.Module | None, kind: torch.dtype) -> None:
        self.module, self.kind = module, kind

    def __call__(
        self,
        input: torch.Tensor,
        normalized_shape: Any = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if self.module is not None:
            m: Any = self.module
            normalized_shape, weight, bias, eps = m.normalized_shape, m.weight, m.bias, m.eps
        if input.shape[input.dim() - len(normalized_shape) :] != tuple(normalized_shape) or not input.numel():
            return F.layer_norm(input, normalized_shape, weight, bias, eps).to(self.kind)
        given = (input, weight, bias, math.prod(normalized_shape), eps, self.kind)
        result: torch.Tensor = _Pass.apply(*given)  # type: ignore[no-untyped-call]
        return result


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        width: int,
        eps: float,
        kind: torch.dtype,
    ) -> torch.Tensor:
        """Statistics and normalised values of a row in one pass."""
        ctx.save_for_backward(x, weight)
        x = x.contiguous()  # strided rows are made contiguous, here and again in backward, as torch does it
        ctx.settings, ctx.kinds = (width, eps), tuple(None if t is None else (t.shape, t.dtype) for t in (weight, bias))
        if x.is_cuda:
            from outcore.kernels.layer_norm import normalised

            return normalised(x, weight, bias, width, eps, kind)
        precision = torch.promote_types(x.dtype, torch.float32)
        rows = x.detach().reshape(-1, width).to(precision)
        w, b = (None if t is None else t.detach().to(precision).reshape(width) for t in (weight, bias))
        return F.layer_norm(rows, (width,), w, b, eps).view(x.shape).to(kind)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient of the input, and the sums for weight and bias, in one pass."""
        x, weight = ctx.saved_tensors
        given = (gradient.contiguous(), x.contiguous(), weight, *ctx.settings)
        wanted = any(ctx.needs_input_grad[1:3])
        if x.is_cuda:
            from outcore.kernels.layer_norm import gradients

            back, sums = gradients(*given, sums=wanted)
        else:
            back, sums = _gradients(*given)
        totals = [
            total.view(known[0]).to(known[1]) if known is not None and wanted else None
            for total, known in zip(sums if sums is not None else (None, None), ctx.kinds, strict=True)
        ]
        return back, *totals, None, None, None


def _gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, width: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the input; and those of weight and bias, one after the other."""
    precision = torch.promote_types(x.dtype, torch.float32)
    rows, g = (t.reshape(-1, width).to(precision) for t in (x, gradient))
    variance, mean = torch.var_mean(rows, 1, correction=0, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    hat = (rows - mean) * inverse
    sums = torch.stack([(g * hat).sum(0), g.sum(0)])
    g = g if weight is None else g * weight.reshape(width).to(precision)
    back = (g - g.mean(1, keepdim=True) - hat * (g * hat).mean(1, keepdim=True)) * inverse
    return back.view(x.shape).to(x.dtype), sums
