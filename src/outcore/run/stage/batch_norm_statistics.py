"""Batch normalisation across micro-batches, replicas and ranks: what the running statistics mean.

The plan says which of three meanings holds; each is defined by what plain PyTorch would do on one device.

micro_batch   Each micro-batch is normalised by itself, and the running statistics move with each, in the order of the
              batch: the result of a plain loop over all micro-batches. Where copies of a stage see different
              micro-batches (GEMS, data parallelism) each rank starts from zero; because the moving average is linear,
              what the copies collected is added up with the weights that the order of the batch gives them.
deferred      Each micro-batch is normalised by itself, but the running statistics move once per step, by mean and
              variance of the whole batch at that layer (torchgpipe's DeferredBatchNorm).
synchronised  Mean and variance of the whole batch are also what normalises. The micro-batches of a step are then not
              independent, so each replica must take its batch in one piece, and all replicas at the same time.

While a stage runs, its layers write into buffers of zeros; the real ones change once, at the end of the step, on all
copies alike. What they collected is added up over the copies while gradients are, so that a slow link is waited for
once. A stage with a single copy under `micro_batch` is left entirely to torch.

Synchronised, a norm uses the statistics of all copies of a stage. Forward adds up counts, sums and sums of squares over
the copies, backward the two sums that every element's gradient depends on: the derivative of normalising the whole
batch on one device (Ioffe and Szegedy 2015). The gradients of scale and shift stay local; they are added up with those
of all other parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from outcore.errors import PlanError
from outcore.ops import find, operation
from outcore.program.plan.document import Plan
from outcore.run.stage.recorded_stages import RecordedStages
from outcore.run.transport.all_reduce import GlooAllReduce
from outcore.run.transport.watched_wait import WatchedWait


@dataclass(slots=True)
class _Layer:
    """What one layer collected in a step."""

    name: str
    module: _BatchNorm
    mean: torch.Tensor
    var: torch.Tensor
    count: float = 0.0
    """Under `deferred`, rows that were normalised; under `micro_batch`, calls."""


class RunningStatistics:
    """The running statistics of one rank's stages."""

    def __init__(
        self, plan: Plan, copies: Mapping[int, int], groups: Mapping[tuple[int, ...], Any], watched_wait: WatchedWait
    ) -> None:
        self.mode, self._watched_wait = plan.batch_norm, watched_wait
        self._copies, self._groups, self._parts = copies, groups, plan.parts
        self._layers: dict[int, dict[str, _Layer]] = {}
        self._versions: dict[int, list[int]] = {}
        self._started: dict[int, tuple[torch.Tensor, GlooAllReduce]] = {}
        pieces = plan.micro_batches * plan.batches
        if self.mode == "synchronised" and (pieces > 1 or (plan.schedule == "gems" and len(plan.stages) > 1)):
            raise PlanError(
                f"synchronised batch normalisation needs every replica's batch in one piece, but this plan has "
                f"{pieces} micro-batches under {plan.schedule}; use batch_norm deferred or micro_batch, or 1 of them"
            )

    @contextlib.contextmanager
    def collecting(self, form: RecordedStages, stage: int, number: int, total: int) -> Iterator[None]:
        """Around the forward of micro-batch `number` of `total` in a stage."""
        if self.mode != "micro_batch":
            _refuse_own_norms(form.parts[stage], self.mode)
        if self.mode == "synchronised":
            self._synchronise(form, stage)
        collected = self._collected(form, stage)
        if not collected:
            yield
            return
        swapped = []
        for layer in collected.values():
            module = layer.module
            swapped.append((module, module.running_mean, module.running_var, module.num_batches_tracked))
            module.running_mean = torch.zeros_like(layer.mean, dtype=module.running_mean.dtype)  # type: ignore[union-attr]
            module.running_var = torch.zeros_like(layer.var, dtype=module.running_var.dtype)  # type: ignore[union-attr]
            module.num_batches_tracked = torch.zeros_like(module.num_batches_tracked)  # type: ignore[arg-type]
        momenta = [layer.module.momentum for layer in collected.values()]
        try:
            if self.mode == "deferred":
                for layer in collected.values():
                    layer.module.momentum = 1.0
            yield
            for layer, momentum in zip(collected.values(), momenta, strict=True):
                self._add(layer, momentum, form, number, total)
        finally:
            for (module, mean, var, tracked), momentum in zip(swapped, momenta, strict=True):
                module.running_mean, module.running_var, module.num_batches_tracked = mean, var, tracked
                module.momentum = momentum

    def _collected(self, form: RecordedStages, stage: int) -> dict[str, _Layer]:
        """The layers whose running statistics are collected here and not left to torch."""
        if self.mode == "synchronised" or (self.mode == "micro_batch" and self._copies[stage] == 1):
            return {}
        layers = self._layers.setdefault(stage, {})
        found = {}
        for name, module in form.parts[stage].named_modules():
            if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
                if name not in layers:
                    zeros = torch.zeros_like(module.running_mean, dtype=torch.float64)
                    layers[name] = _Layer(name, module, zeros, zeros.clone())
                found[name] = layers[name]
        return found

    def _add(self, layer: _Layer, momentum: float | None, form: RecordedStages, number: int, total: int) -> None:
        module = layer.module
        assert module.running_mean is not None and module.running_var is not None
        mean, var = module.running_mean.double(), module.running_var.double()
        calls = int(module.num_batches_tracked) if module.num_batches_tracked is not None else 1
        if not calls:
            return
        if self.mode == "micro_batch":
            share = (1 - momentum) ** (calls * (total - 1 - number)) if momentum is not None else calls
            layer.mean += share * mean
            layer.var += share * var
            layer.count += calls
            return
        if calls > 1:
            raise PlanError(f"{layer.name} is called {calls} times in a stage; use batch_norm micro_batch")
        rows = _rows(form, layer.name)
        # Of rows, sum and sum of squares of the whole batch; the layer gives mean and unbiased variance of a part.
        layer.count += rows
        layer.mean += rows * mean
        layer.var += (rows - 1) * var + rows * mean * mean

    def start(self, form: RecordedStages) -> None:
        """Start to add up what the copies of stages collected, when all forwards and reductions of this rank have been
        started; collective over the copies of each stage."""
        for stage in sorted(form.parts):
            # Also those that collected nothing here: another copy may have.
            layers = list(self._collected(form, stage).values())
            if layers and self._copies[stage] > 1 and stage not in self._started:
                row = _row_of(layers)
                self._started[stage] = row, GlooAllReduce(row, self._groups[stage,], self._watched_wait)

    def update_running(self, form: RecordedStages) -> None:
        """Update the running statistics, on all copies alike; collective over the copies of each stage."""
        self.start(form)
        for stage in sorted(form.parts):
            if not (layers := list(self._collected(form, stage).values())):
                continue
            if stage in self._started:
                row, total = self._started.pop(stage)
                total.wait()
                row = row / (self._parts if stage == 0 else 1)
            else:
                row = _row_of(layers)
            for layer in layers:
                n = layer.mean.numel()
                mean, var, count, row = row[:n], row[n : 2 * n], float(row[2 * n]), row[2 * n + 1 :]
                self._move(layer, mean, var, count)
        self._layers.clear()

    def _move(self, layer: _Layer, mean: torch.Tensor, var: torch.Tensor, count: float) -> None:
        module, m = layer.module, layer.module.momentum
        assert module.running_mean is not None and module.running_var is not None
        before = int(module.num_batches_tracked) if module.num_batches_tracked is not None else 0
        if self.mode == "deferred":
            average = mean / count
            spread = (var - count * average * average) / max(count - 1, 1)
            mean, var, steps = average, spread.clamp(min=0), 1
            keep = 1 - m if m is not None else before / (before + 1)
            mean, var = (1 - keep) * mean, (1 - keep) * var
        else:
            steps = round(count)
            keep = (1 - m) ** steps if m is not None else before / (before + steps)
            if m is None:
                mean, var = mean / (before + steps), var / (before + steps)
        module.running_mean.copy_(keep * module.running_mean.double() + mean)
        module.running_var.copy_(keep * module.running_var.double() + var)
        if module.num_batches_tracked is not None:
            module.num_batches_tracked += steps

    def abandon(self) -> list[Any]:
        """What is under way after a failure, which must outlive its connections."""
        left = list(self._started.values())
        self._started.clear()
        return left

    def close(self) -> None:
        """Close all connections."""
        self._groups = {}

    def _synchronise(self, form: RecordedStages, stage: int) -> None:
        """Make the layers of a stage that has copies normalise over all of them."""
        part = form.parts[stage]
        if self._copies[stage] == 1 or part.instead:
            return
        for name, module in part.named_modules():
            if isinstance(module, _BatchNorm) and module.training:
                part.instead[name] = synchronised_norm(module, partial(self._total, stage=stage))

    def _total(self, row: torch.Tensor, stage: int) -> torch.Tensor:
        """The sum of a row over the copies of a stage."""
        return self._watched_wait.sum_(row.cpu(), self._groups[stage,]).to(row.device)

    def share_buffers(self, form: RecordedStages, first: Mapping[int, int]) -> None:
        """Copy other buffers that a step wrote from the first copy to all."""
        for stage, part in form.parts.items():
            if self._copies[stage] == 1:
                continue
            buffers = [b for b in _other_buffers(part) if not b.is_meta]
            versions = [b._version for b in buffers]
            if versions != self._versions.setdefault(stage, versions):
                make_equal(buffers, first[stage], self._groups[stage,], self._watched_wait)
                self._versions[stage] = [b._version for b in buffers]


def make_equal(tensors: Sequence[torch.Tensor], source: int, group: Any, watched_wait: WatchedWait) -> None:
    """Copy the values of one rank to all of a group, in place."""
    with torch.no_grad():
        for tensor in tensors:
            host = watched_wait.broadcast_(tensor.detach().cpu().contiguous(), source, group)
            if host.data_ptr() != tensor.data_ptr():
                tensor.copy_(host)


def _refuse_own_norms(part: Any, mode: str) -> None:
    """Refuse batch norms that are no module of torch's own: their statistics would be those of a part of the batch."""
    for step in getattr(part, "steps", ()):
        own = step.kind == "function" and find(getattr(step.target, "__name__", "")) is operation("batch_norm")
        if own and (step.kwargs.get("training") is True or any(a is True for a in step.args[5:6])):
            raise PlanError(
                f"plan.batch_norm={mode} is known for torch's own BatchNorm modules; {step.name} is called by another "
                "module (a Keras model's twin has its own): use batch_norm micro_batch, or freeze it"
            )


def _row_of(layers: Sequence[_Layer]) -> torch.Tensor:
    """Mean, variance and count of layers, one after the other."""
    return torch.cat([torch.cat([la.mean, la.var, la.mean.new_tensor([la.count])]) for la in layers])


def _rows(form: RecordedStages, name: str) -> int:
    """The number of elements over which a channel was averaged."""
    call = next(c for c in form.graph.calls.values() if c.block == name)
    shape = form.graph.values[call.inputs[0]].shape
    return prod(shape) // shape[1]


def _other_buffers(part: nn.Module) -> list[torch.Tensor]:
    return [
        buffer
        for module in part.modules()
        if not isinstance(module, _BatchNorm)
        for buffer in module._buffers.values()
        if buffer is not None
    ]


Total = Callable[[torch.Tensor], torch.Tensor]
"""Adds up a row over all copies."""


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, total_of: Total) -> tuple[torch.Tensor, ...]:
        dims = [d for d in range(x.ndim) if d != 1]
        wide = x.double()
        count = wide.new_tensor([x.numel() // x.shape[1]])
        row = total_of(torch.cat([count, wide.sum(dims), (wide * wide).sum(dims)]))
        total, channels = row[0], x.shape[1]
        mean = row[1 : 1 + channels] / total
        var = (row[1 + channels :] / total - mean * mean).clamp(min=0)
        shape = [1, channels] + [1] * (x.ndim - 2)
        scale = (var + eps).rsqrt().view(shape)
        normal = ((wide - mean.view(shape)) * scale).to(x.dtype)
        ctx.save_for_backward(normal, scale)
        ctx.total_of, ctx.total, ctx.dims, ctx.shape = total_of, float(total), dims, shape
        ctx.mark_non_differentiable(mean, var)
        return normal, mean, var, total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        normal, scale = ctx.saved_tensors
        got, n = gradients[0].double(), normal.double()
        row = ctx.total_of(torch.cat([got.sum(ctx.dims), (got * n).sum(ctx.dims)])) / ctx.total
        half = row.numel() // 2
        back = scale * (got - row[:half].view(ctx.shape) - n * row[half:].view(ctx.shape))
        return back.to(normal.dtype), None, None


def synchronised_norm(module: _BatchNorm, total_of: Total) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function to call in place of a layer."""

    def call(x: torch.Tensor) -> torch.Tensor:
        normal, mean, var, total = _Normalise.apply(x, module.eps, total_of)  # type: ignore[no-untyped-call]
        if module.running_mean is not None and module.running_var is not None:
            assert module.num_batches_tracked is not None
            module.num_batches_tracked += 1
            factor = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
            with torch.no_grad():
                unbiased = var * total / (total - 1)
                module.running_mean.copy_((1 - factor) * module.running_mean.double() + factor * mean)
                module.running_var.copy_((1 - factor) * module.running_var.double() + factor * unbiased)
        if module.affine:
            shape = [1, -1] + [1] * (x.ndim - 2)
            normal = normal * module.weight.view(shape) + module.bias.view(shape)
        made: torch.Tensor = normal
        return made

    return call
