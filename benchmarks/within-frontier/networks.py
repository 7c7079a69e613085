"""The networks of the table, and a checkpoint around every block of each, as a user would put it."""

from __future__ import annotations

import itertools
import sys
import time
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import outcore

sys.path.append(str(Path(__file__).resolve().parents[2]))
Alone = Callable[[], AbstractContextManager[None]]
"""Gives the machine."""
NAMES = ("resnet50", "vgg19", "inception_v3", "densenet121", "unet", "convnext_tiny")

BLOCKS = {
    "resnet50": ("Bottleneck",),
    "densenet121": ("_DenseLayer", "_Transition"),
    "convnext_tiny": ("CNBlock",),
    "inception_v3": tuple(f"Inception{x}" for x in "ABCDE"),
    "unet": ("Encoder", "Decoder"),
}


def build(name: str) -> nn.Module:
    """A network with random weights."""
    if name == "unet":
        return outcore.models.UNet()
    library = torchvision().models
    options = {"init_weights": False, "aux_logits": False} if name == "inception_v3" else {}
    return getattr(library, name)(**options)


def torchvision() -> types.ModuleType:
    """The library; where it was built for another torch, its operators are declared first."""
    from tests.foreign.shim import define_torchvision_operators

    define_torchvision_operators()
    import torchvision as library

    return library


def side_for(name: str, side: int) -> int:
    """Inception-v3 takes no image smaller than 299."""
    return max(side, 299) if name == "inception_v3" else side


def blocks(name: str, model: nn.Module) -> list[nn.Module]:
    """The parts around which a user would put a checkpoint; for VGG those that end in a pool, made here."""
    if name == "vgg19":
        parts: list[nn.Module] = []
        part: list[nn.Module] = []
        for layer in model.features:
            part.append(layer)
            if isinstance(layer, nn.MaxPool2d):
                parts.append(nn.Sequential(*part))
                part = []
        model.features = nn.Sequential(*parts)
        return parts
    found = [m for m in model.modules() if type(m).__name__ in BLOCKS[name]]
    return found or [m for m in model.children() if next(m.parameters(), None) is not None]


def checkpoint_blocks(name: str, model: nn.Module) -> nn.Module:
    """torch.utils.checkpoint around every block."""
    for module in blocks(name, model):
        inner = module.forward

        def forward(self, *args, inner=inner, **kwargs):
            args = [list(a) if isinstance(a, list) else a for a in args]  # DenseNet's lists grow after the call
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

        module.forward = types.MethodType(forward, module)
    return model


def fairscale_blocks(name: str, model: nn.Module) -> nn.Module:
    """fairscale's checkpoint around every block, what a block begins with in the host's memory."""
    from fairscale.nn.checkpoint import checkpoint_wrapper

    for module in blocks(name, model):
        checkpoint_wrapper(module, offload_to_cpu=True)
    return model


class Training:
    """One way of training a network on one batch."""

    def __init__(self, model: nn.Module, images: torch.Tensor, bf16: bool) -> None:
        self.model, self.images, self.bf16 = model, images, bf16
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def loss(self) -> torch.Tensor:
        """Forward and a loss."""
        with torch.autocast(self.images.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            out = self.model(self.images)
        return out.float().square().mean()

    def step(self) -> None:
        """One step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()

    def gradients(self) -> list[torch.Tensor]:
        """Of every parameter."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        self.loss().backward()
        return [p.grad.clone() for p in self.model.parameters()]

    def measured(
        self,
        alone: Alone,
        warm: int = 2,
        least: int = 3,
        seconds: float = 0.2,
        most: float = float("inf"),
        enter: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Median time of a step, with the machine for itself, and the allocator's peak; `enter` waits for memory.

        A round is as many steps as fit into a time; it counts if they were alike, at most the third one (the second, if
        steps are long). What has reserved more than `most` bytes is not timed.
        """
        enter()
        for _ in range(warm):
            self.step()
        if self.images.device.type != "cuda":  # a dry run
            with alone():
                return {"ms": 1.0, "peak": 1, "reserved": 1, "steps": 1}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if (reserved := torch.cuda.max_memory_reserved()) > most:
            return {"skipped": "above its budget", "reserved": reserved}
        with alone():
            begun = time.perf_counter()
            first = self.timed(1)[0]
            long = first > 500 * seconds
            runs = min(15, max(min(least, 2) if long else least, int(1e3 * seconds / first)))
            rounds, times = 1, [first] if runs == 1 else self.timed(runs)
            while rounds < (2 if long else 3) and times[runs // 2] > 1.04 * times[0]:
                rounds, times = rounds + 1, self.timed(runs)
            alone_s = time.perf_counter() - begun
        return {
            "ms": times[(runs - 1) // 2],
            "fastest_ms": times[0],
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "steps": runs,
            "rounds": rounds,
            "alone_s": round(alone_s, 2),
        }

    def timed(self, runs: int) -> list[float]:
        """Milliseconds of some steps, the fastest first."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
