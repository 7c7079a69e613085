"""One call of a graph in isolation: its inputs made up, its weights shared, the rest of the model absent.

The call is the user's own module or function with the arguments it was recorded with. A module is copied so that
nothing of the user's is written: the copy shares the parameters' memory where they are on the right device, and has
buffers of its own. Inputs are random numbers of the recorded shape, stride and dtype; integers are indices that are
valid for what reads them. On fake tensors nothing takes memory or time, and only shapes come out.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from outcore.graph import Graph, Value
from outcore.graph.record.recording import Context, Recording, Ref, Step, fill
from outcore.graph.structure import leaves
from outcore.ops.registry import names

Stride = tuple[int, ...]

_NOISE = 2**18


class _Enter(torch.autograd.Function):
    """A tensor as if an earlier call had made it, in the same memory: unlike a leaf it may be written in
    place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class IsolatedCall:
    """One call, ready to run on a device.

    Args:
        graph: where the call is.
        step: how it was recorded.
        recording: what it was recorded in.
        device: where it runs.
        fake: makes it run on shapes only.
        integers: how integer inputs are filled: "index" (valid where we know what reads them), "zero" or
            "one".
        shapes: other shapes for some values, to run a smaller version of the call.
        arriving: strides of gradients of outputs that come in another layout than the outputs'.
    """

    def __init__(
        self,
        graph: Graph,
        step: Step,
        recording: Recording,
        device: torch.device,
        *,
        fake: FakeTensorMode | None = None,
        integers: str = "index",
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        arriving: Mapping[str, Stride] | None = None,
    ) -> None:
        self.graph, self.step, self.recording, self.device, self.fake = graph, step, recording, device, fake
        self.call = graph.calls[step.name]
        self._integers, self._shapes = integers, shapes or {}
        self._arriving = arriving if arriving and not shapes else {}
        self._context = _context_on(step.context, device)
        model = graph.module.model
        self.state: dict[str, torch.Tensor] = {}
        """Parameters, buffers and constants it reads, by name."""
        memo: dict[int, Any] = {}
        with self._mode():
            for name in self.call.parameters:
                original = attrgetter(name)(model)
                self.state[name] = memo[id(original)] = self._share_memory(original)
            for name in {r.name for _, r in leaves((step.args, step.kwargs), Ref) if r.kind == "constant"}:
                self.state[name] = self._share_memory(recording.constants[name])
            self.values = {name: self._make(graph.values[name]) for name in self.call.inputs}
            """Its inputs, by name; leaves of the autograd graph."""
            self.target = self._copy(model, step.target, memo) if step.kind == "module" else step.target
            self._modules = {
                r.name: self._copy(model, r.name, memo)
                for _, r in leaves((step.args, step.kwargs), Ref)
                if r.kind == "module"
            }
        if step.kind == "module":  # what the copy really has: some modules copy their state themselves
            prefix = len(step.target) + 1
            own = dict((*self.target.named_parameters(), *self.target.named_buffers()))
            self.state.update({n: own[n[prefix:]] for n in self.state if n[prefix:] in own})
        self._ready: list[tuple[Any, Any, dict[str, torch.Tensor]]] = []

    @property
    def wanted(self) -> list[torch.Tensor]:
        """The tensors backward computes gradients for: inputs, then parameters."""
        return [t for t in (*self.values.values(), *self.state.values()) if t.requires_grad]

    @property
    def held(self) -> list[torch.Tensor]:
        """All tensors that exist before the call runs."""
        return [*self.values.values(), *self.state.values()]

    def prepare(self, runs: int) -> None:
        """Make the inputs of that many forward runs, so that making them is no part of the time."""
        with self._mode():
            self._ready = [self._bind(self._entered()) for _ in range(runs if self.call.mutates else 1)]

    def forward(self) -> list[torch.Tensor]:
        """Run it in its modes; returns its outputs: the tensors in its result, then those it only wrote."""
        with self.entered():
            result, entered = self._run()
        written = [entered.get(old, self.values.get(old)) for _, old in self.step.rebinds]
        return [*(t for _, t in leaves(result, torch.Tensor)), *(t for t in written if t is not None)]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The grad and autocast modes it was recorded under."""
        with self._mode(), _uncached_casts(), self._context.entered():
            yield

    def run(self) -> None:
        """Make the call only, for a clock around it, inside of `entered` and after `prepare`."""
        args, kwargs, _ = self._next()
        self.target(*args, **kwargs)

    def _run(self) -> tuple[Any, dict[str, torch.Tensor]]:
        args, kwargs, entered = self._next() if self._ready else self._bind(self._entered())
        return self.target(*args, **kwargs), entered

    def _next(self) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        """The inputs of the next run: what is written in place is new for each, anything else is used again."""
        return self._ready.pop() if len(self._ready) > 1 else self._ready[0]

    def _bind(self, entered: dict[str, torch.Tensor]) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        """Its arguments, with tensors in the places of references."""

        def lookup(ref: Ref) -> Any:
            if ref.kind == "value":
                return entered[ref.name] if ref.name in entered else self.values[ref.name]
            return self._modules[ref.name] if ref.kind == "module" else self.state[ref.name]

        return fill(self.step.args, lookup), fill(self.step.kwargs, lookup), entered

    def gradients_for(self, outputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs that backward starts from, and random gradients for them."""
        recorded = zip(self.call.outputs, outputs, strict=False) if self._context.grad else ()
        roots = {id(t): (t, self._arriving.get(name)) for name, t in recorded if t.requires_grad}
        with self._mode():
            gradients = [_random_like(t, stride, self.fake is not None) for t, stride in roots.values()]
        return [t for t, _ in roots.values()], gradients

    def backward(
        self, roots: list[torch.Tensor], gradients: list[torch.Tensor], *, keep: bool = False
    ) -> tuple[torch.Tensor | None, ...]:
        """Run backward; returns the gradients of `wanted`, None where there is none."""
        with self._mode():
            return torch.autograd.grad(roots, self.wanted, gradients, retain_graph=keep, allow_unused=True)

    def _mode(self) -> contextlib.AbstractContextManager[Any]:
        return self.fake if self.fake is not None else contextlib.nullcontext()

    def _entered(self) -> dict[str, torch.Tensor]:
        found = {name: self.values[name] for name in self.call.mutates if name in self.values}
        return {n: _Enter.apply(t) if t.requires_grad else t for n, t in found.items()}  # type: ignore[no-untyped-call]

    def _copy(self, model: nn.Module, path: str, memo: dict[int, Any]) -> nn.Module:
        """A module of the same settings around the shared tensors."""
        module = attrgetter(path)(model) if path else model
        module = getattr(module, "_orig_mod", module)
        for part in module.modules():
            plain = (v for v in part.__dict__.values() if isinstance(v, torch.Tensor))
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False), *plain):
                if id(tensor) not in memo:
                    memo[id(tensor)] = self._share_memory(tensor)
        # deepcopy keeps what it met in the memo; the next module must not find stale entries of this one.
        made: nn.Module = copy.deepcopy(module, dict(memo))
        return made

    def _share_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter in its own memory, anything else as a copy; with its `requires_grad`, but no history."""
        is_weight = isinstance(tensor, nn.Parameter)
        if tensor.is_meta or (self.fake is not None and tensor.device != self.device):
            made = self._fresh(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
            if self.fake is None and made.is_floating_point():
                made.uniform_(0.5, 1.5)  # valid as a variance too
        elif self.fake is not None:
            made = self.fake.from_tensor(tensor)
        else:
            made = tensor.detach().to(self.device)
            writes = self.step.kind == "function" and getattr(self.step.target, "__name__", "").endswith("_")
            if made.data_ptr() == tensor.data_ptr() and (not is_weight or writes):
                made = made.clone()
        made = made.detach()
        if is_weight:
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def _make(self, value: Value) -> torch.Tensor:
        shape, stride = value.shape, value.stride
        if value.name in self._shapes:
            shape = self._shapes[value.name]
            stride = _strides_like(value, shape)
        dtype = getattr(torch, value.dtype)
        made = self._fresh(shape, stride, dtype)
        if self.fake is None:
            self._fill_in(made, value)
        return made.requires_grad_(value.requires_grad)

    def _fresh(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if len(stride) != len(shape):  # a sparse or otherwise odd tensor
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def _fill_in(self, tensor: torch.Tensor, value: Value) -> None:
        memory = torch.empty(0, dtype=tensor.dtype, device=self.device).set_(tensor.untyped_storage())
        if tensor.is_floating_point() or tensor.is_complex():
            memory.fill_(1) if self._integers == "one" else _fill_with_noise(memory)
        elif self._integers == "zero" or (
            self._integers == "index" and tensor.dtype != torch.bool and (bound := self._bound(value)) < 2
        ):
            memory.zero_()
        elif self._integers == "one" or tensor.dtype == torch.bool:
            memory.fill_(1)
        else:
            memory.random_(0, bound)

    def _bound(self, value: Value) -> int:
        """The bound below which an integer input is a valid index into whatever the call indexes."""
        name = getattr(self.step.target, "__name__", "") if self.step.kind == "function" else ""
        tables = [t for t in self.state.values() if t.dim() == 2 and t.is_floating_point()]
        if self.step.kind == "module" or name == "embedding":
            if tables:
                return min(t.shape[0] for t in tables)
        others = [self.graph.values[n] for n in self.call.inputs if n != value.name]
        if name in names("cross_entropy", "nll_loss") and others:
            scores = others[0].shape
            return scores[1] if len(scores) > 1 else scores[0]
        if others or self.state:
            sizes = [n for v in others for n in v.shape] + [n for t in self.state.values() for n in t.shape]
            return min(sizes, default=1)
        return 2


@contextlib.contextmanager
def _uncached_casts() -> Iterator[None]:
    """A context in which autocast does not cache cast weights; here they belong to the one call."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _context_on(context: Context, device: torch.device) -> Context:
    """The modes a call ran under, for another kind of device: autocast follows the tensors."""
    if device.type == "cpu" or any(kind == device.type for kind, _, _ in context.autocast):
        return context
    moved = [(device.type, enabled, dtype) for kind, enabled, dtype in context.autocast if kind == "cpu"]
    return replace(context, autocast=(*context.autocast, *moved))


def _random_like(tensor: torch.Tensor, stride: Stride | None, fake: bool) -> torch.Tensor:
    made = torch.empty_like(tensor)
    if stride is not None:
        made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    if not fake:
        _fill_with_noise(made.as_strided((made.untyped_storage().nbytes() // made.element_size(),), (1,), 0))
    return made


def _fill_with_noise(memory: torch.Tensor) -> None:
    """Normal noise in a flat tensor; of a large one a block is drawn and repeated, which is much faster."""
    block = memory[:_NOISE]
    block.normal_() if memory.element_size() > 1 else block.zero_()
    whole = memory.numel() // _NOISE
    if memory.numel() > _NOISE:
        memory[: whole * _NOISE].view(whole, _NOISE)[1:] = block
        memory[whole * _NOISE :] = block[: memory.numel() % _NOISE]


def _strides_like(value: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a smaller tensor whose dimensions lie in memory in the same order, without gaps."""
    order = sorted(range(len(shape)), key=lambda d: (value.stride[d], value.shape[d]))
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = 0 if value.stride[d] == 0 and value.shape[d] > 1 else step
        step *= shape[d] if strides[d] else 1
    return tuple(strides)
