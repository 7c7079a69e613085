"""The values that live between tiles: boundary maps, kept maps, statistics, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from outcore.graph.strides import CHANNELS_LAST
from outcore.ops.region import Region


def cut(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A view of a region."""
    return tensor[tuple(slice(lo, hi) for lo, hi in region)]


@dataclass
class MapStore:
    """Tensors by the name of their value."""

    device: torch.device
    """Where tiles are computed."""
    map_devices: Mapping[str, torch.device] = field(default_factory=dict)
    """Devices of maps that are kept elsewhere."""
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def write(self, name: str, shape: tuple[int, ...], region: Region, part: torch.Tensor) -> None:
        """Write a tile into a map."""
        whole = all(hi - lo == n for (lo, hi), n in zip(region, shape, strict=True))
        map_device = self.map_devices.get(name, self.device)
        if whole and map_device == part.device:
            self.values[name] = part
            return
        if name not in self.values:
            form = memory_format(part)
            pinned = map_device.type == "cpu" and part.is_cuda
            self.values[name] = torch.empty(
                shape, dtype=part.dtype, device=map_device, memory_format=form, pin_memory=pinned
            )
        cut(self.values[name], region).copy_(part)

    def read(self, name: str, region: Region) -> torch.Tensor:
        """A region of a map, on the device of the tiles."""
        part = cut(self.values[name], region)
        return part if part.device == self.device else part.to(self.device, non_blocking=True)

    def here(self, name: str) -> torch.Tensor:
        """All of a value, on the device of the tiles."""
        return self.values[name].to(self.device)

    def add_gradient(self, name: str, shape: tuple[int, ...], region: Region, part: torch.Tensor) -> None:
        """Add the gradient of a tile's region to the gradient of a map."""
        whole = all(hi - lo == n for (lo, hi), n in zip(region, shape, strict=True))
        if name not in self.gradients:
            if whole:
                self.gradients[name] = part.clone()
                return
            map_device = self.map_devices.get(name, self.device)
            form = memory_format(part)
            pinned = map_device.type == "cpu" and part.is_cuda
            self.gradients[name] = torch.empty(
                shape, dtype=part.dtype, device=map_device, memory_format=form, pin_memory=pinned
            ).zero_()
        held = cut(self.gradients[name], region)
        held.add_(part if part.device == held.device else part.to(held.device))

    def gradient(self, name: str, region: Region) -> torch.Tensor | None:
        """A region of a map's gradient, on the device of the tiles; None if there is none."""
        if name not in self.gradients:
            return None
        part = cut(self.gradients[name], region)
        return part if part.device == self.device else part.to(self.device, non_blocking=True)


def memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The memory format of a tensor, which may be a region of another."""
    last = tensor.shape[1:2] > (1,) and tensor.stride(1) == 1 and tensor.stride(-1) > 1
    if last and tensor.dim() in CHANNELS_LAST:
        return CHANNELS_LAST[tensor.dim()]
    return torch.contiguous_format
