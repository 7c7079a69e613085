"""Ways to train a network whose parameters leave the device and return every step.

Each way is a context around a step: what happens before forward and after the update. The first five are those of the
seeds, tensor by tensor; gradients are dropped before parameters leave, buffers and momentum stay on the device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.memory.offload.copy_streams import CudaCopyStreams
from outcore.memory.param_offload.writeback import Writebacks
from outcore.memory.saved_tensors.managed_forward import ManagedForward

WAYS = (
    "baseline",
    "naive",
    "pinned",
    "non-blocking",
    "pinned and non-blocking",
    "outcore",
    "outcore, update in step()",
)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Copies:
    """Seconds per step that copies took, to the device and from it."""

    to_device_s: list[float] = field(default_factory=list)
    to_host_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        rows = {"to_device": self.to_device_s, "to_host": self.to_host_s}
        tools: dict[str, Callable[[list[float]], float]] = {
            "mean": statistics.mean,
            "max": max,
            "min": min,
            "median": statistics.median,
        }
        late = {name: found[5:] or found for name, found in rows.items()}  # the seeds leave out the first five too
        return {name: {k: tool(v) for k, tool in tools.items()} for name, v in late.items() if v}


class ByTensor:
    """Parameters go to the host and back, one after the other."""

    def __init__(self, model: nn.Module, device: torch.device, *, pinned: bool, non_blocking: bool) -> None:
        self.model, self.device, self.non_blocking = model, device, non_blocking
        self.hosts: dict[nn.Parameter, torch.Tensor] = {}
        for p in model.parameters() if pinned else ():
            self.hosts[p] = torch.empty_like(p, device="cpu", pin_memory=device.type == "cuda")
        self.copied = Copies()
        self.leave()
        self.copied = Copies()

    def come(self) -> None:
        wait(self.device)
        start = time.perf_counter()
        for p in self.model.parameters():
            p.data = p.data.to(self.device, non_blocking=self.non_blocking)
        wait(self.device)
        self.copied.to_device_s.append(time.perf_counter() - start)

    def leave(self) -> None:
        wait(self.device)
        start = time.perf_counter()
        for p in self.model.parameters():
            p.grad = None
            if p in self.hosts:
                self.hosts[p].copy_(p.data, non_blocking=self.non_blocking)
                p.data = self.hosts[p]
            else:
                p.data = p.data.to("cpu", non_blocking=self.non_blocking)
        wait(self.device)
        self.copied.to_host_s.append(time.perf_counter() - start)


class Way:
    """One row of the table: a model, its optimizer, and what is done around a step."""

    def __init__(self, name: str, model: nn.Module, images: torch.Tensor, rate: float = 0.001) -> None:
        self.name, self.model, self.device = name, model, images.device
        self.optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        self.mover: ByTensor | None = None
        if name.startswith("outcore"):
            update = "step" if "step" in name else "backward"
            costs = by_bytes(account(outcore.capture(model, (images,))), 1e12)
            state = {"parameters": "offload", "update": update}
            outcore.within(
                model, (images,), memory=None, optimizer=self.optimizer, costs=costs, state=state, quiet=True
            )
        elif name != "baseline":
            self.mover = ByTensor(model, self.device, pinned="pinned" in name, non_blocking="non-blocking" in name)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        if self.mover is not None:
            self.mover.come()
        output = self.model(images)
        loss = nn.functional.cross_entropy(output if isinstance(output, torch.Tensor) else output[0], labels)
        if not isinstance(output, torch.Tensor):  # Inception's second head
            loss = loss + 0.4 * nn.functional.cross_entropy(output[1], labels)
        loss.backward()
        self.optimizer.step()
        if self.mover is not None:
            self.mover.leave()

    @torch.no_grad()
    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Share of images that are recognised."""
        if self.mover is not None:
            self.mover.come()
        self.model.eval()
        right = sum(
            int((self.model(x).argmax(1) == y).sum()) for x, y in zip(images.split(32), labels.split(32), strict=True)
        )
        self.model.train()
        if self.mover is not None:
            self.mover.leave()
        return right / len(labels)

    def copies(self, run: Callable[[], None], steps: int) -> Copies:
        """What copies took over some steps; for outcore, by events around each copy on its own stream."""
        managed_forward = self.model.__dict__.get("forward")
        if self.mover is not None:
            return self.mover.copied
        found_copies = Copies()
        if (
            not isinstance(managed_forward, ManagedForward)
            or managed_forward.keeper is None
            or self.device.type != "cuda"
        ):
            return found_copies
        copy_streams = TimedCopyStreams(self.device)
        managed_forward.keeper.writebacks = Writebacks(managed_forward.keeper.buckets, copy_streams)
        for _ in range(steps):
            copy_streams.events = []
            run()
            wait(self.device)
            for out, found in ((False, found_copies.to_device_s), (True, found_copies.to_host_s)):
                found.append(sum(a.elapsed_time(b) for o, a, b in copy_streams.events if o is out) / 1e3)
        return found_copies


class TimedRoundTrip:
    """Copies out and back, each timed."""

    def __init__(self, copy_streams: TimedCopyStreams, parts: Any) -> None:
        self.copy_streams, self.parts = copy_streams, parts

    def start(self) -> Any:
        ready, marks = self.copy_streams.now(), []
        for part in self.parts:
            for on_device, off_device in part:
                left = self.copy_streams.copy([(off_device, on_device, [ready])], out=True)
                mark = self.copy_streams.copy([(on_device, off_device, left)], out=False)
            marks += mark
        return marks


class TimedCopyStreams(CudaCopyStreams):
    """Copy streams that time every copy."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.events: list[tuple[bool, Any, Any]] = []

    def round_trip(self, parts: Any) -> Any:
        return TimedRoundTrip(self, parts)

    def copy(self, copies: Any, *, out: bool, small: bool = False) -> Any:
        stream, marks = self.streams[out, small], []
        for to, source, after in copies:
            for mark in after:
                stream.wait_event(mark.event)
            start = stream.record_event(torch.cuda.Event(enable_timing=True))
            marks += super().copy([(to, source, ())], out=out, small=small)
            self.events.append((out, start, stream.record_event(torch.cuda.Event(enable_timing=True))))
        return marks
