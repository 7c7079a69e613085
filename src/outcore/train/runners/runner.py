"""Runners: the one interface between the training loop and what executes the network.

`PlainRunner` is the ordinary loop of PyTorch around a model on one device; the model may have been put within a budget
or be streamed, which changes how it runs and not what it computes. Several ranks are the engine's, behind the same
interface (`outcore.train.runners.engine_runner`). The loop above knows neither.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from outcore.cost.measured.live_bytes import LiveBytes
from outcore.data import Batch
from outcore.errors import TrainError
from outcore.graph.structure import leaves
from outcore.program import Timeline
from outcore.run.engine.batch import arguments
from outcore.run.engine.setup import check_gradients, check_loss, check_optimizer
from outcore.train.examples.feed import MicroBatch, tensors_of
from outcore.train.run_folder.saving import load_state, save_state
from outcore.train.runners.fitting import FittedModel
from outcore.train.settings.config import computing

__all__ = ["PlainRunner", "Runner", "StepOutcome"]

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step."""

    loss: float
    gradient_norm: float | None = None
    updated: bool = True
    """False where the gradients were not finite and the weights were not updated."""


class Runner(Protocol):
    """Executes steps and keeps the state of training."""

    rank: int
    optimizer: torch.optim.Optimizer | None
    lazy: bool
    """Whether it reads slides itself, region by region."""
    replica: tuple[int, int]
    """Which of how many shares of the data it trains on."""
    whole_steps: bool
    """Whether a last step that is not full must be left out."""

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepOutcome:
        """Train on all of them, then update the weights once."""

    def evaluate(self, micro_batch: MicroBatch) -> tuple[float, Any]:
        """The loss in eval mode, and what the model returns; None on ranks that do not have it."""

    def peak_bytes(self) -> int | None:
        """Device memory at its highest in the last step, where it was counted."""

    def replan(self) -> str | None:
        """Plan again with more memory left free, after memory ran out, and describe it; None where nothing can be
        done."""

    def timeline(self) -> Timeline | None:
        """The last step on every rank, where it was recorded; all ranks ask together."""

    def close(self) -> None:
        """Release everything after the last step."""

    def agree(self, stop_request: int) -> int:
        """The signal that any rank was sent, the same on all; 0 for none."""

    def broadcast(self, figures: dict[str, float]) -> dict[str, float]:
        """The figures of the first rank, on all."""

    def save(self, path: Path, position: dict[str, Any], *, keep: int) -> None:
        """Write a checkpoint: weights, optimizer, random numbers, and where the loop stands."""

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint back; returns where the loop stood."""


class PlainRunner:
    """One device and one process."""

    rank = 0
    replica = (0, 1)
    whole_steps = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        loss: Loss,
        device: str = "cpu",
        precision: str = "fp32",
        clip: float | None = None,
        skip_nan: bool = False,
        lazy: bool = False,
        accumulate: int = 1,
        refit: Callable[[], tuple[FittedModel, str] | None] = lambda: None,
    ) -> None:
        self.model, self.loss, self.device = model.to(device), loss, torch.device(device)
        self.optimizer: torch.optim.Optimizer | None = optimizer([p for p in model.parameters() if p.requires_grad])
        check_optimizer(self.optimizer, self.model.parameters(), TrainError)
        self.lazy = lazy
        self._clip, self._skip_nan, self._accumulate = clip, skip_nan, accumulate
        self._computes = precision
        self.scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
        self._refit = refit
        self._steps = 0
        self._peak: int | None = None
        self._counted_size = 0

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepOutcome:
        """Accumulate the gradients of all micro-batches, weighted by their examples, and update."""
        assert self.optimizer is not None
        if not self.model.training:  # setting the mode of thousands of modules takes a while
            self.model.train()
        count = sum(m.examples for m in micro_batches)
        losses = []
        with self._counted(micro_batches):
            self.optimizer.zero_grad(set_to_none=True)
            for micro_batch in micro_batches:
                share = micro_batch.examples / count
                with self._precision():
                    loss = self._loss(micro_batch)
                check_loss(loss, TrainError)
                losses.append((share, _PendingScalar(loss.detach())))
                self.scaler.scale(loss * share if share != 1.0 else loss).backward()
            if self._steps == 1:
                check_gradients(sum(p.grad is not None for p in self.model.parameters()), TrainError)
            total = sum(share * loss.value() for share, loss in losses)
            norm, updated = self._update(total)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a step that is timed is a step that is done
        return StepOutcome(total, norm, updated)

    def evaluate(self, micro_batch: MicroBatch) -> tuple[float, Any]:
        """The loss in eval mode, and what the model returns."""
        self.model.eval()
        with torch.no_grad(), self._precision():
            output = self._output(micro_batch.inputs)
            return float(self.loss(output, _moved(micro_batch.targets, self.device))), output

    def peak_bytes(self) -> int | None:
        """The allocator's peak of the last step on a GPU; live tensors of the largest step counted, on a CPU."""
        return self._peak

    def replan(self) -> str | None:
        """Plan again for less memory; the weights are the same tensors."""
        found = self._refit()
        if found is None:
            return None
        made, said = found
        self.model, self.lazy = made.model, made.lazy or self.lazy
        return said

    def timeline(self) -> Timeline | None:
        """Return None: a plain step is not recorded."""
        return None

    def close(self) -> None:
        """Nothing to release."""

    def agree(self, stop_request: int) -> int:
        """The signal that this process was sent; there is no other."""
        return stop_request

    def broadcast(self, figures: dict[str, float]) -> dict[str, float]:
        """The figures themselves; there is no other process."""
        return figures

    def save(self, path: Path, position: dict[str, Any], *, keep: int) -> None:
        """Write a checkpoint in the runtime's format."""
        assert self.optimizer is not None
        where = position["position"]
        save_state(
            path,
            self.model,
            self.optimizer,
            self.scaler,
            step=where["step"] * self._accumulate,  # the engine counts micro-batches
            samples=where["examples"],
            extra={**position, "calls": getattr(self.model, "_step", None)},
            keep=keep,
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint back."""
        assert self.optimizer is not None
        state = load_state(path, self.model, self.optimizer, self.scaler)
        if state.get("calls") is not None and hasattr(self.model, "_step"):
            self.model._step = state["calls"]  # a streamed model draws its masks by the number of the call
        return state

    def _loss(self, micro_batch: MicroBatch) -> Tensor:
        output = self._output(micro_batch.inputs)
        return self.loss(output, _moved(micro_batch.targets, self.device))

    def _output(self, inputs: Any) -> Any:
        """What the model returns; inputs in a dictionary are its keyword arguments."""
        args, kwargs = arguments(inputs)
        return self.model(*self._arguments(args), **{name: self._arguments(x)[0] for name, x in kwargs.items()})

    def _arguments(self, inputs: Any) -> tuple[Any, ...]:
        given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        made = [x.tensor() if isinstance(x, Batch) and not self.lazy else x for x in given]
        return tuple(_moved(x, self.device) for x in made)

    def _update(self, loss: float) -> tuple[float | None, bool]:
        assert self.optimizer is not None
        self.scaler.unscale_(self.optimizer)
        norm = None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._clip is not None or self._skip_nan:
            norm = float(nn.utils.clip_grad_norm_(parameters, self._clip if self._clip is not None else float("inf")))
        finite = loss == loss and abs(loss) != float("inf") and (norm is None or norm < float("inf"))
        if not finite and not self.scaler.is_enabled():
            self.optimizer.zero_grad(set_to_none=True)
            return norm, False
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return norm, finite

    @contextlib.contextmanager
    def _counted(self, micro_batches: Sequence[MicroBatch]) -> Any:
        """Count memory: on a GPU always; on a CPU in the second step, when the optimizer has its state, and in any
        that has more to do than those that were counted."""
        self._steps += 1
        size = max(map(_numbers, micro_batches), default=0)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield
            statistics = torch.cuda.memory.memory_stats_as_nested_dict(self.device)
            self._peak = int(statistics["allocated_bytes"]["all"]["peak"])
        elif self._steps > 1 and size > self._counted_size:
            self._counted_size = size
            given = [tensors_of((m.inputs, m.targets)) for m in micro_batches]
            held = {id(t): t for t in self._held()}
            with _RealBytes((*held.values(), *itertools.chain(*given))) as live:
                yield
            # Of micro-batches the one at work counts; those that wait their turn are in host memory on any device.
            peak = live.peak + _bytes(held.values()) + max(map(_bytes, given), default=0)
            self._peak = max(peak, self._peak or 0)
        else:
            yield

    def _held(self) -> list[Tensor]:
        """Tensors that are there before a step: weights, buffers, the optimizer's state."""
        assert self.optimizer is not None
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *state]

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return computing(self._computes, self.device.type)


class _PendingScalar:
    """A number that a device computes; reading it waits for that number and not for what was launched behind it.

    A loss is read before the update. Were it copied then, the device would be idle while the update is launched.
    """

    def __init__(self, number: Tensor) -> None:
        self._number, self._there = number, None
        if number.device.type == "cuda":
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True, device="cpu")
            self._number.copy_(number, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def value(self) -> float:
        if self._there is not None:
            self._there.synchronize()
        return float(self._number)


class _RealBytes(LiveBytes):
    """Live bytes without tensors that have no memory: fake tensors of whole images while a network is recorded."""

    def _note(self, tensor: Tensor, operation: str, source: int | None, *, counted: bool = True) -> None:
        if not tensor.is_meta and not isinstance(tensor, FakeTensor):
            super()._note(tensor, operation, source, counted=counted)


def _numbers(micro_batch: MicroBatch) -> int:
    """How much a micro-batch gives the network to work on."""
    return sum(math.prod(leaf.shape) for _, leaf in leaves(micro_batch.inputs, (Tensor, Batch)))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, device) for v in value)
    return {k: _moved(v, device) for k, v in value.items()} if isinstance(value, dict) else value
