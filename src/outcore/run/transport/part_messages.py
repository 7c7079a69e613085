"""Messages between the ranks that share an image, over the engine's own transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from outcore.graph.strides import contiguous_stride
from outcore.run.ranks.current_work import CurrentWork
from outcore.run.transport.p2p import IncomingTensor, OutgoingTensor, PointToPoint, TensorLayout

_TAGS = 1 << 22
"""The first tag above those of transfers between stages and of reductions."""

Record = Callable[..., None]
"""Records an event of the timeline: stream, kind, name, begin, end, then stage, micro-batch, replica and bytes."""


class PartMessages:
    """This rank's end of the messages of its grid; a `Communicator`."""

    def __init__(
        self, p2p: PointToPoint | None, rank: int, size: int, first: int, place: CurrentWork, record: Record
    ) -> None:
        self.rank, self.size = rank, size
        self._p2p, self._first, self.place, self._record = p2p, first, place, record
        self._going: list[OutgoingTensor] = []
        self.waits: list[tuple[float, float]] = []
        """When this rank did nothing but wait for messages, since it was last asked."""

    def send(self, tensor: torch.Tensor, target: int, number: int) -> None:
        """Send a tensor; it may be changed as soon as this returns."""
        assert self._p2p is not None, "a rank on its own has nobody to send to"
        given, to = tensor.detach(), self._first + target
        layout = _layout(tuple(given.shape), given.dtype)
        if not self._p2p.copies(to, layout.nbytes):
            given = given.clone(memory_format=torch.contiguous_format)
        with self.place.communicating():
            self._going = [going for going in self._going if not going.ended()]
            done = self._done(f"halo→{to}", layout.nbytes)
            self._going.append(self._p2p.send(given, layout, to, _TAGS + number, done, given_away=True))

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: int, number: int
    ) -> _Incoming:
        """Receive a tensor."""
        assert self._p2p is not None, "a rank on its own receives nothing"
        layout = _layout(shape, dtype)
        done = self._done(f"halo←{self._first + source}", layout.nbytes)
        with self.place.communicating():
            return _Incoming(self._p2p.receive(layout, self._first + source, _TAGS + number, done), self)

    def _done(self, name: str, nbytes: int) -> Callable[[str, Any, Any], None]:
        stage, micro_batch = self.place.stage, self.place.micro_batch
        return lambda stream, start, end: self._record(stream, "halo", name, start, end, stage, micro_batch, 0, nbytes)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for going in self._going:
            going.finish()
        self._going.clear()

    def abandon(self) -> list[Any]:
        """What is under way when this rank fails."""
        going, self._going = self._going, []
        return list(going)


class _Incoming:
    def __init__(self, tensor: IncomingTensor, messages: PartMessages) -> None:
        self._tensor, self._messages = tensor, messages

    def wait(self) -> torch.Tensor:
        began = time.perf_counter()
        with self._messages.place.communicating():
            found = self._tensor.wait()
        self._messages.waits.append((began, time.perf_counter()))
        return found


def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> TensorLayout:
    return TensorLayout(shape, contiguous_stride(shape), dtype)
