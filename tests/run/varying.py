"""What ranks do in tests of options: one small training each, in plain words."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.program import Links, Stages
from outcore.program.list_scheduler import synthesised_orders
from outcore.program.written_order import program_in_order, write_order
from outcore.run import Engine, LossScale
from outcore.run.stage.stage_module import Part, RandomDraws
from tests.run.networks import CASES, Residual, UNet, classes, images
from tests.run.training import batches_of, fingerprint, gradients, make_plan, momentum, share

GEMS = {"stages": 2, "schedule": "gems", "batches": 2}
PIPE = {"stages": 2, "schedule": "1f1b", "micro_batches": 4}
ALONE = {"stages": 2, "placement": (0, 0), "micro_batches": 4}


def decay(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.0} if parameter.ndim == 1 else {"lr": 0.02}


def run(
    case: str, plan: dict[str, Any], sizes: tuple[int, ...] = (8, 8), *, freeze: str = "", **options: Any
) -> dict[str, Any]:
    """Train on batches of these sizes with options of the engine; losses, norms and weights."""
    job = CASES[case].job
    if freeze:
        job = outcore.Job(lambda: _frozen(CASES[case].job.build(), freeze), job.batch, job.loss, size=job.size)
    made = make_plan(case, **plan)
    engine = Engine(job, made, **({"optimizer": momentum} | options))
    losses, norms, scales = [], [], []
    for i, size in enumerate(sizes):
        torch.manual_seed(i)
        part = [share(d, engine.replica, made.replicas) for d in job.batch(size)]
        losses.append(engine.step(*part))
        norms.append(engine.update.norm)
        scales.append(engine.update.scale.scale if engine.update.scale else None)
    answer = {
        "losses": losses,
        "norms": norms,
        "scales": scales,
        "skipped": engine.update.skipped,
        "samples": engine.samples,
        "weights": {n: t.clone() for n, t in engine.state_dict().items()},
    }
    engine.close()
    return answer


def _frozen(model: nn.Module, prefix: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefix))
    return model


def images_of_sides(plan: dict[str, Any], sides: tuple[int, ...]) -> list[float]:
    """Image sizes that change from step to step; the middle ranks are given no data."""
    engine = Engine(CASES["unet"].job, make_plan("unet", **plan), optimizer=momentum)
    losses = []
    for side in sides:
        torch.manual_seed(side)
        inputs, targets = images(4, side)
        # The input is read by the first stage and, beside the last skip, by the last.
        middle = engine.rank not in (0, engine.world.size - 1)
        losses.append(engine.step(*((None, None) if middle else (inputs, targets))))
    engine.close()
    return losses


def synthesised(inverted: bool) -> dict[str, Any]:
    """A synthesised order in place of a schedule."""
    plan = make_plan("unet", stages=2, schedule="gems" if inverted else "gpipe", batches=4 if inverted else 1)
    engine = Engine(CASES["unet"].job, make_plan("unet", stages=2, micro_batches=4), optimizer=momentum)
    edges = engine.assembly.step_programs.stages.edges
    engine.close()
    base = Stages.uniform(2, gradient_bytes=8)
    stages = Stages(base.stages, edges)
    found = synthesised_orders(stages, 4, None, Links())
    rows = next(write_order(orders) for setting, orders in found if setting.inverted == inverted)
    program = program_in_order(stages, rows, inverted=inverted)
    engine = Engine(CASES["unet"].job, plan, optimizer=momentum, program=program)
    losses = [engine.step(*batch) for batch in batches_of("unet", 3, 8)]
    answer = {"losses": losses, "weights": {n: t.clone() for n, t in engine.state_dict().items()}}
    engine.close()
    return answer


def norms_of_batches(mode: str, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Batch-norm statistics and weights after two steps under a meaning of them."""
    engine = Engine(CASES["resnet"].job, make_plan("resnet", batch_norm=mode, **plan), optimizer=momentum)
    for inputs, targets in batches_of("resnet", 2, 8):
        engine.step(*(share(d, engine.replica, engine.plan.replicas) for d in (inputs, targets)))
    state = {n: t.clone() for n, t in engine.state_dict().items()}
    engine.close()
    return state


def timelines(plan: dict[str, Any]) -> tuple[Any, str, int]:
    """The measured timeline, the comparison as text, and how many tensors are left alive by more steps."""
    engine = Engine(CASES["unet"].job, make_plan("unet", **plan), optimizer=momentum)
    batches = batches_of("unet", 4, 8)
    engine.count_memory()
    counts = []
    for step in range(16):
        engine.step(*batches[step % 4])
        gc.collect()
        counts.append(_living())
    timeline, text = engine.timeline(), str(engine.comparison())
    # A thread may hold a tensor for a moment more, and a rank that runs ahead for the first time needs another row of
    # shared memory, which it keeps. What leaks is more in every quarter of the steps than in the one before.
    quarters = [counts[at : at + 4] for at in range(0, 16, 4)]
    grown = min(min(after) - max(before) for before, after in itertools.pairwise(quarters))
    engine.close()
    return timeline, text, grown


def _living() -> int:
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def hooked() -> list[str]:
    """Every forward of a stage goes through the one place."""
    seen: list[str] = []

    def execute(part: Part, inputs: dict[str, torch.Tensor], draws: RandomDraws) -> dict[str, torch.Tensor]:
        seen.append(",".join(part.outputs))
        return part.run(inputs, draws)

    engine = Engine(CASES["unet"].job, make_plan("unet", **ALONE), optimizer=momentum, execute=execute)
    engine.step(*batches_of("unet", 1, 8)[0])
    return seen


def module_in_place() -> tuple[bool, bool]:
    """A module that is handed over is trained itself; evaluating leaves modes and numbers alone."""
    torch.manual_seed(engine_seed := 3)
    model = Residual().double()
    model.blocks[0].eval()
    plan = outcore.Plan(fingerprint("resnet"), CASES["resnet"].cuts[2], micro_batches=2, placement=(0, 0))
    inputs, targets = classes(4)
    engine = Engine(model, plan, loss=F.cross_entropy, optimizer=momentum, example=inputs, seed=engine_seed)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    engine.step(inputs, targets)
    after = {n: t.clone() for n, t in model.state_dict().items()}
    changed = not torch.equal(before["head.weight"], after["head.weight"])
    frozen = torch.equal(before["blocks.0.1.running_mean"], after["blocks.0.1.running_mean"])
    flags = [m.training for m in model.modules()]
    engine.evaluate(inputs, targets)
    same = flags == [m.training for m in model.modules()]
    same &= all(torch.equal(t, after[n]) for n, t in model.state_dict().items())
    return changed and frozen, same


def refused(what: str) -> str:
    """What the engine says to a plan or data that does not fit."""
    rank = torch.distributed.get_rank()
    job, plan = CASES["unet"].job, make_plan("unet", **PIPE)
    size = 8
    if what == "ranks":
        plan = make_plan("unet", stages=3)
    elif what == "network":
        plan = make_plan("resnet", stages=2)
    elif what == "different plans":
        plan = make_plan("unet", stages=2, micro_batches=1 + rank)
    elif what == "different shapes":
        size = 8 + 4 * rank
    elif what == "different code" and rank == 1:
        job = outcore.Job(lambda: UNet(norm=True).double(), job.batch, job.loss, size=8)
        plan = outcore.Plan(job.capture().fingerprint, CASES["unet"].cuts[2], micro_batches=4, schedule="1f1b")
    elif what == "synchronised":
        plan = make_plan("unet", batch_norm="synchronised", **PIPE)
    try:
        engine = Engine(
            job, plan, optimizer=momentum, device="cuda" if what == "no gpu" else None, timeout_s=10.0, grace_s=2.0
        )
        data = (None, None) if what == "no data" else job.batch(size)
        if what == "shapes known before":
            for known in (8, 12):
                engine.step(*job.batch(known))
            data = job.batch(8 + 4 * rank)
        if what == "different dtypes" and rank == 1:
            data = (data[0].float(), data[1])
        if what == "different structure" and rank == 1:
            data = ((data[0], None), data[1])
        engine.step(*data)
    except outcore.OutcoreError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


__all__ = ["ALONE", "GEMS", "PIPE", "LossScale", "gradients", "run"]
