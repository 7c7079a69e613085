"""Training under policies beside plain training: the same numbers, and how much memory each took."""

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.graph.structure import leaves
from outcore.memory.offload.backends import DiskBackend
from outcore.memory.saved_tensors.live_forward import LiveForward
from outcore.memory.saved_tensors.policy_table import compile_policies
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.script import emit
from outcore.program.policies import KEEP, RECOMPUTE, Encode, Policy

LINK = OffloadTarget(1e11, 1e11, least_bytes=1)


@dataclass
class Result:
    """What a comparison found."""

    equal: bool
    """Loss, every gradient and every buffer, bit for bit."""
    differing: list[str]
    plain_bytes: int
    bytes: int
    """Peak of living tensors without weights and inputs."""
    predicted_bytes: int


def total(output: Any) -> torch.Tensor:
    """A loss that keeps little memory."""
    found = [t for _, t in leaves(output, torch.Tensor) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.sum() for t in found]).sum()


def policies(keeping: StepModel, mode: str, seed: int = 0) -> dict[str, Policy]:
    """An assignment: one policy wherever it can be, or a random mixture."""
    generator, found = random.Random(seed), dict[str, Policy]()
    for buffer in keeping.buffers.values():
        choices = keeping.choices(buffer)
        fitting = [c for c in choices if str(c).startswith(mode)]
        if mode == "mixture" and choices:
            found[buffer.name] = generator.choice([*choices, KEEP])
        elif fitting:
            found[buffer.name] = fitting[0]
        elif not buffer.savers and RECOMPUTE in choices:
            found[buffer.name] = RECOMPUTE
    made = [keeping.buffers[n] for n, how in found.items() if how == RECOMPUTE]
    for source in {s for buffer in made for s in buffer.sources}:
        if found.get(source) == Encode("sign"):
            found[source] = KEEP
    return found


def compare(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "mixture",
    seed: int = 0,
    loss: Callable[[Any], torch.Tensor] = total,
    link: OffloadTarget = LINK,
) -> Result | None:
    """Train one step both ways; none if the model cannot be replayed as it is."""
    kwargs = dict(kwargs or {})
    twin = copy.deepcopy(model)
    graph = outcore.capture(model, args, kwargs)
    assert graph.executable is not None
    recording = graph.executable[1]
    if recording.uses_data or recording.volatile:
        return None
    keeping = StepModel(graph, by_bytes(account(graph), 1e9), 0.0, link)
    policy = policies(keeping, mode, seed)
    outcome = keeping.evaluate(policy)
    table = compile_policies(graph, model, keeping.buffers, emit(keeping, policy))
    tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
    tier = DiskBackend(table.offloaded_bytes) if table.offloaded_bytes else None

    def under_policies() -> torch.Tensor:
        return loss(LiveForward(table, tier).run(type(model).forward.__get__(model), args, kwargs))

    plain_loss, plain_bytes = _step(lambda: loss(twin(*args, **kwargs)), twin, tensors)
    our_loss, our_bytes = _step(under_policies, model, tensors)
    differing = ["loss"] if not torch.equal(plain_loss, our_loss) else []
    theirs = dict(twin.named_parameters())
    differing += [n for n, p in model.named_parameters() if not _same(p.grad, theirs[n].grad)]
    buffers = dict(twin.named_buffers())
    differing += [n for n, b in model.named_buffers() if not torch.equal(b, buffers[n])]
    if tier is not None:
        tier.close()
    first = keeping.plain.moments[0].bytes
    held = first.weights + first.state + first.inputs
    return Result(not differing, differing, plain_bytes, our_bytes, outcome.peak_bytes - held)


def _step(run: Callable[[], torch.Tensor], model: nn.Module, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    torch.manual_seed(7)
    with LiveBytes([*model.parameters(), *model.buffers(), *tensors]) as live:
        value = run()
        value.backward()
        return value.detach(), live.peak


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
