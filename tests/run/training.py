"""What ranks do in tests: train a case under a plan and hand back losses, gradients and weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import outcore
from outcore.graph.structure import leaves, substitute
from outcore.run import Engine
from tests.run.networks import CASES


@cache
def fingerprint(case: str) -> str:
    return CASES[case].job.capture().fingerprint


def make_plan(case: str, **options: Any) -> outcore.Plan:
    count = options.pop("stages")
    stages = (("",),) if count == 1 else CASES[case].cuts[count]
    return outcore.Plan(fingerprint(case), stages, **options)


def batches_of(case: str, count: int, size: int) -> list[tuple[Any, Any]]:
    torch.manual_seed(7)
    return [CASES[case].job.batch(size) for _ in range(count)]


def share(data: Any, replica: int, replicas: int) -> Any:
    """The part of a batch that a replica is given."""

    def part(t: torch.Tensor) -> torch.Tensor:
        return t.tensor_split(replicas)[replica]

    return substitute(data, torch.Tensor, part)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in engine.parameters.items() if p.grad is not None}


def train(case: str, plan: dict[str, Any], steps: int = 3, size: int = 8, **options: Any) -> dict[str, Any]:
    """Train on one rank of a world; the first step's gradients, all losses, final weights."""
    made = make_plan(case, **plan)
    engine = Engine(CASES[case].job, made, optimizer=momentum, **options)
    found: dict[str, torch.Tensor] = {}
    engine.update.before_step = lambda: found.update(gradients(engine)) if not found else None
    losses = []
    for inputs, targets in batches_of(case, steps, size):
        part = [share(d, engine.replica, made.replicas) for d in (inputs, targets)]
        losses.append(engine.step(*part))
    inputs, targets = batches_of(case, 1, size)[0]
    part = [share(d, engine.replica, made.replicas) for d in (inputs, targets)]
    answer = {
        "losses": losses,
        "gradients": found,
        "weights": {n: t.clone() for n, t in engine.assembly.local_state().items()},
        "evaluated": engine.evaluate(*part),
        "stages": engine.stages,
    }
    engine.close()
    return answer


def two_steps(case: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Train two steps under a plan (a document); losses, weights, and the peaks of the second."""
    engine = Engine(CASES[case].job, outcore.Plan.from_json(plan), optimizer=momentum)
    first, second = batches_of(case, 2, 8)
    losses = [engine.step(*first)]
    engine.count_memory()
    losses.append(engine.step(*second))
    peaks = engine.timeline().peak_bytes
    weights = {n: t.clone() for n, t in engine.state_dict().items()}
    engine.close()
    return {"losses": losses, "weights": weights, "peaks": peaks}


def plain(case: str, pieces: int, steps: int = 3, size: int = 8, make: Any = momentum) -> dict[str, Any]:
    """The same training in plain PyTorch: a loop over the micro-batches."""
    job = CASES[case].job
    torch.manual_seed(0)
    model = job.build().train()
    optimizer = make(model.parameters())
    losses, first = [], {}
    for inputs, targets in batches_of(case, steps, size):
        optimizer.zero_grad()
        total = 0.0
        for i in range(pieces):
            x, t = share(inputs, i, pieces), share(targets, i, pieces)
            rows = next(iter(tensors(x))).shape[0]
            loss = job.loss(model(**x) if isinstance(x, dict) else model(x), t)
            (loss * (rows / size)).backward()
            total += rows / size * loss.item()
        losses.append(total)
        first = first or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    model.eval()
    inputs, targets = batches_of(case, 1, size)[0]
    with torch.no_grad():
        evaluated = 0.0
        for i in range(pieces):
            x, t = share(inputs, i, pieces), share(targets, i, pieces)
            rows = next(iter(tensors(x))).shape[0]
            evaluated += rows / size * job.loss(model(**x) if isinstance(x, dict) else model(x), t).item()
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    return {"losses": losses, "gradients": first, "weights": weights, "evaluated": evaluated}


def alone(case: str, pieces: int, steps: int = 3, size: int = 8, **options: Any) -> dict[str, Any]:
    """The same training by the engine on one rank."""
    plan = {"stages": min(CASES[case].cuts), "placement": (0, 0), "micro_batches": pieces}
    return train(case, plan, steps, size, **options)


def tensors(data: Any) -> list[torch.Tensor]:
    return [t for _, t in leaves(data, torch.Tensor)]


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference over the largest number."""
    largest = max(float(t.abs().max()) for t in b.values() if t.is_floating_point())
    return max(float((a[n] - b[n]).abs().max()) for n in a) / max(largest, 1e-300)
