"""Sequences of different length in one batch, and the direction of time.

A packed sequence holds the existing steps only, sorted by time and, within a step, by falling length. The
scan works on the padded form ``[D, T, N, ...]``; steps beyond the end of a sequence are skipped there. In the
second direction each sequence is stored from its own last step to its first, so that both directions are
scanned alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
