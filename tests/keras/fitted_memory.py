"""Run with ``KERAS_BACKEND=torch``: predicted and measured peaks of ``model.fit``; prints JSON lines.

    KERAS_BACKEND=torch python -m tests.keras.fitted_memory [name ...]

Measured are the bytes of living tensors at the peak of an epoch of two batches, after one that was not measured: all
that operations made, weights, optimizer state, inputs and targets. They are counted twice. A dispatch mode sees the
tensors alone, but while it is there autograd never adds gradients in place; the profiler sees what the allocator gives,
with the scratch memory of kernels in it, less that of convolutions, which they take and give back themselves. Both are
at least the living tensors, and the smaller one is taken. On a GPU, what the allocator has reserved is noted, too.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import accumulate
from typing import Any

import keras
import torch
from torch.profiler import ProfilerActivity, profile

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.errors import OutcoreError
from tests.keras.networks import MEMORY

BUDGETS = ("85%", "70%", "60%")


def batch_of(model: Any, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets; open sides have so many pixels, of volumes a quarter."""
    side = side // 4 if len(model.input_shape) == 5 else side
    shape = (size, *(side if n is None else n for n in model.input_shape[1:]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = "int" in str(model.inputs[0].dtype)
    x = torch.randint(7, shape, device=device) if whole else torch.randn(shape, device=device)
    with torch.no_grad():
        return x, torch.randn(model(x).shape, device=device)


class _Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """The same batch twice an epoch, without copies."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__()
        self.pair = x, y

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pair


def measured(model: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, int]:
    """The peak of an epoch of ``fit``."""
    data = _Batches(x, y)
    model.fit(data, verbose=0)
    model.zero_grad()
    known = [*(v.value for v in (*model.variables, *model.optimizer.variables)), x, y]
    found = {}
    if x.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model.fit(data, verbose=0)
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        model.zero_grad()
    standing = sum(t.nbytes for t in known)
    with LiveBytes(known) as live:
        model.fit(data, verbose=0)
    found["tensors_bytes"] = found["measured_bytes"] = live.peak + standing
    if not x.is_cuda:
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            model.fit(data, verbose=0)
        found["allocated_bytes"] = _most_allocated(seen) + standing
        found["measured_bytes"] = min(found["tensors_bytes"], found["allocated_bytes"])
    return found


def _most_allocated(seen: profile) -> int:
    """The most that was allocated at once, less what a convolution takes and gives back itself."""
    found: list[tuple[int, int, int, Any]] = []
    stack = list(seen.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.typed[1]
            found.append((event.start_time_ns, fields.alloc_size, fields.ptr, event.parent))
    taken: dict[int, tuple[int, Any]] = {}
    own = set[int]()
    found.sort(key=lambda one: one[0])
    for place, (_, size, pointer, parent) in enumerate(found):
        if size > 0:
            taken[pointer] = place, _convolution(parent)
        elif pointer in taken:
            begun, owner = taken.pop(pointer)
            if owner is not None and owner == _convolution(parent):
                own |= {begun, place}
    return max(accumulate(size for place, (_, size, *_) in enumerate(found) if place not in own), default=0)


def _convolution(event: Any) -> int | None:
    """The outermost convolution in which an operation runs."""
    found = None
    while event is not None:
        if "convolution" in event.name:
            found = event.id
        event = event.parent
    return found


def build(name: str, optimizer: str = "adam") -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A compiled model with a batch for it."""
    keras.utils.set_random_seed(0)
    make, size, side = MEMORY[name]
    if torch.cuda.is_available():
        size = 8 * size  # so that values are larger than what the allocator rounds to
    model = make(keras)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    return model, *batch_of(model, size, side)


def rows(name: str, budgets: tuple[Any, ...] = BUDGETS, optimizer: str = "adam") -> Any:
    """A row for plain ``fit``, and for every budget."""
    model, x, y = build(name, optimizer)
    yield {"model": name, "budget": "plain Keras", **measured(model, x, y)}
    for budget in budgets:
        model, x, y = build(name, optimizer)
        begun = time.perf_counter()
        try:
            outcore.within(model, (x,), {"training": True}, memory=budget, measure_s=0.5, quiet=True, stream=False)
        except OutcoreError as error:
            assert "call" not in model.__dict__ and "train_step" not in model.__dict__
            yield {"model": name, "budget": budget, "refused": str(error)}
            continue
        plan: Any = outcore.memory_plan(model)
        row = {"model": name, "budget": budget, "budget_bytes": plan.budget_bytes, "plain_bytes": plan.plain_bytes}
        row |= {"predicted_bytes": plan.peak_bytes, "planning_s": round(time.perf_counter() - begun, 1)}
        yield row | measured(model, x, y)


if __name__ == "__main__":
    for one in sys.argv[1:] or MEMORY:
        for row in rows(one):
            print(json.dumps(row), flush=True)
