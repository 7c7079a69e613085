"""One call tried once: what it saves for backward, what it returns, and its workspace.

The call runs in isolation (`outcore.cost.measured.isolated_call`), on fake tensors where it has a fake form, else on
real ones if they are small. Hooks see every tensor that autograd saves; its storage says which it is: an input, the
output, a weight, or one that only backward knows of (a cast, indices, a mask, statistics). A count of the living bytes
(`outcore.cost.measured.live_bytes`) sees the workspace. Gradients are noted with the layout in which they are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from outcore.cost.costs import CallCost, Gradient, Source
from outcore.cost.measured.isolated_call import IsolatedCall, Stride
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.saved import DerivedTensor, Saved
from outcore.graph import Graph
from outcore.graph.aliasing import storage_key
from outcore.graph.record.preserve import state_restored
from outcore.graph.record.recording import Recording, Step
from outcore.graph.strides import same_layout
from outcore.ops.registry import kinds, names

_REAL_LIMIT = 256 * 2**20
_UNFAITHFUL = names(*kinds("recurrent"))
"""Layers whose fake form leaves out what the real one keeps (the workspace of the library that runs them)."""
_PACKED = _UNFAITHFUL | names(*kinds("packing"))
"""Calls that take lengths of sequences as tensors without checks: made-up ones let them read and write anywhere."""


def try_call(
    graph: Graph,
    step: Step,
    recording: Recording,
    device: torch.device,
    arriving: Mapping[str, Stride] | None = None,
) -> tuple[CallCost, str]:
    """The cost of a call tried on fake tensors, else on real ones, else what the graph alone says, with the reason.

    `arriving` has the strides of gradients of its outputs that have another layout than the outputs.
    """
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
    if block.type in _PACKED and any(graph.values[v].dtype.startswith(("int", "uint")) for v in call.inputs):
        ways = ways[:1]
    elif block.type in _UNFAITHFUL:
        ways = [*ways[1:], ways[0]]
    whole = runs_on_the_model(graph, step)
    for fake, integers in ways:
        if not fake and size > _REAL_LIMIT:
            continue
        mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        own = state_restored(graph.module.model, gradients=whole) if not fake or whole else contextlib.nullcontext()
        try:
            with own:
                isolated = IsolatedCall(graph, step, recording, device, fake=mode, integers=integers, arriving=arriving)
                return _run_and_record(isolated, blank, "analytic" if fake else "measured"), ""
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            reason = reason or f"{type(error).__name__}: {first}"[:200]
    return blank, reason


def runs_on_the_model(graph: Graph, step: Step) -> bool:
    """Whether a call cannot be isolated from the model and may change it: a checkpointed part runs the model's own
    modules, in backward once more, and updates the statistics of their batch norms each time."""
    target = graph.module.model.get_submodule(step.target) if step.kind == "module" else None
    block = graph.blocks[graph.calls[step.name].block]
    return block.kind == "opaque" or (target is not None and "forward" in target.__dict__)


def _run_and_record(isolated: IsolatedCall, blank: CallCost, source: Source) -> CallCost:
    """Run forward and backward once and record what was saved and needed."""
    names = _Names(isolated)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        handle = tensor.detach()
        if (key := storage_key(handle)) is not None:
            kept.setdefault(key, handle)
        return handle

    live = LiveBytes(isolated.held)
    with live:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle):
            outputs = isolated.forward()
        forward_peak, after = live.peak, live.live
        flops, issued = live.flops, live.issued
        names.outputs(outputs)
        saved = tuple(names.saved(tensor, live) for tensor in kept.values())
        derived = sum(s.bytes for s in saved if s.kind == "derived")
        hidden = after - derived - sum(names.sizes.values())
        kept.clear()
        roots, gradients = isolated.gradients_for(outputs)
        del outputs
        made: tuple[Gradient, ...] = ()
        rise = 0
        before = live.issued  # making gradients up is no part of it
        if roots:
            start = live.restart()
            found = isolated.backward(roots, gradients)
            rise = live.peak - start
            made = tuple(names.gradients(found, roots, gradients))
            del found
    if hidden > 0 and roots:  # kept by a node itself, where no hook is asked
        saved = (*saved, Saved("hidden", "derived", hidden, DerivedTensor("kept by the operation itself")))
    return replace(
        blank,
        flops_forward=flops,
        flops_backward=live.flops - flops,
        issue_forward=issued,
        issue_backward=live.issued - before,
        parameter_bytes=sum(_bytes(t) for t in isolated.state.values()),
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

    def __init__(self, isolated: IsolatedCall) -> None:
        self._isolated = isolated
        self._of: dict[int | None, tuple[str, str]] = {}
        for name, tensor in isolated.state.items():
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            self._of.setdefault(storage_key(tensor), (name, kind))
        for name, tensor in isolated.values.items():
            self._of.setdefault(storage_key(tensor), (name, "value"))
        self.sizes: dict[str, int] = {}
        self._outputs: list[tuple[str, torch.Tensor]] = []

    def outputs(self, tensors: list[torch.Tensor]) -> None:
        """Note the outputs; those in memory of their own get a size."""
        for name, tensor in zip(self._isolated.call.outputs, tensors, strict=True):
            key = storage_key(tensor)
            if key is not None and key not in self._of:
                self._of[key] = (name, "value")
                self.sizes[name] = tensor.untyped_storage().nbytes()
            self._outputs.append((name, tensor))

    def saved(self, tensor: torch.Tensor, live: LiveBytes) -> Saved:
        """The `Saved` entry of a saved tensor."""
        key, size = storage_key(tensor), tensor.untyped_storage().nbytes()
        if key in self._of:
            name, kind = self._of[key]
            return Saved(name, kind, size)  # type: ignore[arg-type]
        operation, source = live.made_by.get(key or 0, ("", None))
        made_by, dtype = operation.removeprefix("aten."), str(tensor.dtype).removeprefix("torch.")
        of = self._of[source][0] if source in self._of else ""
        return Saved(str(key), "derived", size, DerivedTensor(made_by, dtype, tuple(tensor.shape), of))

    def gradients(
        self, found: tuple[torch.Tensor | None, ...], roots: list[torch.Tensor], given: list[torch.Tensor]
    ) -> Iterator[Gradient]:
        """The memory of each gradient, and whether it is only passed on."""
        names = {id(t): n for n, t in (*self._isolated.state.items(), *self._isolated.values.items())}
        root_names = {id(t): n for n, t in reversed(self._outputs)}
        origin = {storage_key(g): root_names.get(id(r), "") for r, g in zip(roots, given, strict=True)}
        seen: dict[int | None, str] = {}
        for tensor, gradient in zip(self._isolated.wanted, found, strict=True):
            if gradient is None:
                continue
            key, name = storage_key(gradient), names[id(tensor)]
            stride = _odd_stride(gradient, tensor)
            if key in origin:
                yield Gradient(name, 0, origin[key], stride)
            elif key in seen:
                yield Gradient(name, 0, None, stride)
            else:
                seen[key] = name
                size = gradient.untyped_storage().nbytes() if key is not None else _bytes(gradient)
                yield Gradient(name, size, None, stride)


def _odd_stride(gradient: torch.Tensor, of: torch.Tensor) -> Stride | None:
    """The strides of a gradient if its layout differs from what it belongs to."""
    if gradient.layout is not torch.strided or of.layout is not torch.strided:
        return None
    odd = not same_layout(tuple(of.shape), gradient.stride(), of.stride())
    return tuple(gradient.stride()) if odd else None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
