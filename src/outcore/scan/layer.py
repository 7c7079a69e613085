"""One recurrent layer (both directions of it): torch's forward, the scan's backward.

Forward keeps the input, the output and nothing else; cuDNN's gates and reserve space are not asked for.
Backward computes all gates again by one matrix product, solves for the gradients of all states
(`outcore.scan.backward`), and gets the gradients of the weights from one matrix product over all steps and
sequences.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._VF import gru, lstm, rnn_relu, rnn_tanh

from outcore.errors import ScanError
from outcore.scan.arguments import PackedRows, flip
from outcore.scan.backward import AdjointRecurrence, WeightGradientInputs, solve
from outcore.scan.cells import CellShape, LayerWeights, gate_gradients
from outcore.scan.coefficients import coefficients, memories, shifted
from outcore.scan.kernels.weight_gradients import weight_sums
from outcore.scan.newton import parallel_forward
from outcore.scan.options import Newton, Precision, Solver
from outcore.scan.report import LayerReport
from outcore.scan.weight_gradients import WeightGradients, summed_weights
from outcore.scan.workspace import SequenceCut

_FORWARD: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "tanh": rnn_tanh,
    "relu": rnn_relu,
    "gru": gru,
    "lstm": lstm,
}


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of a layer, beside its tensors."""

    cell: CellShape
    bias: bool
    directions: int
    packing: PackedRows | None
    cut: SequenceCut
    solver: Solver | None
    precision: Precision
    forward: Newton | None
    report: LayerReport

    @property
    def lengths(self) -> Tensor | None:
        """Steps of each sequence, where they differ."""
        return None if self.packing is None else self.packing.lengths

    def weights(self, flat: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> LayerWeights:
        """The layer's parameters with directions stacked."""
        per = len(flat) // self.directions

        def stack(i: int) -> Tensor:
            one = flat[i].unsqueeze(0) if self.directions == 1 else torch.stack((flat[i], flat[per + i]))
            return one.to(dtype) if dtype is not None else one

        return LayerWeights(
            input=stack(0),
            hidden=stack(1),
            input_bias=stack(2) if self.bias else None,
            hidden_bias=stack(3) if self.bias else None,
            projection=stack(per - 1) if self.cell.projection else None,
        )

    def orient(self, x: Tensor, dtype: torch.dtype, *, split: bool) -> Tensor:
        """Input (or, `split`, output) of the layer as ``[D, T, N, F]``, each direction in its own order of
        time."""
        x = x.to(dtype)
        if self.packing is not None:
            x = self.packing.pad(x)
        if self.directions == 1:
            return x.unsqueeze(0)
        forth, back = x.chunk(2, dim=-1) if split else (x, x)
        return torch.stack((forth, flip(back, self.lengths)))

    def restore(self, x: Tensor, *, split: bool) -> Tensor:
        """The inverse of `orient`; of an input, the sum over the directions."""
        if self.directions == 1:
            whole = x[0]
        else:
            forth, back = x[0], flip(x[1], self.lengths)
            whole = torch.cat((forth, back), dim=-1) if split else forth + back
        return whole if self.packing is None else self.packing.pack(whole)


def run_layer(layer: Layer, x: Tensor, state: tuple[Tensor, ...], flat: list[Tensor]) -> tuple[Tensor, ...]:
    """Output and final states of a layer.

    Args:
        layer: the layer.
        x: ``[T, N, I]``, or the data of a packed sequence.
        state: ``(h0,)`` or ``(h0, c0)``, each ``[D, N, ...]``.
        flat: the parameters in torch's order.
    """
    result: tuple[Tensor, ...] = _ScannedLayer.apply(  # type: ignore[no-untyped-call]
        layer, x, state[0], state[1] if len(state) > 1 else None, *flat
    )
    return result


class _ScannedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, x: Tensor, h0: Tensor, c0: Tensor | None, *flat: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = layer
        results = None
        if layer.forward is not None:
            results = _parallel(layer, x, h0, c0, flat)
        if results is None:
            results = _sequential(layer, x, h0, c0, flat)
        ctx.save_for_backward(x, h0, c0, results[0], *flat)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ScanError(
                "the gradients of a scanned layer cannot be differentiated again (create_graph=True); "
                'give the layer Options(backward="torch") for that'
            )
        x, h0, c0, y, *flat = ctx.saved_tensors
        needed = ctx.needs_input_grad
        return None, *_backward(ctx.layer, x, h0, c0, y, tuple(flat), grads, input_grad=needed[1])


def _sequential(layer: Layer, x: Tensor, h0: Tensor, c0: Tensor | None, flat: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    hx: Any = h0 if c0 is None else (h0, c0)
    options = (layer.bias, 1, 0.0, False, layer.directions == 2)
    with warnings.catch_warnings():
        # One layer of several is no contiguous chunk of the parameters; copying its few is cheap.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        if layer.packing is None:
            return tuple(_FORWARD[layer.cell.kind](x, hx, list(flat), *options, False))
        return tuple(_FORWARD[layer.cell.kind](x, layer.packing.batch_sizes, hx, list(flat), *options))


def _parallel(
    layer: Layer, x: Tensor, h0: Tensor, c0: Tensor | None, flat: tuple[Tensor, ...]
) -> tuple[Tensor, ...] | None:
    assert layer.forward is not None
    dtype = working_dtype(x.dtype)
    start = _state(h0, c0).to(dtype)
    found = parallel_forward(
        layer.cell,
        layer.orient(x, dtype, split=False),
        start,
        layer.weights(flat, dtype),
        layer.lengths,
        layer.forward,
    )
    layer.report.forward, layer.report.failure = found.outcome, found.failure
    if found.states is None:
        warnings.warn(f"the parallel forward pass ran sequentially: {found.failure}", RuntimeWarning, stacklevel=2)
        return None
    h = found.states[..., : layer.cell.output]
    if layer.lengths is not None:
        time = torch.arange(h.shape[1], device=h.device).unsqueeze(1)
        h = torch.where((time < layer.lengths).unsqueeze(-1), h, 0)
    final = found.final.to(x.dtype)
    y = layer.restore(h.to(x.dtype), split=True)
    if c0 is None:
        return y.contiguous(), final
    return (
        y.contiguous(),
        final[..., : layer.cell.output].contiguous(),
        final[..., layer.cell.output :].contiguous(),
    )


def _state(h: Tensor, c: Tensor | None) -> Tensor:
    return h if c is None else torch.cat((h, c), dim=-1)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precisions are scanned in float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _backward(
    layer: Layer,
    x: Tensor,
    h0: Tensor,
    c0: Tensor | None,
    y: Tensor,
    flat: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    *,
    input_grad: bool,
) -> tuple[Tensor | None, ...]:
    cell, dtype = layer.cell, working_dtype(x.dtype)
    weights = layer.weights(flat, dtype)
    xs, ys = layer.orient(x, dtype, split=False), layer.orient(y, dtype, split=True)
    grad_y = layer.orient(grads[0], dtype, split=True)
    carried = _state(grads[1], grads[2] if c0 is not None else None).to(dtype)
    start, memory = h0.to(dtype), None if c0 is None else c0.to(dtype)
    T, segment = ys.shape[1], layer.cut.segment
    grad_x = torch.empty_like(xs) if input_grad else None
    sums = WeightGradients()

    starts = range(0, T, segment)
    memories_at = _memories(cell, xs, ys, start, memory, weights, starts, segment)
    for first, c_first in zip(reversed(starts), reversed(memories_at), strict=True):
        here = slice(first, min(T, first + segment))
        just_before = start if first == 0 else ys[:, first - 1]
        into = None if grad_x is None else grad_x[:, here]
        carried = _segment(
            layer, xs[:, here], just_before, ys[:, here], c_first, weights, grad_y[:, here], carried,
            first, sums, into,
        )  # fmt: skip

    of_x = None if grad_x is None else layer.restore(grad_x, split=False).to(x.dtype)
    of_h0 = carried[..., : cell.output].to(h0.dtype)
    of_c0 = None if c0 is None else carried[..., cell.output :].to(c0.dtype)
    return of_x, of_h0, of_c0, *sums.flat(layer.directions, flat)


def _segment(
    layer: Layer,
    x: Tensor,
    just_before: Tensor,
    after: Tensor,
    memory: Tensor | None,
    weights: LayerWeights,
    grad_y: Tensor,
    carried: Tensor,
    first: int,
    sums: WeightGradients,
    grad_x: Tensor | None,
) -> Tensor:
    """Back through the steps of one segment; returns what is carried into the one before it."""
    cell = layer.cell
    found = coefficients(cell, x, just_before, after, memory, weights)
    lengths = None if layer.lengths is None else (layer.lengths - first).clamp(min=0)
    inputs = WeightGradientInputs(x, just_before, layer.bias, totals=grad_x is not None)
    adjoint = AdjointRecurrence(
        cell, found.values, weights.hidden, weights.projection, grad_y, carried, lengths, inputs
    )
    solution = solve(adjoint, layer.cut.chunk, layer.solver, layer.precision)
    layer.report.outcomes.append(solution.outcome)
    layer.report.engine = solution.engine
    totals, summed = solution.totals, solution.summed
    if summed is None and totals is not None:
        summed = weight_sums(cell, totals, found.values, x, just_before, after, layer.bias)
    if summed is not None:
        sums.add(summed)
    if totals is None or (summed is not None and grad_x is None):
        return solution.start
    to_input, to_hidden, of_output = gate_gradients(cell, totals, found.values, weights.projection)
    if summed is None:
        sums.add(summed_weights(x, just_before, after, to_input, to_hidden, layer.bias))
    if of_output is not None and found.unprojected is not None:
        sums.add_projection(of_output, found.unprojected)
    if grad_x is not None:
        rows = to_input.reshape(len(to_input), -1, to_input.shape[-1])
        if grad_x.is_contiguous():
            torch.bmm(rows, weights.input, out=grad_x.view(len(rows), rows.shape[1], -1))
        else:
            grad_x.copy_(torch.bmm(rows, weights.input).view(grad_x.shape))
    return solution.start


def _memories(
    cell: CellShape,
    xs: Tensor,
    ys: Tensor,
    start: Tensor,
    memory: Tensor | None,
    weights: LayerWeights,
    starts: range,
    segment: int,
) -> list[Tensor | None]:
    """The LSTM's memory before each segment; found by running over the segments once more when there are
    several."""
    found = [memory]
    for first in starts[:-1]:
        if found[-1] is None:
            found.append(None)
            continue
        here = slice(first, first + segment)
        before = shifted(start if first == 0 else ys[:, first - 1], ys[:, here])
        found.append(memories(cell, xs[:, here], before, found[-1], weights)[:, -1].clone())
    return found
