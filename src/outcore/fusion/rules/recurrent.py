"""RNN, GRU and LSTM of all members, time step by time step.

The input's contribution to every gate at every time is one batched matrix product; the recurrence then takes one
batched matrix product and the gate functions per time step, for all members together. torch has no batched form of
these layers (vmap refuses them). Gate order and formulas are those of ``torch.nn``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from outcore.fusion.program.call import FusedCall
from outcore.fusion.program.values import Stacked

State = tuple[torch.Tensor, ...]


def recurrent(call: FusedCall) -> Any:
    """``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` on padded batches; NotImplemented for packed ones and inner dropout."""
    module = call.module
    assert isinstance(module, nn.RNNBase)
    x = call.args[0]
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("hx")
    inner_dropout = module.dropout and module.training and module.num_layers > 1
    if not isinstance(x, Stacked | torch.Tensor) or inner_dropout or not call.same("dropout", "batch_first"):
        return NotImplemented
    tensor = _expanded(x, call.members)
    if tensor.dim() != 4:
        return NotImplemented
    sequence = tensor.transpose(1, 2) if module.batch_first else tensor  # [B, T, N, I]
    ways = 2 if module.bidirectional else 1
    starts = _starts(module, given, sequence, call.members)
    finals: list[State] = []
    for layer in range(module.num_layers):
        outputs = []
        for way in range(ways):
            weights = _weights(call.state, layer, way)
            start = tuple(s[:, layer * ways + way] for s in starts)
            made, final = _run(module.mode, sequence.flip(1) if way else sequence, start, weights)
            outputs.append(made.flip(1) if way else made)
            finals.append(final)
        sequence = torch.cat(outputs, -1) if ways == 2 else outputs[0]
    output = sequence.transpose(1, 2) if module.batch_first else sequence
    last = tuple(Stacked(torch.stack(parts, 1)) for parts in zip(*finals, strict=True))
    return Stacked(output), (last if module.mode == "LSTM" else last[0])


def cell(call: FusedCall) -> Any:
    """``nn.RNNCell``, ``nn.GRUCell`` and ``nn.LSTMCell``."""
    module: Any = call.module
    given = call.args[1] if len(call.args) > 1 else call.kwargs.get("hx")
    mode = {nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}.get(type(module))
    if mode is None:
        mode = f"RNN_{str(module.nonlinearity).upper()}"
    x = _expanded(call.args[0], call.members)
    if x.dim() != 3 or not call.same("bias"):
        return NotImplemented
    weights = tuple(call.state.get(n) for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    count = 2 if mode == "LSTM" else 1
    if given is None:
        start: State = (x.new_zeros(call.members, x.shape[1], module.hidden_size),) * count
    else:
        parts = given if isinstance(given, tuple | list) else (given,)
        start = tuple(_expanded(p, call.members) for p in parts)
    step = _step(mode, _project(x.unsqueeze(1), weights[0], weights[2])[:, 0], start, weights)
    return tuple(Stacked(s) for s in step) if mode == "LSTM" else Stacked(step[0])


def _expanded(x: Any, members: int) -> torch.Tensor:
    return x.tensor if isinstance(x, Stacked) else x.unsqueeze(0).expand(members, *x.shape)


def _starts(module: nn.RNNBase, given: Any, sequence: torch.Tensor, members: int) -> State:
    count = 2 if module.mode == "LSTM" else 1
    if given is not None:
        return tuple(_expanded(p, members) for p in (given if isinstance(given, tuple | list) else (given,)))
    layers = module.num_layers * (2 if module.bidirectional else 1)
    shape = (members, layers, sequence.shape[2])
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)
    return tuple(sequence.new_zeros(*shape, size) for size in sizes[:count])


def _weights(state: Mapping[str, Any], layer: int, way: int) -> tuple[Any, ...]:
    suffix = f"_l{layer}{'_reverse' if way else ''}"
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    return tuple(state.get(name + suffix) for name in names)


def _project(x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    """``[B, T, N, I]`` to ``[B, T, N, gates]``."""
    rows, w = x.flatten(1, 2), weight.tensor.transpose(1, 2)
    y = torch.bmm(rows, w) if bias is None else torch.baddbmm(bias.tensor.unsqueeze(1), rows, w)
    gates: torch.Tensor = y.unflatten(1, x.shape[1:3])
    return gates


def _run(mode: str, x: torch.Tensor, start: State, weights: tuple[Any, ...]) -> tuple[torch.Tensor, State]:
    weights = tuple(_lowered(w) for w in weights)
    gates = _project(x, weights[0], weights[2])
    state, outputs = start, []
    for t in range(x.shape[1]):
        state = _step(mode, gates[:, t], state, weights)
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def _lowered(weight: Any) -> Any:
    """The weight in the precision of autocast, cast once: it would cast, and save, a copy in every time step."""
    if weight is None or not torch.is_autocast_enabled(weight.tensor.device.type):
        return weight
    return Stacked(weight.tensor.to(torch.get_autocast_dtype(weight.tensor.device.type)))


def _step(mode: str, gates: torch.Tensor, state: State, weights: tuple[Any, ...]) -> State:
    """One time step: gates of the input ``[B, N, gates]`` and the state before, to the state after."""
    hidden = _project(state[0].unsqueeze(1), weights[1], weights[3])[:, 0]
    if mode == "GRU":
        (r, z, n), (hr, hz, hn) = gates.chunk(3, -1), hidden.chunk(3, -1)
        r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
        new = torch.tanh(n + r * hn)
        return (new + z * (state[0] - new),)
    if mode != "LSTM":
        total = gates + hidden
        return (torch.relu(total) if mode == "RNN_RELU" else torch.tanh(total),)
    i, f, g, o = (gates + hidden).chunk(4, -1)
    memory = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    out = torch.sigmoid(o) * torch.tanh(memory)
    if len(weights) > 4 and weights[4] is not None:
        out = torch.bmm(out, weights[4].tensor.transpose(1, 2))
    return out, memory
