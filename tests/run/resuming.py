"""What ranks do in checkpoint tests: train, save, stop, resume."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from outcore.errors import CheckpointError
from outcore.run import Engine
from tests.file_size_limit import limit_file_size
from tests.run.networks import CASES
from tests.run.training import batches_of, make_plan, share

BY_STAGES = {
    1: {"stages": 2, "placement": (0, 0), "micro_batches": 4},
    2: {"stages": 2, "schedule": "1f1b", "micro_batches": 4},
    4: {"stages": 4, "schedule": "gems", "batches": 4},
}


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def no_decay(name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.0} if parameter.ndim < 2 else {}


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def make(case: str, plan: dict[str, Any], **options: Any) -> Engine:
    options = {"optimizer": adam, "scheduler": cosine, "groups": no_decay, "clip_norm": 1.0} | options
    return Engine(CASES[case].job, make_plan(case, **plan), **options)


def go(
    case: str,
    plan: dict[str, Any],
    start: int,
    end: int,
    path: str = "",
    *,
    save: bool = False,
    load: bool = False,
    wait: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train steps `start` to `end`, from a checkpoint or into one."""
    engine = make(case, plan, **options)
    batches = batches_of(case, end, 8)[start:]
    extra = engine.load(path) if load else None
    assert engine.steps == start
    losses = []
    for inputs, targets in batches:
        part = [share(d, engine.replica, engine.plan.replicas) for d in (inputs, targets)]
        losses.append(engine.step(*part))
        torch.rand(1), random.random()
    if save:
        engine.save(path, extra={"epoch": 3}, wait=wait)
        if not wait:
            engine.engine_state.finish()
    answer = {
        "losses": losses,
        "weights": {n: t.clone() for n, t in engine.state_dict().items()},
        "extra": extra,
        "drawn": (float(torch.rand(1)), random.random()),
        "rate": [g["lr"] for g in engine.optimizer.param_groups],
    }
    engine.close()
    return answer


def save_twice(case: str, plan: dict[str, Any], path: str, limit_rank: int = -1) -> tuple[str, float]:
    """Save, train on, save again; on one rank the second time there is no room. The message, and the loss after it."""
    engine = make(case, plan)
    batches = batches_of(case, 3, 8)
    engine.step(*batches[0])
    engine.save(path)
    engine.step(*batches[1])
    message = ""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.rank == limit_rank:
        limit_file_size(512)
    try:
        engine.save(path)
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    loss = engine.step(*batches[2])
    engine.close()
    return message, loss


def survive(
    case: str, plan: dict[str, Any], path: str, steps: int, kill_rank: int, kill_after_s: float, saved: int = 0
) -> tuple[int, Any]:
    """Train with a checkpoint after every step; a rank is killed at a moment that nothing knows of.

    The moment is `kill_after_s` after this run has saved `saved` times. Returned are the step that was loaded (0 where
    there was nothing) and the weights in the end. Where a checkpoint was ever complete, it must load.
    """
    engine = make(case, plan, timeout_s=10.0, grace_s=2.0)
    if (Path(path) / "latest").exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one that was never completed is passed over
            engine.load(path)
    loaded = engine.steps

    def kill() -> None:
        time.sleep(kill_after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    for inputs, targets in batches_of(case, steps, 8)[loaded:]:
        if engine.rank == kill_rank and engine.steps == loaded + saved:
            threading.Thread(target=kill, daemon=True).start()
        engine.step(inputs, targets)
        engine.save(path)
    weights = engine.state_dict()
    engine.close()
    return loaded, {n: t.clone() for n, t in weights.items()}


def signalled(case: str, plan: dict[str, Any], path: str, number: int, rank: int) -> tuple[int, Any]:
    """A rank gets a signal in step 2; how many steps were done, and with which code the run ended."""
    engine = make(case, plan, checkpoints=path)
    done, code = 0, None
    try:
        for step, (inputs, targets) in enumerate(batches_of(case, 5, 8)):
            if step == 2 and engine.rank == rank:
                os.kill(os.getpid(), number)
            engine.step(inputs, targets)
            done += 1
    except SystemExit as exit:
        code = exit.code
    engine.close()
    return done, code
