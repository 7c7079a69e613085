"""From an unmodified model to a graph.

The model runs once on *fake* tensors, which have shapes but no memory, so that an image of 100,000 x 100,000 pixels
costs nothing; parameters stay as they are and are looked at only for their shapes. Where the model looks at numbers, or
an operation has no fake form, it runs on real data instead, and the graph says so.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from outcore.errors import CaptureError, JobError
from outcore.graph.graph import Graph
from outcore.graph.naming import kind_of
from outcore.graph.parts import ROOT, Block, parent
from outcore.graph.record.captured_module import CapturedModule
from outcore.graph.record.intercept import intercepted
from outcore.graph.record.preserve import RandomStates, preserved
from outcore.graph.record.recorder import Recorder
from outcore.graph.record.recording import Recording, Ref
from outcore.graph.record.second_call import KEPT, is_only_kept
from outcore.graph.record.watched_run import WatchedRun
from outcore.graph.source import blame, definition
from outcore.graph.structure import device_of, leaves, substitute

_REAL_INPUT_LIMIT = 64 * 2**20
_ONE_AT_A_TIME = threading.RLock()
"""A lock: while recording, torch's own functions are patched, so only one thread may record."""


def capture(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None) -> Graph:
    """Record a model as a graph of the user's own modules, without running it.

    >>> import outcore, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    >>> graph = outcore.capture(net, [(1, 3, 100_000, 100_000)])
    >>> graph.adjacency()
    {'0': ['1'], '1': []}

    Args:
        model: any module; nothing in it is changed.
        args: the positional arguments of ``forward``: tensors on any device, ``meta`` tensors, shapes as tuples, and
            whatever else it takes.
        kwargs: the keyword arguments.

    Raises:
        CaptureError: the model cannot be recorded; names the block and the source line.
    """
    _refuse_other(model)
    _refuse_lazy(model)
    args, kwargs = _arguments(model, args, kwargs)
    recorder, recording, notes = _record_somehow(model, args, kwargs)
    module = CapturedModule(model, lambda *call: _record_somehow(*call)[1])
    module.keep(recording, *_as_called(model, args, kwargs))
    module.given = _without_content(args, kwargs)
    return _graph(recorder, recording, notes, module)


def _record_somehow(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Recorder, Recording, tuple[str, ...]]:
    """Record one run: on fake tensors, and if that fails on real ones.

    What a library sets up in the first run (the backend of a type of tensors) stays, and is no part of a second.
    """
    with _ONE_AT_A_TIME:
        found = _record_alone(model, args, kwargs)
        effects = found[1].effects
        return _record_alone(model, args, kwargs) if effects is not None and effects.lost else found


def _record_alone(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Recorder, Recording, tuple[str, ...]]:
    try:
        return (*_record(model, args, kwargs, real=False), ())
    except Exception as error:
        reason = _explain(error)
        if device_of(model).type == "meta":
            # What forward makes without naming a device is then beside the weights, as where both are on a CPU.
            with contextlib.suppress(Exception), torch.device("meta"):
                return (*_record(model, args, kwargs, real=False), ())
        try:
            real_args, real_kwargs = _realised(model, args, kwargs)
        except CaptureError as too_large:
            raise CaptureError(f"{reason}; {too_large}") from error
    recorder, recording = _record(model, real_args, real_kwargs, real=True)
    return recorder, recording, (f"recorded on real data: {reason}",)


def _record(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, real: bool
) -> tuple[Recorder, Recording]:
    fake = FakeTensorMode(allow_non_fake_inputs=True) if not real else None
    if fake is not None:
        args, kwargs = substitute((args, kwargs), torch.Tensor, lambda t: _faked(t, fake, model))
    args, kwargs = _each_its_own(args, kwargs)
    names = _input_names(model, args, kwargs)
    tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
    recorder = Recorder(model, list(zip(names, tensors, strict=True)), fake=fake)
    watched, randomness = WatchedRun(model), RandomStates()
    try:
        with preserved(model, contents=real):
            with (
                _quietly(),
                intercepted(recorder),
                fake or contextlib.nullcontext(),
                watched.watching(recorder.is_quiet),
                recorder,
            ):
                result = model(*args, **kwargs)
            recorder.volatile |= randomness.host_drawn()
            recording = recorder.recording(result)
            recording.effects = watched.effects(recorder.ref)
            if recording.effects.lost and _is_only_kept(recorder, recording, args, kwargs):
                recording.effects = replace(recording.effects, lost=())
        recording.reads = watched.snapshot(recording.constants.values())
        return recorder, recording
    except Exception as error:
        error.__outcore_block__ = recorder.failed_in  # type: ignore[attr-defined]
        if not real or isinstance(error, CaptureError):
            raise
        raise CaptureError(_explain(error)) from error


def _is_only_kept(first: Recorder, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the next call, with what the first has kept outside of the model, needs no change of that any more."""
    model, fake = first.model, first.fake
    args, kwargs = substitute((args, kwargs), torch.Tensor, _alias)  # the next call brings others
    tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
    second, watched = Recorder(model, list(zip(first.inputs, tensors, strict=True)), fake=fake), WatchedRun(model)
    kept = first.references.living()
    second.know({KEPT + name: tensor for name, tensor in kept.items()})
    versions = [tensor._version for tensor in kept.values()]
    try:
        with (
            _quietly(),
            intercepted(second),
            fake or contextlib.nullcontext(),
            watched.watching(second.is_quiet),
            second,
        ):
            result = model(*args, **kwargs)
        repeated = second.recording(result)
        repeated.effects = effects = watched.effects(second.ref)
    except Exception:  # the first call was fine; what this one lacks is that the first is needed
        return False
    untouched = versions == [tensor._version for tensor in kept.values()]
    return untouched and not effects.lost and not second.volatile and is_only_kept(recording, repeated)


def _graph(recorder: Recorder, recording: Recording, notes: tuple[str, ...], module: CapturedModule) -> Graph:
    consumers: dict[str, list[str]] = {}
    for call in recorder.calls.values():
        for value in call.inputs:
            consumers.setdefault(value, []).append(call.name)
    cls = type(recorder.model)
    returned: dict[str, str] = {}
    for path, ref in leaves(recording.result, Ref):
        if ref.kind == "value":
            returned.setdefault(ref.name, path)
    values = {n: replace(v, consumers=tuple(consumers.get(n, ()))) for n, v in recorder.values.items()}
    return Graph(
        model=f"{cls.__module__}.{cls.__qualname__}",
        training=recorder.model.training,
        inputs=recorder.inputs,
        outputs=tuple(returned),
        output_names=tuple(returned.values()),
        blocks=blocks_of(recorder),
        calls=recorder.calls,
        values=values | {n: replace(values[n], held_until=call) for n, call in recorder.held_until.items()},
        notes=notes,
        executable=(module, recording),
    )


# Arguments


def _arguments(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as ``forward`` takes them, shapes turned into meta tensors."""
    if isinstance(args, torch.Tensor | torch.Size) or _is_shape(args):
        args = (args,)
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise CaptureError(f"args must be a tuple of forward's arguments, not {type(args).__name__}; write args=(x,)")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())

    def stand_in(value: Any) -> Any:
        return torch.empty(tuple(value), dtype=dtype, device="meta")

    positional = tuple(stand_in(a) if _is_shape(a) else a for a in args)
    return positional, {k: stand_in(v) if isinstance(v, torch.Size) else v for k, v in (kwargs or {}).items()}


def _is_shape(value: Any) -> bool:
    if isinstance(value, torch.Size):
        return True
    return isinstance(value, tuple) and len(value) > 0 and all(type(n) is int and n >= 0 for n in value)


def _input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Names of the tensors in the arguments, after the parameters of ``forward``."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = []
    for i, argument in enumerate(args):
        base = positional[i] if i < len(positional) else f"arg{i}"
        names += [f"{base}.{path}" if path else base for path, _ in leaves(argument, torch.Tensor)]
    return names + [path for path, _ in leaves(kwargs, torch.Tensor)]


def arguments_as_called(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `capture` takes, as a call of the model would bring it: shapes as tensors without content."""
    return _as_called(model, *_arguments(model, args, kwargs))


def _as_called(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as a call would bring them: on the model's device."""
    device = device_of(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        called: tuple[tuple[Any, ...], dict[str, Any]] = substitute(
            (args, kwargs), torch.Tensor, lambda t: _faked(t, fake, model) if t.is_meta and device.type != "meta" else t
        )
    return called


def _without_content(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with tensors that have shapes and no memory; None for what has no strides (sparse tensors)."""

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)

    if any(tensor.layout is not torch.strided for _, tensor in leaves((args, kwargs), torch.Tensor)):
        return None
    found: tuple[tuple[Any, ...], dict[str, Any]] = substitute((args, kwargs), torch.Tensor, stand_in)
    return found


def _each_its_own(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a tensor that is given twice as two: ``model(input_ids=x, labels=x)`` reads each where it
    stands, and the next call may bring two different ones."""
    seen: set[int] = set()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            return tensor
        return _alias(tensor)

    found: tuple[tuple[Any, ...], dict[str, Any]] = substitute((args, kwargs), torch.Tensor, own)
    return found


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor with the same memory, a leaf of the graph."""
    with torch.no_grad():
        return tensor.detach().requires_grad_(tensor.requires_grad)


def _faked(tensor: torch.Tensor, mode: FakeTensorMode, model: nn.Module) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.is_meta and device_of(model).type != "meta":
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device_of(model))
            return made.requires_grad_(tensor.requires_grad)
    return mode.from_tensor(tensor)


def _realised(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with small random data where only a shape was given."""
    if device_of(model).type == "meta":
        raise CaptureError("and there are no weights to run it on real data; build the model on a real device")
    missing = [t for _, t in leaves((args, kwargs), torch.Tensor) if t.is_meta or isinstance(t, FakeTensor)]
    size = sum(t.numel() * t.element_size() for t in missing)
    if size > _REAL_INPUT_LIMIT:
        raise CaptureError(
            f"and the inputs ({size / 2**20:,.0f} MiB) are too large to try it on real data; "
            "capture with a smaller input, or pass real tensors"
        )
    generator = torch.Generator().manual_seed(0)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            made = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator, device="cpu")
        else:
            made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        return made.to(device_of(model)).requires_grad_(tensor.requires_grad)

    realised: tuple[tuple[Any, ...], dict[str, Any]] = substitute((args, kwargs), torch.Tensor, real)
    return realised


# Trouble


def _refuse_other(model: object) -> None:
    """Refuse what is no torch module: a class, a function, a model of another framework."""
    if isinstance(model, nn.Module):
        return
    kind = model if isinstance(model, type) else type(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        advice = f"that is a class; make a model of it: {kind.__name__}(...)"
    elif "keras" in kind.__module__ or any("keras" in base.__module__ for base in kind.__mro__):
        advice = "give a model of Keras 3 to outcore.keras.to_torch first"
    else:
        advice = "put what it computes into the forward of one"
    raise CaptureError(f"a torch module is recorded, and {kind.__module__}.{kind.__qualname__} is none; {advice}")


def _refuse_lazy(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise CaptureError(
                f"{name or 'the model'} is a {type(module).__name__} whose parameters have no shape yet; "
                "run the model once on a small batch, then capture it"
            )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """A context in which compiled functions run as they are written (only shapes are wanted) and torch's log is
    silent."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext():
            yield
    finally:
        log.setLevel(level)


def _explain(error: BaseException) -> str:
    """One line: what was wrong, in which block, at which line of the user's code."""
    if isinstance(error, JobError):  # of a module that outcore put around the user's: a sentence as it stands
        return str(error)
    block = getattr(error, "__outcore_block__", None)
    where = f" in block {block}" if block else ""
    line = f" at {place}" if (place := blame(error)) else ""
    message = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}{where}{line}: {message[0]}"


def blocks_of(recorder: Recorder) -> dict[str, Block]:
    """All blocks of a recorded model by path: the model first, each block before the blocks inside it."""
    model = recorder.model
    modules = dict(model.named_modules())
    others: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        others.setdefault(id(module), []).append(name)

    children: dict[str, list[str]] = {}
    for path in dict.fromkeys((*recorder.kinds, *modules)):
        for ancestor in _line(path):
            siblings = children.setdefault(parent(ancestor), [])
            if ancestor not in siblings:
                siblings.append(ancestor)

    found: dict[str, Block] = {}

    waiting = [ROOT]
    while waiting:  # no inner function that calls itself: it would keep the model alive until garbage is collected
        path = waiting.pop()
        module = modules.get(path)
        called = recorder.kinds.get(path)
        kind, type_ = called or (
            kind_of(module) if module is not None else "container",
            type(module).__name__,
        )
        inside = tuple(children.get(path, ())) if kind == "container" else ()
        parameters = {id(p): p.numel() for p in module.parameters()} if module is not None else {}
        found[path] = Block(
            path=path,
            kind=kind,
            type=type_,
            detail=module.extra_repr() if module is not None else _detail(recorder, path),
            children=inside,
            calls=recorder.counts[path],
            parameters=sum(parameters.values()),
            source=definition(type(model).forward) if path == ROOT else recorder.sources.get(path, ""),
            aliases=tuple(n for n in others.get(id(module), ()) if n != path),
        )
        waiting.extend(reversed(inside))
    return found


def _line(path: str) -> list[str]:
    """The path and those of the blocks around it, outermost first, without the whole model."""
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _detail(recorder: Recorder, path: str) -> str:
    call = recorder.calls.get(f"{path}#0")
    return call.detail if call else ""
