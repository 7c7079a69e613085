"""The arguments and results of a recurrent layer of torch.nn: normalised once, checked as torch does.

Time first, always a batch, initial states given and sorted like a packed sequence, everything in the precision that
autocast asks for.

Sequences of one batch may differ in length. A packed sequence holds the existing steps only, sorted by time and, within
a step, by falling length. The scan works on the padded form ``[D, T, N, ...]``; steps beyond the end of a sequence are
skipped there. In the second direction each sequence is stored from its own last step to its first, so that both
directions are scanned alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Hidden = Tensor | tuple[Tensor, Tensor]


def extent(module: torch.nn.RNNBase, input: Any) -> tuple[int, int]:
    """Steps and sequences.

    Raises:
        ValueError: the input has other dimensions than torch takes.
    """
    if isinstance(input, PackedSequence):
        return len(input.batch_sizes), int(input.batch_sizes[0])
    if input.dim() not in (2, 3):
        raise ValueError(f"{type(module).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead")
    if input.dim() == 2:
        return input.shape[0], 1
    return (input.shape[1], input.shape[0]) if module.batch_first else (input.shape[0], input.shape[1])


def working(x: Tensor) -> torch.dtype:
    """Autocast as torch's recurrent functions do it on a GPU: everything in the lower precision."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """The arguments of one call."""

    given: Any
    """The input as it was given."""
    x: Tensor
    """``[T, N, I]``, or the data of a packed sequence."""
    packing: PackedRows | None
    state: tuple[Tensor, ...]
    """``(h0,)`` or ``(h0, c0)``."""

    @classmethod
    def of(cls, module: torch.nn.RNNBase, input: Any, hx: Any) -> LayerArguments:
        """The normalised arguments of a call of a module; torch's own checks and messages."""
        steps, batch = extent(module, input)
        if isinstance(input, PackedSequence):
            x, batch_sizes, order, _ = input
            state = _initial(module, x, batch, hx, order)
            _check(module, x, state, batch_sizes)
            return cls._cast(input, x, PackedRows.of(batch_sizes, x.device), state)
        name, batched = type(module).__name__, input.dim() == 3
        parts = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        if any(part.dim() != (3 if batched else 2) for part in parts):
            raise RuntimeError(
                f"For {'batched 3-D' if batched else 'unbatched 2-D'} input, hx should also be "
                f"{3 if batched else 2}-D but got {', '.join(f'{part.dim()}-D' for part in parts)}"
            )
        x = input
        if not batched:
            x = input.unsqueeze(0 if module.batch_first else 1)
            hx = None if hx is None else tuple(part.unsqueeze(1) for part in parts)
        state = _initial(module, x, batch, hx, None)
        _check(module, x, state, None)
        if steps == 0:
            raise RuntimeError(f"{name}: Expected sequence length to be larger than 0")
        return cls._cast(input, (x.transpose(0, 1) if module.batch_first else x).contiguous(), None, state)

    @classmethod
    def _cast(cls, given: Any, x: Tensor, packing: PackedRows | None, state: tuple[Tensor, ...]) -> LayerArguments:
        return cls(given, x.to(working(x)), packing, tuple(part.to(working(part)) for part in state))

    def results(self, module: torch.nn.RNNBase, y: Tensor, final: tuple[Tensor, ...]) -> tuple[Any, Hidden]:
        """Output and final states as torch returns them."""
        if isinstance(self.given, PackedSequence):
            order = self.given.unsorted_indices
            packed = PackedSequence(y, self.given.batch_sizes, self.given.sorted_indices, order)
            final = tuple(part if order is None else part.index_select(1, order) for part in final)
            return packed, (final[0], final[1]) if module.mode == "LSTM" else final[0]
        if module.batch_first:
            y = y.transpose(0, 1)
        if self.given.dim() == 2:
            y = y.squeeze(0 if module.batch_first else 1)
            final = tuple(part.squeeze(1) for part in final)
        return y, (final[0], final[1]) if module.mode == "LSTM" else final[0]


def _check(module: torch.nn.RNNBase, x: Tensor, state: tuple[Tensor, ...], batch_sizes: Tensor | None) -> None:
    hx: Any = state if module.mode == "LSTM" else state[0]
    module.check_forward_args(x, hx, batch_sizes)


def _initial(module: torch.nn.RNNBase, x: Tensor, batch: int, hx: Any, order: Tensor | None) -> tuple[Tensor, ...]:
    if hx is not None:
        parts = hx if isinstance(hx, tuple) else (hx,)
        return tuple(part if order is None else part.index_select(1, order) for part in parts)
    count = module.num_layers * (1 + module.bidirectional)
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)
    return tuple(x.new_zeros((count, batch, size)) for size in sizes[: 2 if module.mode == "LSTM" else 1])


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where the rows of packed data stand in the padded form."""

    batch_sizes: Tensor
    """Sequences that have a t-th step, on the CPU."""
    lengths: Tensor
    rows: Tensor
    """Row of the padded ``[T·N]`` form for every row of the data."""

    @classmethod
    def of(cls, batch_sizes: Tensor, device: torch.device) -> PackedRows:
        """The packing of a `PackedSequence` with these batch sizes."""
        n = int(batch_sizes[0])
        exists = batch_sizes.unsqueeze(1) > torch.arange(n, device="cpu")
        return cls(batch_sizes, exists.sum(0).to(device), exists.flatten().nonzero().squeeze(1).to(device))

    @property
    def steps(self) -> int:
        """Steps of the longest sequence."""
        return len(self.batch_sizes)

    def pad(self, data: Tensor) -> Tensor:
        """Data ``[rows, F]`` as ``[T, N, F]``, zero where a sequence has ended."""
        out = data.new_zeros((self.steps * len(self.lengths), data.shape[1]))
        return out.index_copy_(0, self.rows, data).view(self.steps, len(self.lengths), -1)

    def pack(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`."""
        return padded.reshape(-1, padded.shape[-1]).index_select(0, self.rows)


def flip(x: Tensor, lengths: Tensor | None) -> Tensor:
    """``[T, N, F]`` with the time of each sequence reversed; steps beyond its end stay where they are."""
    if lengths is None:
        return x.flip(0)
    time = torch.arange(len(x), device=x.device).unsqueeze(1)
    index = torch.where(time < lengths, lengths - 1 - time, time)
    return x.gather(0, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
