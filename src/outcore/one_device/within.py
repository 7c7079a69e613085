"""Any model within a memory budget, on one device.

    model = outcore.within(model, (images,), memory="8GiB")     # the training loop stays as it is

The same object comes back. Its own forward runs as ever, and every piece of memory that backward needs has a policy:
kept, made again, sent to the host (from a CPU: to the disk) and fetched in time, or held in a smaller form. Which is
decided from the costs of the model's own calls, so that the predicted peak is within the budget and the step is as fast
as it can be. Gradients, losses and buffers are those of plain training, bit for bit.

Where no policy is enough, and for images that are read lazily, the early part of the network runs tile by tile
(`outcore.stream.managed_forward`): the same loop, the same gradients up to the order of sums, and the plan says so.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_args

import torch
from torch import nn

from outcore.compiled.auto import faster_of
from outcore.compiled.install import is_compiled
from outcore.cost.costs import Costs
from outcore.errors import ModelError, OutcoreError, PlanError
from outcore.keras.installed import on_tensorflow, refuse_keras_2
from outcore.keras.tensorflow import planned as tensorflow_plan
from outcore.keras.torch_backend import hold_as_keras
from outcore.machine.units import parse_bytes
from outcore.memory.param_offload.bucketed_step import in_parts
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.memory.saved_tensors.sharded import is_sharded, on_whole_parameters
from outcore.one_device.keras_fit import fit_of, inputs_of, prepared
from outcore.one_device.steps import (
    Exactness,
    Network,
    Request,
    compile_model,
    install,
    manage,
    measure_costs,
    record,
    stream_tiles,
)
from outcore.planner.memory.plan import MemoryPlan
from outcore.planner.memory.state_policy import StatePolicy
from outcore.program.plan.document import Plan

if TYPE_CHECKING:
    from outcore.compiled.plan import CompiledPlan
    from outcore.stream.execute.pixel_loss import PixelLoss
    from outcore.stream.managed_forward import StreamedForward
    from outcore.stream.plan.step_document import StreamedStep


def within(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int | None,
    loss: Callable[[Any], torch.Tensor] | PixelLoss | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | float | None = None,
    plan: Plan | Mapping[str, str] | None = None,
    costs: Costs | None = None,
    measure_s: float = 2.5,
    graphs: bool | Literal["auto"] = "auto",
    exact: Exactness = "bitwise",
    state: StatePolicy | Mapping[str, Any] | None = None,
    stream: bool | None = None,
    statistics: bool = False,
    compile: bool | Literal["auto"] = False,
    quiet: bool = False,
) -> nn.Module:
    """Make a model train within a memory budget; returns the same model.

    >>> import torch, outcore
    >>> net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(16)))
    >>> images = torch.randn(4096, 64)
    >>> plain = outcore.memory_plan(outcore.within(net, (images,), memory=None, quiet=True)).plain_bytes
    >>> net = outcore.within(net, (images,), memory=int(0.7 * plain), quiet=True)
    >>> net(images).sum().backward()
    >>> outcore.memory_plan(net).peak_bytes <= 0.7 * plain
    True

    Args:
        model: any module, in the mode it will be trained in; nothing in it is changed but what ``forward`` runs.
        args: the positional arguments of a call, or their shapes. On a GPU with a budget, a few steps are taken with
            them before this returns, and the model put back (`outcore.memory.saved_tensors.trial_steps`).
        kwargs: the keyword arguments.
        memory: the most a training step may hold ("8GiB", bytes, or "50%" of what plain training is predicted to
            take), with weights, gradients and optimizer state in it, on a GPU as far as a plan is found all that
            is reserved (else a warning says what is), on a CPU the bytes of living tensors; None for the fastest step
            whatever it holds.
        loss: a function of the model's output, so that its memory is counted too; without it nothing is. An
            `outcore.stream.PixelLoss` is taken in one pass over the tiles, by `outcore.stream.pixel_loss`.
        optimizer: the optimizer, or how it is made, or the size of its state over that of the parameters; without it
            Adam's is assumed.
        plan: policies chosen by hand, or a plan that was made before.
        costs: of the model's calls, from `outcore.measure`; without them they are measured now.
        measure_s: how long measuring may take.
        graphs: run forward and backward as CUDA graphs: for small steps, which the interpreter cannot feed fast enough.
            Their memory stays reserved between steps, all of it within the budget. "auto": under a budget on a GPU,
            where the first steps show that the loop allows it and that it is faster
            (`outcore.memory.cuda_graphs.choose`).
        exact: "bitwise" for the numbers of plain training bit for bit; "reassociated" also allows kernels that round in
            another order: fused norms, and on a GPU images with their channels last inside the network, each where
            that is faster, convolutions of more than 2^31 numbers in bands of rows, and the last layer with its loss in
            chunks of rows (`outcore.memory.chunked_loss`), where that fits or is faster.
        state: where parameters, gradients and optimizer state live ("keep" or "offload" each), and when parameters are
            updated (`outcore.planner.memory.state_policy.StatePolicy`); needs the optimizer itself. Without it they
            leave the device if the optimizer was given and nothing else meets the budget, or only slower.
        stream: whether images are streamed in tiles, whose sums come in another order than plain training's; without
            it, if nothing else meets the budget or an image is read lazily (`outcore.data`).
        statistics: accept further passes over the image for norms over the whole of it, when it is streamed.
        compile: forward and backward are torch.compile's kernels, and what is saved between them is chosen under the
            budget (`outcore.compiled`). Compiling takes as long as ever. A model that cannot be compiled, or whose
            compiled step has no room, is managed as without, and a line says so. "auto": whichever trains faster, seen
            in a few steps of each (`outcore.compiled.auto`).
        quiet: do not say what was chosen.

    Raises:
        PlanError: the budget is too small; names the smallest that works.
    """
    _refuse_foreign(model)
    if _on_tensorflow(model):
        return tensorflow_plan.within_options(dict(locals()))  # type: ignore[no-any-return]
    if compile == "auto":
        return faster_of(within, dict(locals()))
    release(model)
    if is_sharded(model):
        return on_whole_parameters(within, dict(locals()))
    _check(model, exact)
    if graphs not in (True, False, "auto"):
        raise OutcoreError(f'graphs is True, False or "auto", not {graphs!r}')
    if state is None and isinstance(plan, Plan) and plan.state:
        state = plan.state
    if state is not None and not StatePolicy.of(state).idle:
        in_parts(optimizer)
    if "keras" in sys.modules:
        args = inputs_of(model, args)
        kwargs, loss, optimizer = fit_of(model, kwargs, loss, optimizer, bitwise=exact == "bitwise")
    asked = Request(
        model,
        args,
        kwargs,
        *_budget(memory),
        loss,
        optimizer,
        plan,
        measure_s,
        graphs,
        exact,
        state,
        stream,
        statistics,
        quiet,
    )
    with prepared(model) if "keras" in sys.modules else contextlib.nullcontext():
        return _planned(asked, costs, compiled=bool(compile))


def _planned(asked: Request, costs: Costs | None, *, compiled: bool) -> nn.Module:
    """The model with a forward of a plan in the place of its own."""
    network = record(asked)
    fixed = asked.plan is not None or asked.state is not None
    too_large: PlanError | None = None
    if compiled and not (network.lazy or asked.stream or fixed):
        try:
            found = compile_model(asked, network)
        except PlanError as refused:
            found, too_large = None, refused.with_traceback(None)
            if not asked.quiet:
                print(f"outcore: {refused}; managed call by call instead", file=sys.stderr)
        if found is not None:
            return found
    try:
        return _managed(asked, network, costs, fixed=fixed)
    except PlanError as refused:
        if too_large is None or (refused.least_bytes or sys.maxsize) <= (too_large.least_bytes or sys.maxsize):
            raise
        raise too_large from None


def _managed(asked: Request, network: Network, costs: Costs | None, *, fixed: bool) -> nn.Module:
    """The model managed call by call, or in tiles."""
    network = measure_costs(asked, network, costs)
    if network.lazy or asked.stream or network.tiles is not None:
        return stream_tiles(asked, network)
    try:
        managed_forward, way = manage(asked, network)
    except PlanError as refused:
        if asked.stream is False or fixed:
            raise
        return stream_tiles(asked, network, refused)
    return install(asked, network, managed_forward, way)


def _on_tensorflow(model: Any) -> bool:
    """Whether it is a Keras model on TensorFlow; before Keras is imported there is none."""
    return "keras" in sys.modules and on_tensorflow(model)


def _refuse_foreign(model: Any) -> None:
    """Refuse what is neither a torch module nor a model of Keras 3."""
    refuse_keras_2(model)
    if not isinstance(model, nn.Module) and not _on_tensorflow(model):
        kind = type(model)
        raise ModelError(
            f"outcore.within takes a torch module or a Keras 3 model; {kind.__module__}.{kind.__name__} is none"
        )


def _check(model: nn.Module, exact: str) -> None:
    """Refuse what cannot be managed."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise OutcoreError("give outcore.within the model, then wrap the result: DDP(outcore.within(model, ...))")
    if exact not in get_args(Exactness):
        raise OutcoreError(f"exact is {' or '.join(map(repr, get_args(Exactness)))}, not {exact!r}")


def release(model: nn.Module) -> nn.Module:
    """Undo `within`; returns the same model.

    >>> import torch, outcore
    >>> net = torch.nn.Linear(2, 2)
    >>> net = outcore.release(outcore.within(torch.nn.Sequential(net), [(1, 2)], memory=None, quiet=True))
    >>> "forward" in net.__dict__
    False
    """
    if _on_tensorflow(model):
        return tensorflow_plan.release(model)  # type: ignore[no-any-return]
    if "keras" in sys.modules:
        hold_as_keras(model)
    managed_forward = model.__dict__.get("forward")
    if isinstance(managed_forward, ManagedForward):
        del model.__dict__["forward"]
        if managed_forward.inner is not None:
            model.__dict__["forward"] = managed_forward.inner
        if managed_forward.keeper is not None:
            managed_forward.keeper.close()
            managed_forward.keeper = None
    elif _is_streamed(managed_forward):
        del model.__dict__["forward"]
        managed_forward.close()
    elif is_compiled(managed_forward):
        del model.__dict__["forward"]
        managed_forward.discard()
        model.__dict__.update(managed_forward.before)
    return model


def memory_plan(model: nn.Module) -> MemoryPlan | StreamedStep | CompiledPlan | tensorflow_plan.TensorFlowPlan:
    """What `within` has decided for a model: policies, tiles, or what compiled kernels save."""
    if _on_tensorflow(model):
        return tensorflow_plan.memory_plan(model)
    managed_forward = model.__dict__.get("forward")
    if is_compiled(managed_forward):
        assert managed_forward.plan is not None
        return managed_forward.plan
    if _is_streamed(managed_forward):
        assert managed_forward.step is not None
        return managed_forward.step
    if not isinstance(managed_forward, ManagedForward):
        raise OutcoreError("this model is not under outcore.within")
    return managed_forward.plan


def _budget(memory: str | int | None) -> tuple[float | None, int | None]:
    """A budget as a share of what plain training takes, or in bytes."""
    if isinstance(memory, (float, bool)):
        raise OutcoreError(f'memory={memory} says neither bytes nor a share; write memory="8GiB" or memory="50%"')
    if isinstance(memory, str) and memory.strip().endswith("%"):
        try:
            share = float(memory.strip()[:-1]) / 100
        except ValueError:
            share = 0.0
        if not share > 0:
            raise OutcoreError(f'memory={memory!r} is no share of what plain training takes; write memory="50%"')
        return share, None
    return None, parse_bytes(memory) if isinstance(memory, str) else memory


def _is_streamed(forward: Any) -> TypeGuard[StreamedForward]:
    if "outcore.stream.managed_forward" not in sys.modules:  # so that importing this does not import that
        return False
    from outcore.stream.managed_forward import StreamedForward

    return isinstance(forward, StreamedForward)
