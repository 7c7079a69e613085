"""A case and its training step, as every way of training takes it."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.frontier.networks import NETWORKS, Cast, Network, loss_of, ordered

__all__ = ["Case", "Training", "alike", "peaks", "reset_peaks"]


@dataclass(frozen=True)
class Case:
    """One network at one size in one precision."""

    name: str
    size: str
    bf16: bool

    @property
    def label(self) -> str:
        return f"{self.name} {self.shape} {'bf16' if self.bf16 else 'tf32'}"

    @property
    def shape(self) -> str:
        """The input, in short: samples and the length of a side or a sequence."""
        shape = self.network.sizes[self.size]
        return f"{shape[0]}x{shape[-1]}"

    @property
    def network(self) -> Network:
        return NETWORKS[self.name]

    def fresh(self, device: str, channels_last: bool) -> Training:
        """A new network with its batch: the same numbers every time."""
        torch.manual_seed(0)
        with torch.device(device):
            model: nn.Module = Cast(self.network.build(self.size), self.bf16)
        for parameter in model.parameters():
            if parameter.dim() in (4, 5):
                parameter.data = ordered(parameter.data, channels_last)
        args, kwargs = self.network.batch(self.size, device, channels_last)
        return Training(model.train(), args, kwargs)


class Training:
    """A model, its batch and its optimizer; what runs can be replaced."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        self.run: Callable[..., Any] = model
        self.before_step: Callable[[], None] = lambda: None
        self.replay: Callable[[], None] | None = None
        """The whole step as one CUDA graph."""
        self.device = next(model.parameters()).device.type

    def forward_backward(self) -> None:
        """Gradients of the loss."""
        self.before_step()
        loss_of(self.run(*self.args, **self.kwargs)).backward()

    def step(self) -> None:
        """One step of training."""
        if self.replay is not None:
            self.replay()
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.forward_backward()
        self.optimizer.step()

    def gradients(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of every parameter, at given weights, on the host."""
        with torch.no_grad():
            for name, there in self.model.state_dict().items():
                there.copy_(state[name])
        torch.manual_seed(7)
        if self.replay is not None:
            self.replay()
        else:
            self.optimizer.zero_grad(set_to_none=True)
            self.forward_backward()
        return {n: p.grad.detach().cpu() for n, p in self.model.named_parameters() if p.grad is not None}

    def state(self) -> dict[str, torch.Tensor]:
        """The weights and statistics, copied to the host."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}

    def as_graph(self) -> None:
        """Record the whole step, with the optimizer in it, as one CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward_backward()
            self.optimizer.step()
        self.replay = graph.replay

    def timed(self, steps: int, seconds: float) -> list[float]:
        """Milliseconds of some steps, one after the other without waiting; fewer if they take too long."""
        found: list[float] = []
        if self.device != "cuda":
            while len(found) < steps and (len(found) < 3 or sum(found) < 1e3 * seconds):
                begin = time.perf_counter()
                self.step()
                found.append(1e3 * (time.perf_counter() - begin))
            return found
        first = self._events(1)
        if first[0] * steps > 1e3 * seconds:
            return first + self._events(max(2, int(1e3 * seconds / first[0])))
        return self._events(steps)

    def _events(self, steps: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def reset_peaks(device: str) -> None:
    """Count peaks from now on, with nothing unused reserved."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks(training: Training, measure: Callable[[], object]) -> dict[str, int]:
    """What something holds and reserves at most; on a CPU live bytes, counted by torch's profiler, are both."""
    if training.device == "cuda":
        measure()
        torch.cuda.synchronize()
        return {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    from outcore.compiled.measured_peak import measured_peak

    held = [*training.model.parameters(), *training.model.buffers(), *training.args, *training.kwargs.values()]
    held += [p.grad for p in training.model.parameters() if p.grad is not None]
    state = [t for kept in training.optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor)]
    storages = [t.untyped_storage() for t in (*held, *state)]
    own = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    live = own + measured_peak(measure, torch.device("cpu"))
    return {"reserved": live, "allocated": live}


def alike(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> dict[str, Any]:
    """How gradients compare with those of plain training: equal ones, and the largest difference.

    Names may differ by the parts that checkpoints were put around, so that tensors are compared in their order.
    """
    if len(found) != len(plain):
        return {"gradients": len(plain), "missing": len(plain) - len(found)}
    pairs = list(zip(found.values(), plain.values(), strict=True))
    scale = max(float(b.abs().max()) for _, b in pairs) or 1.0
    differences = [float((a.double() - b.double()).abs().max()) for a, b in pairs]
    own = [d / (float(b.abs().max()) or 1.0) for d, (_, b) in zip(differences, pairs, strict=True)]
    return {
        "gradients": len(pairs),
        "bitwise": sum(torch.equal(a, b) for a, b in pairs),
        "largest_difference": max(differences) / scale,
        "largest_difference_of_own": max(own),
    }
