"""The gradients of a layer's weights: sums over all steps and sequences, and over the segments of a long sequence.

Here as matrix products, for any device; as kernels in `outcore.scan.kernels.weight_gradients`, or within the sweeps of
`outcore.scan.kernels.backward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outcore.scan.kernels.weight_gradients import Summed

_SPLIT_ROWS = 2048
"""Rows per partial sum of a weight gradient on a GPU: a product with millions of rows and few columns fills
few multiprocessors unless it is split."""


class WeightGradients:
    """Sums over segments."""

    def __init__(self) -> None:
        self.input: Tensor | None = None
        self.hidden: Tensor | None = None
        self.input_bias: Tensor | None = None
        self.hidden_bias: Tensor | None = None
        self.projection: Tensor | None = None

    def add(self, summed: Summed) -> None:
        of_input, of_hidden, of_input_bias, of_hidden_bias = summed
        self.input = _plus(self.input, of_input)
        self.hidden = _plus(self.hidden, of_hidden)
        if of_input_bias is not None and of_hidden_bias is not None:
            self.input_bias = _plus(self.input_bias, of_input_bias)
            self.hidden_bias = _plus(self.hidden_bias, of_hidden_bias)

    def add_projection(self, of_output: Tensor, unprojected: Tensor) -> None:
        self.projection = _plus(self.projection, _summed_products(of_output, unprojected))

    def flat(self, directions: int, flat: tuple[Tensor, ...]) -> list[Tensor]:
        """Like the parameters `flat`: in torch's order, one set per direction."""
        kinds = (self.input, self.hidden, self.input_bias, self.hidden_bias, self.projection)
        grads = [kind[d] for d in range(directions) for kind in kinds if kind is not None]
        return [grad.to(weight.dtype) for grad, weight in zip(grads, flat, strict=True)]


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


def summed_weights(
    x: Tensor, just_before: Tensor, after: Tensor, to_input: Tensor, to_hidden: Tensor, bias: bool
) -> Summed:
    """Gradients of the weights from those of the gates."""
    # Each step meets the state before it: the first one's, and the states but the last.
    hidden = torch.bmm(to_hidden[:, 0].mT, just_before)
    if to_hidden.shape[1] > 1:
        hidden += _summed_products(to_hidden[:, 1:], after[:, :-1])
    of_input = to_input.sum((1, 2)) if bias else None
    of_hidden = to_hidden.sum((1, 2)) if bias and to_hidden is not to_input else of_input
    return _summed_products(to_input, x), hidden, of_input, of_hidden


def _summed_products(left: Tensor, right: Tensor) -> Tensor:
    """Sum over steps and sequences of the outer products: ``[D, T, N, a]``, ``[D, T, N, b]`` to ``[D, a, b]``."""
    return torch.stack([_summed(a.flatten(0, 1), b.flatten(0, 1)) for a, b in zip(left, right, strict=True)])


def _summed(left: Tensor, right: Tensor) -> Tensor:
    parts = len(left) // _SPLIT_ROWS
    if not left.is_cuda or parts < 4:
        return left.mT @ right
    whole = parts * _SPLIT_ROWS
    total = torch.bmm(left[:whole].view(parts, _SPLIT_ROWS, -1).mT, right[:whole].view(parts, _SPLIT_ROWS, -1)).sum(0)
    return total if whole == len(left) else total.addmm_(left[whole:].mT, right[whole:])
