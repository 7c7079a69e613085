"""What autograd keeps for backward, exactly, and the rest of a call's bytes and FLOPs: found by trying.

Each call runs once by itself, forward and backward, on fake tensors of the device: no memory, no time, any size of
image, but the same autograd as in earnest. Hooks see every tensor that is kept and recognise by its storage
whether it is an input, the output, a weight, or something that only backward knows of (a cast, indices, a mask,
statistics); a count of the living bytes (`outcore.cost.live`) sees what is needed for a moment. Calls that are
alike are tried once.

Where an operation has no fake form it is tried on real tensors if they are small. A device that is not there
cannot be faked (torch without CUDA knows no CUDA kernels); then the table in `outcore.ops` corrects what the CPU
keeps.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outcore.cost.alone import Alone
from outcore.cost.costs import CallCost, Costs, Gradient, Saved, Source
from outcore.cost.kept import keep_on
from outcore.cost.live import LiveBytes, storage_key
from outcore.errors import OutcoreError
from outcore.graph import Call, Graph
from outcore.graph.preserve import ModelState, preserved, state_tensors
from outcore.graph.recording import Recording, Ref, Step
from outcore.graph.structure import substitute

__all__ = ["account", "device_name", "device_of", "quietly", "recording_of", "signature"]

_REAL_LIMIT = 256 * 2**20
_UNFAITHFUL = {"RNN", "LSTM", "GRU"}
"""Layers whose fake form leaves out what the real one keeps (the workspace of the library that runs them)."""


def account(graph: Graph, device: torch.device | str | None = None) -> Costs:
    """The bytes and FLOPs of every call, without running the model.

    >>> import outcore, torch
    >>> from outcore.cost.saved import account
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    >>> costs = account(outcore.capture(net, [(1, 3, 10_002, 10_002)]))
    >>> [(s.of, s.bytes) for s in costs["1#0"].saved]
    [('1#0:out', 3200000000)]

    Args:
        graph: as captured; it needs the model, so not one read from a file.
        device: what autograd keeps depends on it; by default the one the model is on.
    """
    recording, model = recording_of(graph), graph.module.model
    target = torch.device(device) if device is not None else device_of(graph)
    here = target if target.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")
    steps = {step.name: step for step in recording.steps if step.kind != "guard"}
    tried: dict[Hashable, tuple[CallCost, Call]] = {}
    found: dict[str, CallCost] = {}
    sizes = {name: graph.values[name].bytes for name in graph.inputs}
    failures: dict[str, str] = {}
    with preserved(model, contents=False), quietly():
        for call in graph.calls.values():
            key = signature(graph, steps[call.name])
            if key not in tried:
                cost, reason = _try(graph, steps[call.name], recording, here)
                tried[key] = (cost, call)
                if reason:
                    failures[call.name] = reason
            found[call.name] = cost = _named(graph, *tried[key], call, sizes)
            sizes |= cost.outputs
    if target.type != here.type:
        found = {name: keep_on(graph, cost, target.type) for name, cost in found.items()}
    trained = {name: _bytes(p) for name, p in model.named_parameters() if p.requires_grad}
    everything = {id(t): _bytes(t) for t in (*model.parameters(), *model.buffers())}
    return Costs(
        model=graph.model,
        fingerprint=graph.fingerprint,
        device=device_name(target) if target.type == here.type else str(target),
        device_kind=target.type,
        calls=found,
        parameters=trained,
        fixed_bytes=sum(everything.values()) - sum(trained.values()),
        notes=tuple(f"{name}: bytes unknown: {reason}" for name, reason in failures.items()),
    )


def recording_of(graph: Graph) -> Recording:
    """How the graph was recorded."""
    if graph.executable is None:
        raise OutcoreError("this graph was read from a file and cannot run; capture the model again to measure it")
    return graph.executable[1]


def device_name(device: torch.device) -> str:
    """What to call a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def signature(graph: Graph, step: Step) -> Hashable:
    """What makes two calls cost the same: target and settings, shapes, strides, dtypes, modes."""
    call, model = graph.calls[step.name], graph.module.model
    places = {name: i for i, name in enumerate(call.inputs)}
    if step.kind == "module":
        module = model.get_submodule(step.target)
        own = [(n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in module.named_parameters()]
        hooks = bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        target: Hashable = (type(module), module.extra_repr(), module.training, tuple(own), id(module) if hooks else 0)
    else:
        target = step.target if isinstance(step.target, Hashable) else id(step.target)

    def stand_in(ref: Ref) -> str:
        return f"value {places[ref.name]}" if ref.kind == "value" else _state_like(graph, ref)

    template = repr(substitute((step.args, step.kwargs), Ref, stand_in))
    values = tuple((v.shape, v.stride, v.dtype, v.requires_grad) for v in (graph.values[n] for n in call.inputs))
    written = tuple(places[n] for n in call.mutates if n in places)
    return target, template, values, written, step.context, len(call.outputs)


def _state_like(graph: Graph, ref: Ref) -> str:
    if ref.kind != "state":
        return f"{ref.kind} {ref.name}"
    tensor = attrgetter(ref.name)(graph.module.model)
    return f"state {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"


def _try(graph: Graph, step: Step, recording: Recording, device: torch.device) -> tuple[CallCost, str]:
    """The cost of a call tried on fake tensors, else on real ones, else what the graph alone says."""
    call = graph.calls[step.name]
    block = graph.blocks[call.block]
    blank = CallCost(
        call.name,
        call.block,
        block.type,
        outputs={v: graph.values[v].bytes for v in call.outputs if graph.values[v].alias_of is None},
    )
    reason = ""
    size = sum(graph.values[v].bytes for v in (*call.inputs, *call.outputs))
    ways = [(True, "index"), (False, "index"), (False, "zero"), (False, "one")]
    if block.type in _UNFAITHFUL:
        ways = [*ways[1:], ways[0]]
    for fake, integers in ways:
        if not fake and size > _REAL_LIMIT:
            continue
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        try:
            with _restored(graph.module.model) if not fake or block.kind == "opaque" else contextlib.nullcontext():
                alone = Alone(graph, step, recording, device, fake=mode, integers=integers)
                return _weigh(alone, blank, "analytic" if fake else "measured"), ""
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            reason = reason or f"{type(error).__name__}: {first}"[:200]
    return blank, reason


@contextlib.contextmanager
def _restored(model: torch.nn.Module) -> Iterator[None]:
    """Put back what a run writes into the model: one on real tensors, or of a part that brings its own modules."""
    state = ModelState(model, state_tensors(model))
    try:
        yield
    finally:
        state.restore()


def _weigh(alone: Alone, blank: CallCost, source: Source) -> CallCost:
    """Run forward and backward once and write down what was kept and needed."""
    names = _Names(alone)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        handle = tensor.detach()
        if (key := storage_key(handle)) is not None:
            kept.setdefault(key, handle)
        return handle

    live = LiveBytes(alone.held)
    with live:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle):
            outputs = alone.forward()
        forward_peak, after = live.peak, live.live
        flops, issued = live.flops, live.issued
        names.outputs(outputs)
        saved = tuple(names.saved(tensor, live) for tensor in kept.values())
        derived = sum(s.bytes for s in saved if s.kind == "derived")
        hidden = after - derived - sum(names.sizes.values())
        kept.clear()
        roots, gradients = alone.gradients_for(outputs)
        del outputs
        made: tuple[Gradient, ...] = ()
        rise = 0
        before = live.issued  # making gradients up is no part of it
        if roots:
            start = live.restart()
            found = alone.backward(roots, gradients)
            rise = live.peak - start
            made = tuple(names.gradients(found, roots, gradients))
            del found
    if hidden > 0 and roots:  # kept by a node itself, where no hook is asked
        saved = (*saved, Saved("hidden", "derived", hidden, "kept by the operation itself"))
    return replace(
        blank,
        flops_forward=flops,
        flops_backward=live.flops - flops,
        issue_forward=issued,
        issue_backward=live.issued - before,
        parameter_bytes=sum(_bytes(t) for t in alone.state.values()),
        output_bytes=sum(names.sizes.values()),
        outputs=names.sizes,
        saved=saved,
        gradients=made,
        saved_source=source,
        workspace_forward_bytes=max(0, forward_peak - after),
        workspace_backward_bytes=max(0, rise - sum(g.bytes for g in made)),
        workspace_source=source,
    )


class _Names:
    """Recognises tensors of one call by their memory."""

    def __init__(self, alone: Alone) -> None:
        self._alone = alone
        self._of: dict[int | None, tuple[str, str]] = {}
        for name, tensor in alone.state.items():
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            self._of.setdefault(storage_key(tensor), (name, kind))
        for name, tensor in alone.values.items():
            self._of.setdefault(storage_key(tensor), (name, "value"))
        self.sizes: dict[str, int] = {}
        self._outputs: list[tuple[str, torch.Tensor]] = []

    def outputs(self, tensors: list[torch.Tensor]) -> None:
        """Learn the outputs; those in memory of their own get a size."""
        for name, tensor in zip(self._alone.call.outputs, tensors, strict=True):
            key = storage_key(tensor)
            if key is not None and key not in self._of:
                self._of[key] = (name, "value")
                self.sizes[name] = tensor.untyped_storage().nbytes()
            self._outputs.append((name, tensor))

    def saved(self, tensor: torch.Tensor, live: LiveBytes) -> Saved:
        """What a kept tensor is."""
        key, size = storage_key(tensor), tensor.untyped_storage().nbytes()
        if key in self._of:
            name, kind = self._of[key]
            return Saved(name, kind, size)  # type: ignore[arg-type]
        operation, source = live.made_by.get(key or 0, ("", None))
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        what = f"{str(tensor.dtype).removeprefix('torch.')} {shape} of {operation.removeprefix('aten.')}"
        if source in self._of:
            what += f" of {self._of[source][0]}"
        return Saved(str(key), "derived", size, what)

    def gradients(
        self, found: tuple[torch.Tensor | None, ...], roots: list[torch.Tensor], given: list[torch.Tensor]
    ) -> Iterator[Gradient]:
        """What each gradient takes, and whether it is only handed on."""
        names = {id(t): n for n, t in (*self._alone.state.items(), *self._alone.values.items())}
        root_names = {id(t): n for n, t in reversed(self._outputs)}
        origin = {storage_key(g): root_names.get(id(r), "") for r, g in zip(roots, given, strict=True)}
        seen: dict[int | None, str] = {}
        for tensor, gradient in zip(self._alone.wanted, found, strict=True):
            if gradient is None:
                continue
            key, name = storage_key(gradient), names[id(tensor)]
            if key in origin:
                yield Gradient(name, 0, origin[key])
            elif key in seen:
                yield Gradient(name, 0, None)
            else:
                seen[key] = name
                yield Gradient(name, gradient.untyped_storage().nbytes() if key is not None else _bytes(gradient))


def _named(graph: Graph, cost: CallCost, of: Call, call: Call, sizes: Mapping[str, int]) -> CallCost:
    """The cost of a call, for another one like it: names changed, memory named by the first value in it."""
    model_names = dict(zip((*of.inputs, *of.outputs), (*call.inputs, *call.outputs), strict=True))
    model_names |= dict(zip(of.parameters, call.parameters, strict=True))
    own = {model_names[name]: size for name, size in cost.outputs.items()}
    first: Callable[[str], str] = lambda name: graph.values[name].alias_of or name  # noqa: E731

    def kept(i: int, saved: Saved) -> Saved:
        if saved.kind == "derived":
            what = saved.what
            for old, new in model_names.items():
                what = what.replace(f" of {old}", f" of {new}") if what.endswith(f" of {old}") else what
            return replace(saved, of=f"{call.name}~{i}", what=what)
        name = model_names.get(saved.of, saved.of)
        if saved.kind == "value":  # a view keeps all of the memory it looks at
            return replace(saved, of=first(name), bytes=sizes.get(first(name), own.get(first(name), 0)))
        return replace(saved, of=name)

    return replace(
        cost,
        call=call.name,
        block=call.block,
        type=graph.blocks[call.block].type,
        outputs=own,
        saved=tuple(kept(i, s) for i, s in enumerate(cost.saved)),
        gradients=tuple(
            replace(g, of=model_names[g.of], passes=model_names[g.passes] if g.passes else None) for g in cost.gradients
        ),
    )


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """What torch says of single operations on made-up numbers concerns nobody."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def device_of(graph: Graph) -> torch.device:
    """Where the model is; for one without memory, the best device here."""
    model = graph.module.model
    first = next(iter((*model.parameters(), *model.buffers())), None)
    if first is None or first.is_meta:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return first.device


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
