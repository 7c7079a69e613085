"""Records the steps of one run of a model.

The recorder is a `TorchFunctionMode` that also observes module calls (`outcore.graph.record.intercept`). Leaf modules
of torch.nn, opaque parts and functions become steps; the user's own modules are containers whose inside is recorded. A
tensor is recognised by identity: the recorder knows the name of every tensor that a step returned.

A tensor that no step made is one of three things. One that existed before the run is a constant. One that appeared
during the run, unobserved, is an error when recording on fake tensors (another try is made on real data), and on real
data it is a fact of this run only, so that the recording must not be used for another (`Recording.volatile`).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import FunctionMeta
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from outcore.errors import CaptureError
from outcore.graph.aliasing import SeenWrites, StorageHistory, VersionCounters, written_by_name
from outcore.graph.naming import function_name, is_compiled, kind_of, literals, paths
from outcore.graph.parts import ROOT, BlockKind, Call, Value, ancestors
from outcore.graph.record.intercept import call_module, opened
from outcore.graph.record.numeric_settings import numeric_settings
from outcore.graph.record.recording import Context, Recording, Ref, Step
from outcore.graph.record.references import References, unheld
from outcore.graph.source import call_site
from outcore.graph.structure import leaves, substitute

_COMPOSITES = {F.multi_head_attention_forward}
_READS = {
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "equal",
    "allclose",
}
_EXPORTS = {"numpy", "__array__", "data_ptr", "__dlpack__"}


class HiddenTensorError(CaptureError):
    """A tensor appeared that no recorded step made."""


class _Thread(threading.local):
    planning = False


_THREAD = _Thread()


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """A context whose recordings are never run in the model's place, so they need not be complete.

    A tensor that a ``torch.func`` transform made, or one that a checkpointed function has from the forward around it,
    is then treated as a constant.
    """
    before, _THREAD.planning = _THREAD.planning, True
    try:
        yield
    finally:
        _THREAD.planning = before


class Recorder(TorchFunctionMode):
    """Records while active; `recording` and the parts of the graph are read afterwards."""

    def __init__(
        self, model: nn.Module, inputs: Sequence[tuple[str, torch.Tensor]], *, fake: FakeTensorMode | None
    ) -> None:
        super().__init__()
        self.model, self.fake, self.real = model, fake, fake is None
        self.paths = paths(model)
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.state = {id(t): name for name, t in reversed(named)}
        self.devices = tuple({"cpu", *(t.device.type for _, t in named)} - {"meta"})
        self.ambient = Context.current(self.devices)
        self._settings = numeric_settings()
        self.steps: list[Step] = []
        self.calls: dict[str, Call] = {}
        self.values: dict[str, Value] = {}
        self.kinds: dict[str, tuple[BlockKind, str]] = {}
        """Kind and type of each block that was called, in order of the first call."""
        self.sources: dict[str, str] = {}
        self.counts: Counter[str] = Counter()
        self.constants: dict[str, torch.Tensor] = {}
        self.uses_data = self.volatile = False
        self.complete = not _THREAD.planning or not self.real
        """Whether every tensor has to be known."""
        self.failed_in: str | None = None
        """The innermost container an exception came from."""
        self._names: dict[int, Ref] = {}
        self._alive: list[torch.Tensor] = []  # no other tensor may get the identity of a constant
        calls, forget = self.calls, weakref.WeakMethod(self._forget)  # not itself: a cycle would keep the user's model
        self.references = References(lambda: len(calls), lambda key: (gone := forget()) and gone(key))
        self.held_until: dict[str, str] = {}
        """Values that Python holds beyond their last use (`Value.held_until`), once the run is over."""
        self._memories, self._writes = StorageHistory(), SeenWrites()
        for _, tensor in named:
            self._writes.note(tensor)
        self._stack: list[str] = []
        self._quiet = 0
        self._touched: list[torch.Tensor] | None = None
        self._older = _living_tensors() if self.real else {}
        self.inputs = tuple(name for name, _ in inputs)
        for name, tensor in inputs:
            self._bind(name, tensor, producer=None)

    def recording(self, result: Any) -> Recording:
        """What was recorded, given what the model returned."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self._check_writes(tensor)
        held = self.references.held_until(self.calls)
        template = substitute(result, torch.Tensor, self.ref)
        given = {*self.inputs, *(ref.name for _, ref in leaves(template, Ref))}  # whoever calls the model holds them
        self.held_until = {name: call for name, call in held.items() if name not in given}
        return Recording(self.inputs, self.steps, template, self.constants, self.ambient, self.uses_data, self.volatile)

    def know(self, values: Mapping[str, torch.Tensor]) -> None:
        """Call tensors from before the run by these names, where they have none."""
        for name, tensor in values.items():
            if id(tensor) not in self._names and id(tensor) not in self.state:
                self._bind(name, tensor, producer=None)

    def is_quiet(self) -> int:
        """Whether a call is under way that a replay repeats as a whole."""
        return self._quiet

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Record a function that is called on tensors, or makes one."""
        kwargs = kwargs or {}
        hidden = torch._C._are_functorch_transforms_active()  # tensors of a vmap must not be held beyond it
        if self._quiet or hidden or isinstance(func, torch._ops.OpOverload) or _is_machinery(_caller()):
            if self._touched is not None:
                self._touched.extend(t for _, t in leaves((args, kwargs), torch.Tensor))
            return self._run(func, args, kwargs)
        if func in _COMPOSITES:
            with self, opened():
                return func(*args, **kwargs)
        versions = self._versions_of(args, kwargs)
        result = self._run(func, args, kwargs)
        name = getattr(func, "__name__", "")
        written = versions.changed() + written_by_name(name, args, kwargs)
        if written or next(leaves(result, torch.Tensor), None) is not None:
            self._emit("function", self._child(f"{function_name(func)}()"), func, args, kwargs, result, written)
        elif self.real and name in _READS:
            self._guard(func, args, kwargs, result)
        elif self.real and name in _EXPORTS:
            self.volatile = True
        return result

    def on_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a module."""
        path = self.paths.get(module)
        if self._quiet or path is None:
            return call_module(module, *args, **kwargs)
        kind = kind_of(module) if path != ROOT else "container"
        if kind == "container":
            return self._inside(module, path, args, kwargs)
        versions = self._versions_of(args, kwargs)
        result = self._silently(lambda: _eager(module)(*args, **kwargs))
        self._writes.wrote((*module.parameters(), *module.buffers()))
        self._emit(kind, path, path, args, kwargs, result, versions.changed(), self._state_of(module))
        return result

    def on_opaque(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[], Any],
        name: str,
    ) -> Any:
        """Record a call of a part that must stay whole."""
        if self._quiet:
            return run()
        versions = self._versions_of(args, kwargs)
        touched: list[torch.Tensor] = []
        with unheld() if isinstance(getattr(target, "__self__", None), FunctionMeta) else contextlib.nullcontext():
            result = self._silently(run, touched)
        self._writes.wrote(touched)
        given = {id(t) for _, t in leaves((args, kwargs), torch.Tensor)}
        seen = [self._names[id(t)] for t in touched if id(t) in self._names and id(t) not in given]
        hidden = [ref.name for ref in seen if ref.kind == "value"]
        self.volatile |= bool(hidden)
        if hidden and self.complete:
            raise HiddenTensorError(
                f"{name} uses {hidden[0]} without being given it ({call_site()}); pass it as an argument"
            )
        state = [self.state[id(t)] for t in touched if id(t) in self.state]
        self._emit("opaque", self._child(f"{name}()"), target, args, kwargs, result, versions.changed(), state)
        return result

    def _inside(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a container; its forward hooks are steps of their own."""
        self._stack.append(self._next_call(path, "container", type(module).__name__))
        try:
            for key, hook in (
                *torch_module._global_forward_pre_hooks.items(),
                *module._forward_pre_hooks.items(),
            ):
                if key in module._forward_pre_hooks_with_kwargs:
                    args, kwargs = self._hook(hook, module, args, kwargs) or (args, kwargs)
                elif (changed := self._hook(hook, module, args)) is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
            forward = getattr(module, "_orig_mod", module).forward
            result = forward(*args, **kwargs)
            for key, hook in (*torch_module._global_forward_hooks.items(), *module._forward_hooks.items()):
                takes_kwargs = (
                    *module._forward_hooks_with_kwargs,
                    *torch_module._global_forward_hooks_with_kwargs,
                )
                given = (args, kwargs, result) if key in takes_kwargs else (args, result)
                changed = self._hook(hook, module, *given)
                result = result if changed is None else changed
            return result
        except Exception:
            self.failed_in = self.failed_in if self.failed_in is not None else path
            raise
        finally:
            self._stack.pop()

    def _hook(self, hook: Callable[..., Any], *args: Any) -> Any:
        name = getattr(hook, "__name__", type(hook).__name__).strip("<>")
        return self.on_opaque(hook, args, {}, lambda: hook(*args), name)

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; on fake tensors, parameters and constants too, so that none is computed with or written."""
        fake = self.fake
        if fake is not None and not isinstance(func, torch._ops.OpOverload):
            args, kwargs = substitute(
                (args, kwargs),
                torch.Tensor,
                lambda t: t if isinstance(t, FakeTensor) else fake.from_tensor(t),
            )
        with unheld():
            return func(*args, **kwargs)

    def _silently(self, run: Callable[[], Any], touched: list[torch.Tensor] | None = None) -> Any:
        self._quiet, self._touched = self._quiet + 1, touched
        try:
            return run()
        finally:
            self._quiet, self._touched = self._quiet - 1, None

    def _emit(
        self,
        kind: BlockKind,
        block: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        written: list[torch.Tensor],
        state: Sequence[str] = (),
    ) -> None:
        """Append a call that has just happened to the steps."""
        self._writes.wrote(written)
        is_module = isinstance(target, str)
        type_ = type(self.model.get_submodule(target)).__name__ if is_module else block.rpartition(".")[2][:-2]
        name = self._next_call(block, kind, type_)
        given: tuple[Any, ...] = substitute(args, (torch.Tensor, nn.Module), self.ref)
        named: dict[str, Any] = substitute(kwargs, (torch.Tensor, nn.Module), self.ref)
        refs = [ref for _, ref in leaves((given, named), Ref)]
        read = tuple(dict.fromkeys(ref.name for ref in refs if ref.kind == "value"))
        known = {id(t): self._names[id(t)] for t in written if id(t) in self._names}
        mutates = {i: ref.name for i, ref in known.items() if ref.kind == "value"}  # a constant keeps what is written
        after = self._memories.read(name, (t for _, t in leaves((args, kwargs), torch.Tensor)))
        after |= self._memories.write(name, written)

        found = list(leaves(result, torch.Tensor))
        outputs = tuple(f"{name}:{path or 'out'}" for path, _ in found)
        for value, (_, tensor) in zip(outputs, found, strict=True):
            self._bind(value, tensor, name)
        returned = {id(t) for _, t in found}
        unreturned = [t for t in {id(t): t for t in written}.values() if id(t) in mutates and id(t) not in returned]
        rebinds = []
        for i, tensor in enumerate(unreturned):
            value = f"{name}:written{i or ''}"
            rebinds.append((value, mutates[id(tensor)]))
            self._bind(value, tensor, name)

        context = Context.current(self.devices, self._settings)
        self.calls[name] = Call(
            name=name,
            block=block,
            inputs=read,
            outputs=(*outputs, *(new for new, _ in rebinds)),
            parameters=tuple(dict.fromkeys((*(ref.name for ref in refs if ref.kind == "state"), *state))),
            mutates=tuple(mutates.values()),
            after=tuple(sorted(after - {self.values[v].producer or "" for v in read} - {name})),
            scope=self._scope(block),
            source=call_site(sys._getframe(1)),
            detail="" if is_module else literals(given, named),
            grad=context.grad,
        )
        shapes = tuple(t.shape for _, t in found) if self.real else None
        step_kind = "module" if is_module else "function"
        self.steps.append(
            Step(name, step_kind, target, given, named, context, outputs, tuple(rebinds), shapes)  # type: ignore[arg-type]
        )

    def _guard(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> None:
        self.uses_data = True
        given, named = substitute((args, kwargs), torch.Tensor, self.ref)
        where = f"{function_name(func)} at {call_site()}"
        self.steps.append(
            Step(where, "guard", func, given, named, Context.current(self.devices, self._settings), answer=answer)
        )

    def ref(self, leaf: torch.Tensor | nn.Module) -> Ref | nn.Module:
        """The reference of a tensor or a module."""
        if isinstance(leaf, nn.Module):
            return Ref("module", self.paths[leaf]) if leaf in self.paths else leaf
        self._check_writes(leaf)
        if (name := self.state.get(id(leaf))) is not None:
            return Ref("state", name)
        if (known := self._names.get(id(leaf))) is not None:
            return known
        content: torch.Tensor | None = leaf
        if isinstance(leaf, FakeTensor):
            content = leaf.constant
        elif self.real and id(leaf) not in self._older:
            self.volatile = True
            content = None if leaf.grad_fn is not None else leaf
            if content is None and not self.complete:
                content = leaf.detach().requires_grad_(leaf.requires_grad)
        if content is None:
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            raise HiddenTensorError(
                f"a {shape} tensor was made where recording cannot see it, and used ({call_site()})"
            )
        ref = Ref("constant", f"constant{len(self.constants)}")
        self.constants[ref.name] = content
        self._names[id(leaf)] = ref
        self._alive.append(leaf)
        return ref

    def _versions_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VersionCounters:
        """The versions of what a call is given, before it is made."""
        for _, tensor in leaves((args, kwargs), torch.Tensor):
            self._check_writes(tensor)
        return VersionCounters(args, kwargs)

    def _check_writes(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor that was written in a way that is in no step."""
        if self._writes.missed(tensor):
            self.volatile = True
            if not _THREAD.planning:
                shape = "x".join(map(str, tensor.shape)) or "scalar"
                raise HiddenTensorError(
                    f"a {shape} tensor was written where recording cannot see it: by an operator of torch.ops, in "
                    f"another thread, or by another library ({call_site()})"
                )

    def _bind(self, name: str, tensor: torch.Tensor, producer: str | None) -> None:
        """Name a tensor; from here on, as long as it lives, it is known by this name."""
        self._names[id(tensor)] = Ref("value", name)
        self.references.watch(name, tensor)
        self._writes.note(tensor)
        self.values[name] = Value(
            name=name,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()) if tensor.layout is torch.strided else (),
            dtype=str(tensor.dtype).removeprefix("torch."),
            bytes=tensor.numel() * tensor.element_size(),
            requires_grad=tensor.requires_grad,
            producer=producer,
            consumers=(),
            alias_of=self._memories.place(name, tensor),
        )

    def _forget(self, identity: int) -> None:
        """A tensor has died."""
        self._names.pop(identity, None)
        self._writes.forget(identity)

    def _next_call(self, block: str, kind: BlockKind, type_: str) -> str:
        """Name of the call of a block that is about to be recorded."""
        self.kinds.setdefault(block, (kind, type_))
        self.sources.setdefault(block, call_site(sys._getframe(1)))
        self.counts[block] += 1
        return f"{block}#{self.counts[block] - 1}"

    def _child(self, name: str) -> str:
        """The path of something called by the innermost container."""
        here = self._stack[-1].rpartition("#")[0] if self._stack else ROOT
        return f"{here}.{name}" if here else name

    def _scope(self, block: str) -> tuple[str, ...]:
        running = {entry.rpartition("#")[0]: entry for entry in self._stack}
        return tuple(running.get(path, f"{path}#0") for path in ancestors(block))

    def _state_of(self, module: nn.Module) -> list[str]:
        return [self.state[id(t)] for t in (*module.parameters(), *module.buffers()) if id(t) in self.state]


def _eager(module: nn.Module) -> Callable[..., Any]:
    """How to call a module without starting a compiler: only the shapes are wanted."""
    if not is_compiled(module):
        return lambda *args, **kwargs: call_module(module, *args, **kwargs)
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original._call_impl


def _living_tensors() -> dict[int, torch.Tensor]:
    """All existing tensors, held so that no new one gets the identity of an old one."""
    return {id(o): o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)}


def _caller() -> str:
    """File of the code that called the function that called this."""
    frame = sys._getframe(2)
    return frame.f_code.co_filename if frame else ""


@cache
def _is_machinery(filename: str) -> bool:
    """Whether a call is part of how torch computes on fake tensors."""
    parts = ("_subclasses", "_meta_registrations", "_decomp", "_refs", "_prims", "_prims_common", "_dispatch")
    return any(f"/torch/{part}" in filename.replace("\\", "/") for part in parts)
