"""What an engine is made of before it runs: device, model, first recording, optimizer; and what must hold of them.

A job builds its model once more on the meta device, where it takes no memory; that skeleton is what is recorded, so a
rank keeps the weights of its own stages only (`strip`). A model that is handed over as a module is recorded as it is,
and trained in place.

An optimizer over other parameters than the model's, and a loss that does not depend on them, train nothing and raise
nothing: such a run ends "finished". Both are refused with the first step at the latest, where that costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from outcore.compiled.install import is_compiled
from outcore.cost.optimizer_cost import needs_closure
from outcore.errors import EngineError, OutcoreError, PlanError
from outcore.graph import Graph
from outcore.job import Job
from outcore.memory.param_offload.separable import separable_step
from outcore.program.plan.document import Plan
from outcore.run.engine import batch as batches
from outcore.run.ranks.world import World

MakeOptimizer: TypeAlias = Callable[[Iterable[Any]], torch.optim.Optimizer]
Groups: TypeAlias = Callable[[str, nn.Parameter], Mapping[str, Any]]
"""Options of the optimizer for a parameter, by its name; parameters with equal ones form a group."""

_DETACHED = "was it computed under no_grad, or from .detach(), .item() or .data?"


def choose_device(given: str | torch.device | None, local_rank: int = 0) -> torch.device:
    """The device of a rank: what was asked for, else its GPU, else the host."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(given) if given is not None else torch.device("cuda" if count else "cpu")
    except RuntimeError:
        raise EngineError(f"no device {given!r}; use cpu, cuda or, for one GPU of several, cuda:1") from None
    if device.type == "cuda":
        if not count:
            raise EngineError('device "cuda" was asked for, but torch sees no GPU here; use "cpu"')
        index = device.index if device.index is not None else local_rank % count
        if index >= count:
            raise EngineError(f"device cuda:{index} was asked for, but there are {count} GPUs here")
        return torch.device("cuda", index)
    return device


def build(source: Job | nn.Module, *, seed: int, lean: bool, bare: bool) -> tuple[nn.Module, nn.Module]:
    """The model, and what is recorded of it; `lean` for a skeleton, `bare` for a model without weights yet."""
    if isinstance(source, nn.Module):
        if any(is_compiled(module.__dict__.get("forward")) for module in source.modules()):
            raise EngineError(
                "this model is under outcore.within(..., compile=True), whose graphs an engine's stages cannot run; "
                "outcore.release(model) it first, or train it without an engine"
            )
        return source, source
    if not isinstance(source, Job):
        raise EngineError(f"an engine takes a Job or a torch.nn.Module, not {type(source).__name__}")
    skeleton: nn.Module | None = None
    if lean or bare:
        try:
            skeleton = source.build("meta").train()
        except (OutcoreError, NotImplementedError):
            if bare:
                raise
    if bare and skeleton is not None:
        return source.build("meta").train(), skeleton
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = source.build().train()
    if skeleton is not None and _same_shape(model, skeleton):
        return model, skeleton
    return model, model


def _same_shape(a: nn.Module, b: nn.Module) -> bool:
    def names(module: nn.Module) -> list[tuple[str, torch.Size]]:
        return [(n, t.shape) for n, t in (*module.named_parameters(), *module.named_buffers())]

    return names(a) == names(b)


def example_of(source: Job | nn.Module, example: Any, pieces: int) -> Any:
    """Inputs of one micro-batch, to record the network with before any data is there."""
    if example is None:
        if not isinstance(source, Job):
            raise EngineError(
                "the engine must know what the model takes before it can be cut; pass example=inputs (one batch), "
                "or a Job instead of the model"
            )
        try:
            args, kwargs, _ = source.example(device="meta")
        except (OutcoreError, NotImplementedError):
            args, kwargs, _ = source.example()
        example = kwargs or args
    count = batches.rows(example)
    return batches.cut(example, count, batches.parts(count, min(pieces, count)))[0]


def first_graph(skeleton: nn.Module, model: nn.Module, record: Callable[[], Graph]) -> Graph | None:
    """A recording of the skeleton that can run with real weights; None if it holds tensors without content."""
    graph = record()
    constants = graph.recording.constants.values()
    if skeleton is not model and any(t.is_meta for t in constants):
        return None
    return graph


def agree(world: World, plan: Plan, graph: Graph) -> None:
    """Check that all ranks run the same plan on the same network with the same code; raises naming the ranks that do
    not."""
    plan.validate(graph, ranks=world.size)
    from outcore import __version__

    mine = {
        "network": graph.fingerprint,
        "plan": plan.to_json(),
        "torch": torch.__version__.split("+")[0],
        "outcore": __version__,
    }
    for rank, theirs in enumerate(world.share(mine)):
        for what, value in mine.items():
            if theirs[what] != value:
                raise PlanError(
                    f"rank {rank} runs another {what} than rank {world.rank}"
                    + ("" if what == "plan" else f" ({theirs[what]}, not {value})")
                    + "; start all ranks with the same code, job and plan"
                )


def make_optimizer(
    make: MakeOptimizer,
    groups: Groups | None,
    every: Sequence[tuple[str, nn.Parameter]],
    held: Mapping[str, nn.Parameter],
) -> torch.optim.Optimizer:
    """The user's optimizer over the parameters this rank holds.

    The groups are those of the whole model on every rank, some of them empty here, so that schedulers and checkpoints
    mean the same everywhere.
    """
    if groups is None:
        return make([{"params": list(held.values())}])
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in every:
        options = dict(groups(name, parameter))
        group = found.setdefault(repr(sorted(options.items())), {"params": [], **options})
        if name in held:
            group["params"].append(held[name])
    return make(list(found.values()))


def strip(model: nn.Module, held: Iterable[torch.Tensor]) -> None:
    """Drop the content of parameters and buffers that this rank does not hold; what is tied stays tied."""
    kept = {id(t): t for t in held}
    bare: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or tensor.is_meta or id(tensor) in kept:
                    continue
                if id(tensor) not in bare:
                    empty = torch.empty_like(tensor, device="meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    bare[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    kept[id(bare[id(tensor)])] = bare[id(tensor)]
                store[name] = bare[id(tensor)]  # type: ignore[assignment]


def materialise(parts: Iterable[nn.Module], device: torch.device) -> None:
    """Give parts of a model on the meta device memory; their content comes from a checkpoint."""
    for part in parts:
        for name, buffer in part.named_buffers():
            if buffer.is_meta and name not in part.state_dict():
                raise EngineError(
                    f"buffer {name} is in no checkpoint and cannot be made on the meta device; leave weights= out"
                )
        part.to_empty(device=device)


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], error: type[OutcoreError]
) -> None:
    """Refuse an optimizer that holds none of the model's parameters, or whose step has to be given a closure."""
    if needs_closure(optimizer):
        raise error(
            f"a step of {type(optimizer).__name__} has to be given a closure that computes the loss again, and the "
            "loop has none; use another optimizer, or write the loop yourself around outcore.within"
        )
    model = {id(p) for p in parameters}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if model and not any(id(p) in model for p in held):
        raise error(
            f"the optimizer holds {len(held)} parameters and none of the {len(model)} of the model, so it would train "
            "nothing; make it from the parameters it is given: optimizer(params)"
        )


def check_separable(make: MakeOptimizer, *, divided: bool, copied: bool) -> None:
    """Refuse an optimizer that would train something else on several ranks than on one.

    Args:
        make: makes it of parameters.
        divided: whether a step is taken for some parameters here and for others elsewhere or later.
        copied: whether several ranks hold and update copies of the same parameter.
    """
    if not divided and not copied:
        return
    found = separable_step(lambda params: make([{"params": list(params)}]))
    if divided and found.why_not is not None:
        raise EngineError(
            f"{found.why_not}, so its step cannot be divided among stages or ranks without training something else; "
            "use a plan of one stage, or an optimizer that updates each parameter by itself"
        )
    if copied and found.random:
        raise EngineError(
            "the optimizer draws random numbers, which differ between ranks that hold the same parameter, so that "
            "their copies would drift apart; train on one rank"
        )


def check_loss(loss: Any, error: type[OutcoreError]) -> None:
    """Refuse a loss that cannot be differentiated."""
    if not isinstance(loss, torch.Tensor):
        raise error(f"loss(output, target) returned {type(loss).__name__}; it must return a tensor with one number")
    if loss.numel() != 1:
        raise error(
            f"loss(output, target) returned a tensor of shape {list(loss.shape)}; it must be one number: .mean() it"
        )
    if not loss.requires_grad:
        raise error(f"the loss does not depend on any parameter of the model, so nothing can be learned; {_DETACHED}")


def check_gradients(found: float, error: type[OutcoreError]) -> None:
    """Refuse to go on when no parameter of the model, on any rank, got a gradient."""
    if not found:
        raise error(f"the loss gave no parameter of the model a gradient, so nothing can be learned; {_DETACHED}")
