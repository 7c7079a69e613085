"""The cases of the table: a network at a size in a precision, with the same weights and images every time."""

from __future__ import annotations

import contextlib
import gzip
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from networks import NAMES, Training, build, side_for

from outcore.graph import Graph, capture
from outcore.graph.memory_format import ChannelsLast, channels_last, recorded
from outcore.planner.memory.evaluate import StepModel

DEVICE = "cuda"
"""Or "cpu", for a dry run (`on_cpu`)."""
TURNED = "-channels_last"
"""Ends the name of costs of a network whose images are turned inside (`outcore.graph.memory_format`)."""


@dataclass(frozen=True)
class Case:
    """One network at one size in one precision."""

    name: str
    batch: int
    side: int
    bf16: bool

    @property
    def key(self) -> dict[str, Any]:
        precision = "bf16 channels_last" if self.bf16 else "tf32"
        return {"model": self.name, "batch": self.batch, "side": self.side, "precision": precision}

    @property
    def label(self) -> str:
        return f"{self.name}-{self.batch}x{self.side}-{'bf16' if self.bf16 else 'tf32'}"

    @property
    def small(self) -> bool:
        """Whether the interpreter is the limit, so that a step runs as CUDA graphs."""
        return self.side <= 512

    def fresh(self) -> Training:
        """A new network with its batch."""
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = build(self.name)
        torch.manual_seed(2)
        images = torch.randn(self.batch, 3, self.side, self.side, device=DEVICE)
        if self.bf16:
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
        return Training(model, images, self.bf16)

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=self.bf16):
            yield

    def graph(self, model: torch.nn.Module, images: Any, turned: bool = False) -> Graph:
        """A recording of the network, its channels last inside where that is asked for."""
        graph = capture(model, (images,))
        if not turned:
            return graph
        order = channels_last(graph)
        assert isinstance(order, ChannelsLast), order
        return recorded(model, (images,), None, order)

    def costs(self, folder: Path, turned: bool = False) -> StepModel | None:
        """What costs.py has measured."""
        path = folder / f"{self.label}{TURNED if turned else ''}.keeping"
        return pickle.loads(gzip.decompress(path.read_bytes())) if path.exists() else None


def on_cpu() -> None:
    """For a dry run."""
    global DEVICE
    DEVICE = "cpu"


def cases_of(only: str = "", sizes: str = "1x4096,32x224") -> list[Case]:
    """All cases, or those that are named, in that order; a name can be a part of one, as "1x4096" or "unet"."""
    every = [
        Case(name, int(size.split("x")[0]), side_for(name, int(size.split("x")[1])), precision == "bf16")
        for size in sizes.split(",")
        for name in NAMES
        for precision in ("tf32", "bf16")
    ]
    if not only:
        return every
    found = {case.label: case for part in only.split(",") for case in every if part in case.label}
    return list(found.values())
