"""Steps that are tried before training, with the user's own batch; the model is as it was afterwards.

The first one compiles. Those after it are measured: one of kernels, three where the step is recorded as CUDA graphs,
since these are recorded in the second step and replayed from the third on. In the last of those the gradients of the
one before are still there, as in loops that add up gradients of several batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from outcore.compiled.discard import unused_in_pools
from outcore.compiled.measured_peak import measured_peak, standing_bytes, step_seconds
from outcore.compiled.torch_partitioner import CompilationError, compiling
from outcore.errors import PlanError
from outcore.graph.record.preserve import ModelState, state_tensors
from outcore.graph.structure import leaves, substitute

__all__ = ["Tried", "distinct_bytes", "total_of", "try_step", "with_content"]


@dataclass(frozen=True)
class Tried:
    """What was seen."""

    taken_bytes: int | None
    """The peak beside what is there throughout; none if it does not fit on the device at all."""
    seconds: float | None = None
    """On a GPU."""
    skipped: int = 0
    """Graphs that torch.compile could not record."""


def try_step(
    model: nn.Module,
    run: Callable[..., Any],
    args: Any,
    kwargs: Any,
    loss: Callable[[Any], torch.Tensor] | None,
    device: torch.device,
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
        graphs: whether the steps are recorded as CUDA graphs.

    Raises:
        CompilationError: torch.compile cannot do it.
        PlanError: nothing is within the budget.
    """
    inputs = [t for _, t in leaves((args, kwargs), torch.Tensor) if t.is_leaf]
    trained = [t for t in (*model.parameters(), *inputs) if t.requires_grad]
    gradients = [(t, t.grad) for t in trained]
    before = ModelState(model, state_tensors(model))

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
    standing = standing_bytes(device) + (0 if graphs else unused_in_pools(device))
    try:
        with compiling():
            whole_step()
        steps = [whole_step, whole_step, step, whole_step] if graphs else [whole_step]
        taken = max(measured_peak(one, device, standing) for one in steps)
        seconds = step_seconds(whole_step, device) if device.type == "cuda" else None
        return Tried(taken, seconds, counted["cudagraph_skips"] - skipped)
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
    """The bytes of tensors, shared memory once."""
    return sum({(t.device, t.data_ptr(), t.nbytes): t.nbytes for t in tensors}.values())


def total_of(output: Any) -> torch.Tensor:
    """The sum of all results that lead back to parameters."""
    found = [t for _, t in leaves(output, torch.Tensor) if t.requires_grad and t.is_floating_point()]
    if not found:
        raise CompilationError("nothing that this model returns leads back to a parameter that requires a gradient")
    return torch.stack([t.float().sum() for t in found]).sum()
