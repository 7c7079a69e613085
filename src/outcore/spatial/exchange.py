"""Halos from their owners to those who need them, and their gradients back, as two nodes of autograd.

    forward    post: send own borders, expect halos      ...other work...      complete: wait, put together
    backward   post: wait, add what came                 ...other work...      complete: send the halos' gradients

Whatever runs between the two overlaps with the messages, in both directions. Of an *early* value the post takes the
border strips alone, computed ahead, and the own part is computed between the two. In backward the gradient of the own
part goes on at once, and what neighbours send back is the gradient of the strips: by linearity, the sum of both ways is
the gradient.

autograd runs a node of backward when all that it needs is there, in an order that may differ from rank to rank; two
ranks that wait for each other in different nodes would wait for ever. So all nodes that communicate are threaded on
one *token*, a tensor without content that each takes and returns: backward must then take them in the reverse order of
forward, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.ops.region import Region, sizes
from outcore.spatial.communicator import Communicator, IncomingPart
from outcore.spatial.layout import Exchange
from outcore.spatial.parts import contains
from outcore.stream.execute.map_store import memory_format
from outcore.stream.rules.border import sliced

__all__ = ["Token", "Transfer", "new_token"]

Token = torch.Tensor
_BACK = 1
"""Added to the number of an exchange: its gradients."""


def new_token(device: torch.device) -> Token:
    """The beginning of a chain of communicating nodes."""
    return torch.zeros((), device=device, requires_grad=True)


class Transfer:
    """One exchange, on one rank, in one forward and backward."""

    def __init__(
        self,
        exchange: Exchange,
        comm: Communicator,
        made: Region | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.exchange, self.comm, self.made_region = exchange, comm, made
        self.dtype, self.device = dtype, device
        self.own, self.wanted = exchange.own[comm.rank], exchange.wanted[comm.rank]
        others = [r for r in range(comm.size) if r != comm.rank]
        self.gives = {r: p for r in others if (p := exchange.piece(comm.rank, r)) is not None}
        self.gets = {r: p for r in others if (p := exchange.piece(r, comm.rank)) is not None}
        self._coming: dict[int, IncomingPart] = {}
        self.strips: tuple[Region, ...] = ()
        """The borders that were computed ahead, if any were."""

    @property
    def silent(self) -> bool:
        """Whether nothing comes or goes, nor is anything put together here."""
        return not self.gives and not self.gets and self.wanted is None

    def post(self, made: torch.Tensor | None, token: Token | None) -> tuple[torch.Tensor | None, Token | None]:
        """Start; returns what `complete` takes."""
        if token is None:
            self.start(made)
            return made, None
        kept, token = _Post.apply(made, token, self)  # type: ignore[no-untyped-call]
        return kept, token

    def complete(self, made: torch.Tensor | None, token: Token | None) -> tuple[torch.Tensor | None, Token | None]:
        """Wait; returns the wanted region."""
        if token is None:
            return self.assemble(made), None
        held, token = _Complete.apply(made, token, self)  # type: ignore[no-untyped-call]
        return held, token

    def post_strips(
        self, strips: Sequence[torch.Tensor], regions: tuple[Region, ...], token: Token | None
    ) -> Token | None:
        """Start with borders alone; `complete` then takes the own part as it is."""
        self.strips = regions
        if token is None:
            self.start_strips(strips)
            return None
        made: Token = _PostStrips.apply(token, self, *strips)  # type: ignore[no-untyped-call]
        return made

    # Forward

    def start_strips(self, strips: Sequence[torch.Tensor]) -> None:
        """Expect what others give, and give what lies in the strips."""
        self._expect()
        for rank, region in self.gives.items():
            at = self._strip_of(region)
            self.comm.send(sliced(strips[at].detach(), self.strips[at], region), rank, self.exchange.number)

    def _strip_of(self, region: Region) -> int:
        return next(i for i, strip in enumerate(self.strips) if contains(strip, region))

    def _expect(self) -> None:
        for rank, region in self.gets.items():
            number = self.exchange.number
            self._coming[rank] = self.comm.receive(sizes(region), self.dtype, self.device, rank, number)

    def start(self, made: torch.Tensor | None) -> None:
        """Expect what others give, and give."""
        self._expect()
        for rank, region in self.gives.items():
            assert made is not None and self.made_region is not None
            self.comm.send(sliced(made.detach(), self.made_region, region), rank, self.exchange.number)

    def assemble(self, made: torch.Tensor | None) -> torch.Tensor | None:
        """Own part and halo in one tensor; of what is held here alone, a slice without a copy."""
        if self.wanted is None:
            return None
        if not self.gets:
            assert made is not None and self.made_region is not None
            part = sliced(made.detach(), self.made_region, self.wanted)
            return part.narrow(0, 0, part.shape[0])
        form = torch.contiguous_format if made is None else memory_format(made)
        whole = torch.empty(sizes(self.wanted), dtype=self.dtype, device=self.device, memory_format=form)
        if (mine := self.exchange.piece(self.comm.rank, self.comm.rank)) is not None:
            assert made is not None and self.made_region is not None
            sliced(whole, self.wanted, mine).copy_(sliced(made.detach(), self.made_region, mine))
        coming, self._coming = self._coming, {}
        for rank, region in self.gets.items():
            sliced(whole, self.wanted, region).copy_(coming[rank].wait())
        return whole

    # Backward

    def start_back(self, gradient: torch.Tensor | None, made: _Made) -> torch.Tensor | None:
        """Send the gradients of what others gave, expect those of what this rank gave; returns its own part's."""
        number = self.exchange.number + _BACK
        for rank, region in self.gives.items():
            if rank in self.exchange.graded:
                self._coming[rank] = self.comm.receive(sizes(region), self.dtype, self.device, rank, number)
        if self.comm.rank in self.exchange.graded:
            for rank, region in self.gets.items():
                if gradient is None:
                    part = torch.zeros(sizes(region), dtype=self.dtype, device=self.device)
                else:
                    assert self.wanted is not None
                    part = sliced(gradient, self.wanted, region)
                self.comm.send(part, rank, number)
        if made.shape is None or self.made_region is None:
            return None
        if not self.gets and gradient is not None and self.made_region == self.wanted:
            return gradient
        back = torch.empty(made.shape, dtype=self.dtype, device=self.device, memory_format=made.format).zero_()
        mine = self.exchange.piece(self.comm.rank, self.comm.rank)
        if mine is not None and gradient is not None and self.wanted is not None:
            sliced(back, self.made_region, mine).copy_(sliced(gradient, self.wanted, mine))
        return back

    def finish_back(self, back: torch.Tensor | None) -> torch.Tensor | None:
        """Add the gradients that came, in the order of ranks."""
        coming, self._coming = self._coming, {}
        if not coming:
            return back
        assert back is not None and self.made_region is not None
        total = back.clone() if not self.gets else back
        for rank in sorted(coming):
            sliced(total, self.made_region, self.gives[rank]).add_(coming[rank].wait())
        return total

    def gradients_of_strips(self) -> list[torch.Tensor]:
        """What neighbours send back, by strip, added in the order of ranks."""
        coming, self._coming = self._coming, {}
        found = [torch.zeros(sizes(strip), dtype=self.dtype, device=self.device) for strip in self.strips]
        for rank in sorted(coming):
            at = self._strip_of(self.gives[rank])
            sliced(found[at], self.strips[at], self.gives[rank]).add_(coming[rank].wait())
        return found


@dataclass
class _Made:
    """How the tensor that was given looks."""

    shape: tuple[int, ...] | None = None
    format: torch.memory_format = field(default=torch.contiguous_format)


class _Post(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: torch.Tensor | None, token: Token, transfer: Transfer) -> tuple[Any, ...]:
        ctx.transfer = transfer
        ctx.set_materialize_grads(False)
        transfer.start(made)
        return None if made is None else made.narrow(0, 0, made.shape[0]), token.view(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        back = ctx.transfer.finish_back(gradients[0])
        return back, torch.zeros((), device=ctx.transfer.device), None


class _PostStrips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Token, transfer: Transfer, *strips: torch.Tensor) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.start_strips(strips)
        return token.view(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = ctx.transfer.gradients_of_strips()
        return torch.zeros((), device=ctx.transfer.device), None, *found


class _Complete(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: torch.Tensor | None, token: Token, transfer: Transfer) -> tuple[Any, ...]:
        ctx.transfer = transfer
        ctx.made = _Made() if made is None else _Made(tuple(made.shape), memory_format(made))
        ctx.set_materialize_grads(False)
        return transfer.assemble(made), token.view(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        back = ctx.transfer.start_back(gradients[0], ctx.made)
        return back, torch.zeros((), device=ctx.transfer.device), None
