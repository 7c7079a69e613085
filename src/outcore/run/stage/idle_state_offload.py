"""Under GEMS a rank holds two stages and computes with one: the state of the other is offloaded.

Memory is what GEMS is chosen for, and its price is that every rank holds parameters, gradients and optimizer state of
two stages. But a rank computes one micro-batch at a time. So the stage that comes next is fetched when its forward or
backward begins, and the other is offloaded. Parameters do not change between two updates, so they are dropped from the
device without a copy; gradients are copied out and back. The optimizer takes its step one stage at a time, and its
state is on the device only for that.

A parameter stays the same object with the same history: only its memory is exchanged. Between steps everything is in
off-device storage (pinned host memory for a GPU, an unlinked file for a CPU), so whoever reads or writes parameters
there, saving and loading included, need not know.

A parameter that two stages of the rank use (a tied one, or all of the middle stage when the number of ranks is odd)
stays on the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn


class IdleStateOffload:
    """The state of several stages on one rank, of which one at a time is on the device."""

    def __init__(self, stages: Mapping[int, Sequence[nn.Parameter]], device: torch.device) -> None:
        users: dict[int, int] = {}
        for parameters in stages.values():
            for parameter in parameters:
                users[id(parameter)] = users.get(id(parameter), 0) + 1
        self._buckets = {k: [p for p in row if users[id(p)] == 1] for k, row in stages.items()}
        self._device = device
        self._away: list[torch.Tensor] = []
        self._resident: int | None = None
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._off_device: list[torch.Tensor] = []
        self._state: dict[int, torch.Tensor] = {}
        self._rows: dict[tuple[nn.Parameter, torch.dtype], torch.Tensor] = {}
        for row in self._buckets.values():
            for parameter in row:
                off_device = self._off_device_memory(parameter)
                off_device.copy_(parameter.data)
                parameter.data = off_device
                if parameter.requires_grad:
                    self._gradients[parameter] = self._off_device_memory(parameter)

    @property
    def offloaded(self) -> list[torch.Tensor]:
        """All memory off the device."""
        return self._away

    def enter(self, stage: int) -> None:
        """Fetch the state of a stage, and offload any other."""
        if stage == self._resident:
            return
        self.leave()
        self._resident = stage
        self._off_device = [p.data for p in self._buckets[stage]]
        for parameter in self._buckets[stage]:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = self._brought(parameter.data)
            if gradient is not None:
                parameter.grad = self._brought(gradient)

    def leave(self, *, written: bool = False) -> None:
        """Offload the stage on the device; `written` if its parameters have changed there."""
        if self._resident is None:
            return
        for parameter, off_device in zip(self._buckets[self._resident], self._off_device, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if written:
                off_device.copy_(parameter.data)
            parameter.data = off_device
            if gradient is not None:
                parameter.grad = self._gradients[parameter].copy_(gradient)
        self._resident, self._off_device = None, []

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update all parameters, one stage after the other, then those that are always on the device."""
        self.leave()
        every = [p for group in optimizer.param_groups for p in group["params"]]
        waiting = {p: p.grad for p in every if p.grad is not None}
        for parameter in every:
            parameter.grad = None
        for stage, bucket in self._buckets.items():
            for parameter in bucket:
                parameter.grad = waiting.pop(parameter, None)
            self.enter(stage)
            self._fetch_state(optimizer, bucket)
            optimizer.step()
            for parameter in bucket:
                parameter.grad = None
            self._store_state(optimizer, bucket)
            self.leave(written=True)
        for parameter, gradient in waiting.items():
            parameter.grad = gradient
        if waiting:
            optimizer.step()

    def make_row(self, parameter: nn.Parameter, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for gradients that are reduced over copies, where the parameter is, which is not on the device."""
        if parameter not in self._gradients:
            return torch.empty(count, dtype=dtype, device=parameter.device)
        if (parameter, dtype) not in self._rows:
            self._rows[parameter, dtype] = self._off_device_memory(torch.empty(count, dtype=dtype, device=self._device))
        return self._rows[parameter, dtype]

    def _fetch_state(self, optimizer: torch.optim.Optimizer, bucket: Sequence[nn.Parameter]) -> None:
        for parameter in bucket:
            row = optimizer.state.get(parameter, {})
            for key, value in row.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    row[key] = self._brought(value)
                    self._state[id(row[key])] = value

    def _store_state(self, optimizer: torch.optim.Optimizer, bucket: Sequence[nn.Parameter]) -> None:
        for parameter in bucket:
            row = optimizer.state.get(parameter, {})
            for key, value in row.items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    off_device = self._state.pop(id(value), None)
                    row[key] = (self._off_device_memory(value) if off_device is None else off_device).copy_(value)

    def _brought(self, off_device: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu":
            return off_device.clone()
        return off_device.to(self._device, non_blocking=True)

    def _off_device_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Off-device memory for a tensor, in its layout."""
        if like.device.type == "cuda":
            off_device = torch.empty_like(like, device="cpu", pin_memory=True, requires_grad=False)
        else:
            with tempfile.TemporaryFile(prefix="outcore") as file:
                size = max(1, like.numel() * like.element_size())
                file.truncate(size)
                row = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,)))
            flat = row[: like.numel() * like.element_size()].view(like.dtype)
            off_device = flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())
        self._away.append(off_device)
        return off_device
