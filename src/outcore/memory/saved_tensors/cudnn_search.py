"""Convolutions whose algorithm cuDNN searches for: once in forward's thread, and once more in backward's.

With `torch.backends.cudnn.benchmark` the algorithm of a convolution is the fastest in a measurement, and torch
remembers it per thread. Forward runs in the user's thread. A convolution that is made again in backward runs in
autograd's thread for the device, which measures for itself, and of two algorithms that are about equally fast may take
the other one. The value made again, and every gradient between it and the input, then differ from those of plain
training by rounding, in all steps of the process.

    user's thread       forward: search ──▶ algorithm A ──▶ bits
    autograd's thread   backward: search ──▶ algorithm A, or B ──▶ the same bits, or others

So before a plan makes convolutions again, each of them runs once in both threads, on the same numbers. After that both
threads remember what they have chosen, for the rest of the process; and a convolution whose bits differ is never made
again in it, as if it were an operation that does not repeat itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from outcore.cost.costs import Costs
from outcore.cost.measured.isolated_call import IsolatedCall
from outcore.cost.measured.saved_bytes import signature
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.record.preserve import preserved
from outcore.graph.record.recording import Step
from outcore.memory.cuda_graphs.pool import without_limit
from outcore.ops.registry import kinds, names
from outcore.planner.memory.plan import MemoryPlan
from outcore.program.policies import Recompute

_CONVOLUTIONS = names(*kinds("convolution", "transposed convolution"))
_REPEATS: dict[Hashable, bool] = {}
"""What was seen in this process, by convolution."""


def searches(device: torch.device) -> bool:
    """Whether cuDNN searches for the fastest algorithm of each convolution here."""
    cudnn = torch.backends.cudnn
    return device.type == "cuda" and bool(cudnn.enabled and cudnn.benchmark)


def convolutions(graph: Graph, calls: Iterable[str]) -> list[str]:
    """The calls among some that are convolutions."""
    return [name for name in calls if graph.blocks[graph.calls[name].block].type in _CONVOLUTIONS]


def plan_repeatable(
    planned: Callable[[Costs], MemoryPlan], graph: Graph, costs: Costs, device: torch.device
) -> MemoryPlan:
    """A plan that makes no convolution again whose bits would differ.

    The convolutions that a plan makes again are tried, all of them if there is none; if any differ, so are the others,
    and the next plan, or refusal, is the last.

    Args:
        planned: makes a plan of costs.
        graph: the network.
        costs: of its calls.
        device: where it computes.

    Raises:
        PlanError: without those convolutions there is none; says so.
    """
    if not searches(device):
        return planned(costs)
    never = known_to_differ(graph, device)
    while True:
        plan, refused = None, None
        try:
            plan = planned(not_made_again(costs, never) if never else costs)
        except PlanError as error:
            refused = error
        if differing(graph, graph.calls if plan is None else made_again(plan), device) <= never:
            break
        never |= differing(graph, graph.calls, device)
    if plan is None:
        assert refused is not None
        raise _explained(refused, len(never)) if never else refused
    return plan


def warn_of_differing(plan: MemoryPlan, graph: Graph, device: torch.device) -> None:
    """Say which convolutions of policies that were chosen by hand are not made again bit for bit."""
    if searches(device) and (found := sorted(differing(graph, made_again(plan), device))):
        warnings.warn(
            f"outcore: {found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''} of the convolutions to be "
            "made again have another algorithm in backward, so that gradients differ by rounding: set "
            "torch.backends.cudnn.benchmark = False, or keep or offload what they make",
            stacklevel=5,
        )


def made_again(plan: MemoryPlan) -> set[str]:
    """The calls that a plan runs again in backward."""
    buffers = plan.keeping.buffers
    return {call for name, how in plan.policy.items() if isinstance(how, Recompute) for call in buffers[name].writers}


def _explained(refused: PlanError, count: int) -> PlanError:
    """A refusal that says what else would help."""
    those = "a convolution has" if count == 1 else f"{count} convolutions have"
    again = PlanError(
        f"{refused}; {those} another algorithm in backward, and cannot be made again bit for bit: set "
        f'torch.backends.cudnn.benchmark = False, or allow exact="reassociated"'
    )
    again.least_bytes, again.least_policy = refused.least_bytes, refused.least_policy
    return again


def known_to_differ(graph: Graph, device: torch.device) -> set[str]:
    """The convolutions of a graph that were seen to give other bits in backward's thread."""
    steps = graph.recording.calls()
    found = convolutions(graph, graph.calls)
    return {name for name in found if _REPEATS.get(_key(graph, steps[name], device)) is False}


def differing(graph: Graph, calls: Collection[str], device: torch.device) -> set[str]:
    """The convolutions among some calls that give other bits in backward's thread than in this one.

    Each runs in both, unless that was seen in this process before. One that cannot be run alone counts as differing.
    """
    steps = graph.recording.calls()
    wanted = {name: _key(graph, steps[name], device) for name in convolutions(graph, calls)}
    missing = {key: name for name, key in wanted.items() if key not in _REPEATS}
    if missing:
        with preserved(graph.module.model, contents=False), without_limit(device):
            for key, name in missing.items():
                _REPEATS[key] = _repeats(graph, name, device)
                torch.cuda.empty_cache()
    return {name for name, key in wanted.items() if not _REPEATS[key]}


def not_made_again(costs: Costs, calls: Collection[str]) -> Costs:
    """Costs in which some calls do not repeat themselves."""
    rows = {name: replace(row, repeats=row.repeats and name not in calls) for name, row in costs.calls.items()}
    return replace(costs, calls=rows)


def _key(graph: Graph, step: Step, device: torch.device) -> Hashable:
    """What the choice of an algorithm depends on."""
    cudnn, model = torch.backends.cudnn, graph.module.model
    weights = tuple(attrgetter(name)(model).stride() for name in graph.calls[step.name].parameters)
    modes = cudnn.deterministic, cudnn.allow_tf32, torch.are_deterministic_algorithms_enabled()
    return str(device), signature(graph, step), weights, modes


def _repeats(graph: Graph, name: str, device: torch.device) -> bool:
    recording = graph.recording
    step = next(s for s in recording.steps if s.name == name)
    try:
        isolated = IsolatedCall(graph, step, recording, device)
        here = isolated.forward()
        there = in_backward(isolated.forward, device)
        return all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    except Exception:  # too large to be tried alone, or its weights are elsewhere: nothing is known of it
        return False


def in_backward(work: Callable[[], list[torch.Tensor]], device: torch.device) -> list[torch.Tensor]:
    """What a function returns in the thread in which autograd runs backward for a device."""
    found: list[torch.Tensor] = []
    with torch.enable_grad():
        start = torch.zeros(1, device=device, requires_grad=True)
        _InBackward.apply(start, lambda: found.extend(work())).backward()  # type: ignore[no-untyped-call]
    return found


class _InBackward(torch.autograd.Function):
    """Calls a function when backward comes to it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, work: Callable[[], None]) -> torch.Tensor:
        ctx.work = work
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work()
        return gradient, None
