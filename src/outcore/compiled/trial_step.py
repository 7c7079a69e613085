"""Steps that are tried before training, with the user's own batch; the model is as it was afterwards.

The first one compiles. Those after it are measured. On a GPU they are those of plans that are not compiled
(`outcore.memory.saved_tensors.trial_steps`): one after the other without waiting, with memory where the optimizer's
state will be, loops that hold their output, memory that was given back in between; so what is reserved later is seen
now. They run without the limit that a process may have set for itself: under it, the allocator would give back what it
keeps, search again, and a library whose workspace was refused would go on with another algorithm, and none of that
would be seen in what is reserved. What such a limit has to be is read from the allocator's history instead.

Where the step is recorded as CUDA graphs, these are recorded in the second step and replayed from the third on. In the
last of those the gradients of the one before are still there, as in loops that add up gradients of several batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from outcore.allocator.process_limit import LimitTrace, has_limit
from outcore.compiled.discard import unused_in_pools
from outcore.compiled.measured_peak import measured_peak, standing_bytes, step_seconds
from outcore.compiled.torch_partitioner import CompilationError, compiling
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.errors import PlanError
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.structure import differentiable, leaves, substitute, sum_loss
from outcore.memory.cuda_graphs.pool import give_back, without_limit
from outcore.memory.saved_tensors.trial_steps import take_steps, trouble_of

__all__ = ["Tried", "distinct_bytes", "total_of", "try_step", "with_content"]


@dataclass(frozen=True)
class Tried:
    """Memory and time of the steps that were tried."""

    taken_bytes: int | None
    """The peak beside what is there throughout; none if it does not fit on the device at all."""
    needed_bytes: int = 0
    """The same where a limit of the process has to be larger than what is reserved."""
    seconds: float | None = None
    """Of one step; measured on a GPU alone."""
    skipped: int = 0
    """Graphs that torch.compile could not record."""


def try_step(
    model: nn.Module,
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    device: torch.device,
    optimizer: OptimizerCost,
    *,
    graphs: bool,
) -> Tried:
    """Compile a model's forward, and measure steps of it.

    Args:
        model: the user's.
        run: its forward, to be compiled.
        args: of a call.
        kwargs: of a call.
        loss: of the output; its sum, if there is none.
        device: where the model is.
        optimizer: what its state takes.
        graphs: whether the steps are recorded as CUDA graphs.

    Raises:
        CompilationError: torch.compile cannot do it.
        PlanError: nothing is within the budget.
    """
    inputs = [t for _, t in leaves((args, kwargs), torch.Tensor) if t.is_leaf]
    trained = [t for t in (*model.parameters(), *inputs) if t.requires_grad]
    gradients = [(t, t.grad) for t in trained]
    before = ModelState(model, state_tensors(model), outer=False)

    def forget() -> None:
        for t in trained:
            t.grad = None

    def step() -> None:
        output = run(*args, **kwargs)
        value = loss(output) if loss is not None else total_of(output)
        with torch.autocast(device.type, enabled=False):
            value.backward()

    def whole_step() -> None:
        step()
        forget()

    forget()
    counted = torch._dynamo.utils.counters["inductor"]
    skipped = counted["cudagraph_skips"]
    limited = has_limit(device)
    try:
        with without_limit(device):
            standing = standing_bytes(device) + (0 if graphs else unused_in_pools(device))
            with compiling():
                whole_step()
            if device.type == "cuda" and not graphs:
                parameters = [p for p in model.parameters() if p.requires_grad]
                taken, needed = _reserved(
                    lambda: take_steps(run, args, kwargs, loss or total_of, parameters, optimizer, device),
                    device,
                    standing + round(optimizer.state_per_parameter * sum(p.nbytes for p in parameters)),
                    limited=limited,
                )
            else:
                steps = [whole_step, whole_step, step, whole_step] if graphs else [whole_step]
                taken = needed = max(measured_peak(one, device, standing) for one in steps)
            forget()
            seconds = step_seconds(whole_step, device) if device.type == "cuda" else None
        return Tried(taken, needed, seconds, counted["cudagraph_skips"] - skipped)
    except torch.OutOfMemoryError:
        return Tried(None)
    except PlanError:
        raise
    except Exception as error:
        raise CompilationError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    finally:
        before.restore()
        for t, gradient in gradients:
            t.grad = gradient


def _reserved(steps: Callable[[], None], device: torch.device, standing: int, *, limited: bool) -> tuple[int, int]:
    """What is reserved for steps on a GPU beside what is there throughout; and what a limit has to be beside it.

    Raises:
        OutOfMemoryError: the device itself has no room for them, or only after a search.
    """
    torch.cuda.synchronize(device)
    give_back()
    torch.cuda.reset_peak_memory_stats(device)
    trouble, trace = trouble_of(device), LimitTrace(device)
    with trace.recorded() if limited else contextlib.nullcontext():
        steps()
    torch.cuda.synchronize(device)
    if trouble_of(device) != trouble:
        raise torch.OutOfMemoryError("the allocator had to look again for room")
    taken = max(0, torch.cuda.max_memory_reserved(device) - standing)
    return taken, max(taken, trace.bytes - standing)


def with_content(args: Any, kwargs: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments to run with: numbers where only shapes were given."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
            return tensor
        make = torch.randn if tensor.dtype.is_floating_point else torch.zeros
        return make(tuple(tensor.shape), dtype=tensor.dtype, device=device).requires_grad_(tensor.requires_grad)

    found: tuple[tuple[Any, ...], dict[str, Any]] = substitute((args, kwargs), torch.Tensor, real)
    return found


def distinct_bytes(tensors: list[torch.Tensor]) -> int:
    """The bytes of tensors; memory that several share, whole or in part, once."""
    total, until = 0, dict[torch.device, int]()
    for tensor in sorted(tensors, key=lambda t: t.data_ptr()):
        begin, end = max(tensor.data_ptr(), until.get(tensor.device, 0)), tensor.data_ptr() + tensor.nbytes
        total += max(0, end - begin)
        until[tensor.device] = max(end, until.get(tensor.device, 0))
    return total


def total_of(output: Any) -> torch.Tensor:
    """The sum of all results that lead back to parameters."""
    if not differentiable(output):
        raise CompilationError("nothing that this model returns leads back to a parameter that requires a gradient")
    return sum_loss(output)
