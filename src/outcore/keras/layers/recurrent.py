"""Recurrent layers.

Keras' default LSTM, GRU and simple RNN are torch's own, with the gates in another order (GRU) and, where Keras has one
bias and torch two, the second a constant zero that is not trained. Other activations, a GRU that resets before the
product, and dropout on the state run as a loop over the steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outcore.keras.carried import Weight
from outcore.keras.layers.activation import FUNCTIONS, function_of
from outcore.keras.part import Part, Site, converts

__all__: list[str] = []


class Recurrent(nn.Module):
    """A recurrent layer of torch that takes and returns what Keras' does."""

    def __init__(self, kind: str, inputs: int, units: int, *, bias: bool, sequences: bool, state: bool) -> None:
        super().__init__()
        make: Any = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(kind, nn.RNN)
        options = {"nonlinearity": kind} if make is nn.RNN else {}
        self.core = make(inputs, units, bias=bias, batch_first=True, **options)
        self.kind, self.sequences, self.state, self.backwards = kind, sequences, state, False

    def fix_second_bias(self) -> None:
        """Make the second bias a constant zero: Keras has one bias."""
        zero = torch.zeros_like(self.core.bias_hh_l0.detach())
        names = self.core._flat_weights_names
        del self.core.bias_hh_l0
        self.core.register_buffer("bias_hh_l0", zero, persistent=False)
        self.core._flat_weights = [getattr(self.core, name) for name in names]

    def forward(self, x: torch.Tensor, initial_state: Any = None) -> Any:
        """The last output or all of them, and the state if it is wanted."""
        given = None
        if initial_state is not None:
            states = initial_state if isinstance(initial_state, (list, tuple)) else [initial_state]
            found = [state.unsqueeze(0) for state in states]
            given = tuple(found) if self.kind == "LSTM" else found[0]
        outputs, last = self.core(x.flip(1) if self.backwards else x, given)
        states = [state.squeeze(0) for state in (last if isinstance(last, tuple) else (last,))]
        y = outputs if self.sequences else outputs[:, -1]
        return [y, *states] if self.state else y


class RecurrentLoop(nn.Module):
    """A recurrent layer step by step."""

    def __init__(self, kind: str, inputs: int, units: int, **settings: Any) -> None:
        super().__init__()
        gates = {"LSTM": 4, "GRU": 3}.get(kind, 1)
        self.kind, self.units = kind, units
        self.activation, self.gate = settings["activation"], settings["gate"]
        self.reset_after: bool = settings["reset_after"]
        self.sequences, self.state, self.backwards = settings["sequences"], settings["state"], False
        self.kernel = nn.Parameter(torch.empty(inputs, gates * units))
        self.recurrent_kernel = nn.Parameter(torch.empty(units, gates * units))
        shape = settings["bias"]
        self.bias = None if shape is None else nn.Parameter(torch.empty(shape))

    def _step(self, x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        act, gate = FUNCTIONS[self.activation], FUNCTIONS[self.gate]
        h = states[0]
        if self.kind == "GRU":
            z, r, candidate = x.chunk(3, -1)
            kz, kr, kh = self.recurrent_kernel.chunk(3, -1)
            bz, br, bh = self.bias[1].chunk(3, -1) if self.bias is not None and self.reset_after else (0, 0, 0)
            z, r = gate(z + h @ kz + bz), gate(r + h @ kr + br)
            inner = r * (h @ kh + bh) if self.reset_after else (r * h) @ kh
            return [z * h + (1 - z) * act(candidate + inner)]
        y = x + h @ self.recurrent_kernel
        if self.kind == "LSTM":
            i, f, c, o = y.chunk(4, -1)
            cell = gate(f) * states[1] + gate(i) * act(c)
            return [gate(o) * act(cell), cell]
        return [act(y)]

    def forward(self, x: torch.Tensor, initial_state: Any = None) -> Any:
        """The last output or all of them, and the state if it is wanted."""
        if initial_state is None:
            zero = x.new_zeros(x.shape[0], self.units)
            states = [zero, zero] if self.kind == "LSTM" else [zero]
        else:
            states = list(initial_state) if isinstance(initial_state, (list, tuple)) else [initial_state]
        x = x @ self.kernel
        if self.bias is not None:
            x = x + (self.bias[0] if self.kind == "GRU" and self.reset_after else self.bias)
        outputs = []
        for step in (x.flip(1) if self.backwards else x).unbind(1):
            states = self._step(step, states)
            outputs.append(states[0])
        y = torch.stack(outputs, 1) if self.sequences else outputs[-1]
        return [y, *states] if self.state else y


@converts("layers.LSTM", "layers.GRU", "layers.SimpleRNN")
def _recurrent(layer: Any, site: Site) -> Part:
    cell = layer.cell
    if layer.stateful:
        site.refuse("stateful=True", "pass the state as an input and return it")
    if cell.dropout or cell.recurrent_dropout:
        site.refuse("dropout inside the recurrence", "put a Dropout layer before it")
    kind = type(layer).__name__
    activation = function_of(cell.activation, site)
    gate = function_of(getattr(cell, "recurrent_activation", cell.activation), site)
    inputs, width = (int(n) for n in cell.kernel.shape)
    units = cell.units
    usual = activation == "tanh" and (kind == "SimpleRNN" or gate == "sigmoid") and getattr(cell, "reset_after", True)
    if kind == "SimpleRNN" and activation == "relu":
        usual = True
    module: Any
    options: dict[str, Any] = {"sequences": layer.return_sequences, "state": layer.return_state}
    if not usual:
        module = RecurrentLoop(
            kind,
            inputs,
            units,
            activation=activation,
            gate=gate,
            reset_after=getattr(cell, "reset_after", True),
            bias=tuple(cell.bias.shape) if cell.use_bias else None,
            **options,
        )
        weights = [Weight(cell.kernel, "kernel"), Weight(cell.recurrent_kernel, "recurrent_kernel")]
        weights += [Weight(cell.bias, "bias")] if cell.use_bias else []
    else:
        torch_kind = activation if kind == "SimpleRNN" else kind
        module = Recurrent(torch_kind, inputs, units, bias=cell.use_bias, **options)
        order = (1, (1, 0, 2)) if kind == "GRU" else None
        gates = width // units

        def kernel(variable: Any, name: str, rows: int) -> Weight:
            return Weight(
                variable,
                f"core.{name}",
                split=(rows, gates, units),
                order=order,
                permute=(1, 2, 0),
                merge=(width, rows),
            )

        weights = [kernel(cell.kernel, "weight_ih_l0", inputs), kernel(cell.recurrent_kernel, "weight_hh_l0", units)]
        if cell.use_bias and kind == "GRU":
            for row, name in enumerate(("bias_ih_l0", "bias_hh_l0")):
                weights.append(
                    Weight(
                        cell.bias, f"core.{name}", row=row, split=(gates, units), order=(0, (1, 0, 2)), merge=(width,)
                    )
                )
        elif cell.use_bias:
            weights.append(Weight(cell.bias, "core.bias_ih_l0"))
            module.fix_second_bias()
    module.backwards = layer.go_backwards
    return Part(module, False, weights)


class Bidirectional(nn.Module):
    """A recurrent layer in both directions."""

    def __init__(
        self, forward_layer: nn.Module, backward_layer: nn.Module, how: str | None, *, sequences: bool
    ) -> None:
        super().__init__()
        self.forward_layer, self.backward_layer = forward_layer, backward_layer
        self.how, self.sequences = how, sequences

    def forward(self, x: torch.Tensor, initial_state: Any = None) -> Any:
        """Both directions, merged."""
        half = 0 if initial_state is None else len(initial_state) // 2
        there = self.forward_layer(x, initial_state[:half] if half else None)
        back = self.backward_layer(x, initial_state[half:] if half else None)
        states: list[torch.Tensor] = []
        if isinstance(there, list):
            states = [*there[1:], *back[1:]]
            there, back = there[0], back[0]
        if self.sequences:
            back = back.flip(1)
        merged: list[torch.Tensor]
        if self.how == "concat":
            merged = [torch.cat([there, back], -1)]
        elif self.how is None:
            merged = [there, back]
        else:
            y = there * back if self.how == "mul" else there + back
            merged = [y / 2 if self.how == "ave" else y]
        return [*merged, *states] if states or len(merged) > 1 else merged[0]


@converts("layers.Bidirectional")
def _bidirectional(layer: Any, site: Site) -> Part:
    assert site.convert is not None
    parts = [site.convert(inner, site) for inner in (layer.forward_layer, layer.backward_layer)]
    module = Bidirectional(parts[0].module, parts[1].module, layer.merge_mode, sequences=layer.return_sequences)
    names = ("forward_layer", "backward_layer")
    weights = [weight.within(name) for name, part in zip(names, parts, strict=True) for weight in part.weights]
    return Part(module, False, weights)


class TimeDistributed(nn.Module):
    """A module on every step of a sequence."""

    def __init__(self, inner: nn.Module, *, first: bool) -> None:
        super().__init__()
        self.inner, self.first = inner, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Steps as samples, and back."""
        count, steps = x.shape[:2]
        x = x.flatten(0, 1)
        if self.first and x.ndim > 2:
            x = x.movedim(-1, 1)
        y: torch.Tensor = self.inner(x)
        if self.first and y.ndim > 2:
            y = y.movedim(1, -1)
        return y.reshape(count, steps, *y.shape[1:])


def _normalizes_batches(layer: Any) -> bool:
    """Whether a layer has statistics of the batch in training."""
    return type(layer).__name__ == "BatchNormalization" and bool(layer.trainable)


@converts("layers.TimeDistributed")
def _time_distributed(layer: Any, site: Site) -> Part:
    assert site.convert is not None
    kind = type(layer.layer).__name__
    rank = site.rank - 1
    inner = site.convert(layer.layer, Site(site.path, kind, (rank,), rank > 2, convert=site.convert))
    if any(_normalizes_batches(one) for one in layer.layer._flatten_layers()):
        site.refuse("Keras normalizes every step by its own statistics inside TimeDistributed")
    module = TimeDistributed(inner.module, first=inner.first)
    return Part(module, False, [weight.within("inner") for weight in inner.weights])
