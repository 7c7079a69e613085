"""What autograd saves for backward, exactly, and the rest of a call's bytes and FLOPs: found by trying.

Each call runs once in isolation, forward and backward, on fake tensors of the device: no memory, no time, any size of
image, but the same autograd as in a real run (`outcore.cost.measured.trial_call`). Equal calls are tried once.

In isolation, the gradient of an output has the output's strides; in a step it has those in which the reader of the
output made it, and where they differ a backward that is free in isolation copies: the gradient of a view of transposed
heads, for one. So the layouts are followed from the loss backward, and a call that gets its gradients in another one is
tried again with them.

A device that is not there cannot be faked (torch without CUDA knows no CUDA kernels); then the table in `outcore.ops`
corrects what the CPU saves.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter

import torch

from outcore.cost.costs import CallCost, Costs
from outcore.cost.measured.isolated_call import Stride
from outcore.cost.measured.trial_call import try_call
from outcore.cost.predicted.saved_bytes import keep_on
from outcore.cost.saved import Saved
from outcore.graph import Call, Graph
from outcore.graph.record.keys import hooks_of
from outcore.graph.record.preserve import preserved
from outcore.graph.record.recording import Recording, Ref, Step
from outcore.graph.strides import same_layout
from outcore.graph.structure import substitute


def account(graph: Graph, device: torch.device | str | None = None) -> Costs:
    """The bytes and FLOPs of every call, without running the model.

    >>> import outcore, torch
    >>> from outcore.cost.measured.saved_bytes import account
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    >>> costs = account(outcore.capture(net, [(1, 3, 10_002, 10_002)]))
    >>> [(s.of, s.bytes) for s in costs["1#0"].saved]
    [('1#0:out', 3200000000)]

    Args:
        graph: as captured; it needs the model, so not one read from a file.
        device: what autograd keeps depends on it; by default the one the model is on.
    """
    recording, model = graph.recording, graph.module.model
    target = torch.device(device) if device is not None else device_of(graph)
    here = target if target.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")
    trials = _Trials(graph, recording, here)
    with preserved(model, contents=False), quietly():
        found = {call.name: trials.cost(call) for call in graph.calls.values()}
        found |= trials.with_arriving(found)
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
        notes=tuple(f"{name}: bytes unknown: {reason}" for name, reason in trials.failures.items()),
    )


class _Trials:
    """The calls of a graph on one device, equal ones tried once."""

    def __init__(self, graph: Graph, recording: Recording, device: torch.device) -> None:
        self.graph, self.recording, self.device = graph, recording, device
        self.steps = recording.calls()
        self.keys = {name: signature(graph, self.steps[name]) for name in graph.calls}
        self.tried: dict[Hashable, tuple[CallCost, Call]] = {}
        self.sizes = {name: graph.values[name].bytes for name in graph.inputs}
        self.failures: dict[str, str] = {}

    def cost(self, call: Call) -> CallCost:
        """The cost of a call; to be asked in the order of execution."""
        key = self.keys[call.name]
        if key not in self.tried:
            cost, reason = try_call(self.graph, self.steps[call.name], self.recording, self.device)
            self.tried[key] = (cost, call)
            if reason:
                self.failures[call.name] = reason
        cost = _named(self.graph, *self.tried[key], call, self.sizes)
        self.sizes |= cost.outputs
        return cost

    def with_arriving(self, found: Mapping[str, CallCost]) -> dict[str, CallCost]:
        """The calls that get gradients in another layout than that of their outputs, tried with them."""
        layouts: dict[str, Stride] = {}
        again: dict[str, CallCost] = {}
        for call in reversed(list(self.graph.calls.values())):
            cost = found[call.name]
            odd = {name: layouts[name] for name in call.outputs if self._is_odd(name, layouts)}
            if odd and cost.has_backward:
                cost = again[call.name] = self._arrived(call, cost, odd)
            for gradient in cost.gradients:
                if gradient.of in self.graph.values:
                    stride = gradient.stride or self.graph.values[gradient.of].stride
                    if 0 in layouts.get(gradient.of, (0,)):  # the first decides, unless it has no memory of its own
                        layouts[gradient.of] = stride
        return again

    def _is_odd(self, name: str, layouts: Mapping[str, Stride]) -> bool:
        value = self.graph.values[name]
        known = name in layouts and len(value.stride) == len(value.shape)
        return known and not same_layout(value.shape, value.stride, layouts[name])

    def _arrived(self, call: Call, cost: CallCost, odd: Mapping[str, Stride]) -> CallCost:
        key = (self.keys[call.name], tuple((call.outputs.index(name), stride) for name, stride in odd.items()))
        if key not in self.tried:
            tried, reason = try_call(self.graph, self.steps[call.name], self.recording, self.device, odd)
            self.tried[key] = (replace(tried, reason=reason), call)
        if self.tried[key][0].reason:
            return cost
        with_odd = _named(self.graph, *self.tried[key], call, self.sizes)
        return replace(
            cost,
            arriving=odd,
            gradients=with_odd.gradients,
            issue_backward=with_odd.issue_backward,
            workspace_backward_bytes=with_odd.workspace_backward_bytes,
        )


def device_name(device: torch.device) -> str:
    """The name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def signature(graph: Graph, step: Step) -> Hashable:
    """A key of calls that cost the same: target and settings, shapes, strides, dtypes, modes."""
    call, model = graph.calls[step.name], graph.module.model
    places = {name: i for i, name in enumerate(call.inputs)}
    if step.kind == "module":
        module = model.get_submodule(step.target)
        own = [(n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in module.named_parameters()]
        hooks = bool(hooks_of(module))
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


def _named(graph: Graph, cost: CallCost, of: Call, call: Call, sizes: Mapping[str, int]) -> CallCost:
    """The cost of a call, for another one like it: names changed, memory named by the first value in it."""
    model_names = dict(zip((*of.inputs, *of.outputs), (*call.inputs, *call.outputs), strict=True))
    model_names |= dict(zip(of.parameters, call.parameters, strict=True))
    own = {model_names[name]: size for name, size in cost.outputs.items()}

    def kept(i: int, saved: Saved) -> Saved:
        if saved.kind == "derived":
            known = saved.derived
            if known is not None:
                known = replace(known, source=model_names.get(known.source, known.source))
            return replace(saved, of=f"{call.name}~{i}", derived=known)
        name = model_names.get(saved.of, saved.of)
        if saved.kind == "value":  # a view keeps all of the memory it looks at
            base = graph.values[name].base
            return replace(saved, of=base, bytes=sizes.get(base, own.get(base, 0)))
        return replace(saved, of=name)

    return replace(
        cost,
        call=call.name,
        block=call.block,
        type=graph.blocks[call.block].type,
        outputs=own,
        saved=tuple(kept(i, s) for i, s in enumerate(cost.saved)),
        gradients=tuple(
            replace(g, of=model_names[g.of], passes=model_names[g.passes] if g.passes else None)
            for g in cost.gradients
            if g.of in model_names  # else of a constant: a parameter that is not the model's
        ),
    )


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A context that hides torch's warnings about single operations on made-up numbers."""
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
    """The device of the model; for one on meta, the best device of this machine."""
    model = graph.module.model
    first = next(iter((*model.parameters(), *model.buffers())), None)
    if first is None or first.is_meta:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return first.device


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
