"""What one rank does in tests over several hosts: trains by a plan for as many ranks as there are, and says each step.

python host_training.py '{"steps": 4, "kind": "grid", "silent_after_s": 5, "path": null}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.run import Engine
from outcore.run.ranks import faults

PIXELS, SEED = 24, 3


def model() -> nn.Module:
    torch.manual_seed(SEED)
    layers = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3, padding=1)]
    return nn.Sequential(*layers).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(100 + step)
    x = torch.randn(4, 2, PIXELS, PIXELS, generator=drawn, dtype=torch.float64)
    return x, x.square()


def plan_for(ranks: int, kind: str, net: nn.Module) -> outcore.Plan:
    """A grid, or as many stages as ranks; the same arithmetic on any number of them."""
    fingerprint = outcore.capture(net, batch(0)[0]).fingerprint
    if ranks == 1:
        return outcore.Plan(fingerprint, (("",),))
    if kind == "grid":
        return outcore.Plan(fingerprint, (("",),), spatial={"grid": [1, ranks]}, exactness="reassociated")
    names = [["0"], ["1", "2"], ["3"]] if ranks == 3 else [["0", "1"], ["2", "3"]]
    return outcore.Plan(fingerprint, tuple(map(tuple, names)))


def losses_of_plain(steps: int) -> list[float]:
    """One process, plain PyTorch."""
    net = model().train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    faults.SILENT_AFTER_S = given["silent_after_s"]
    net = model()
    ranks = int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    engine = Engine(
        net,
        plan_for(ranks, given["kind"], net),
        loss=F.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        example=batch(0)[0],
        timeout_s=given.get("timeout_s", 60.0),
        grace_s=5.0,
    )
    path = given["path"]
    if path is not None and any(Path(path).glob("*")):
        engine.load(path)
    say(rank=engine.rank, ranks=ranks, begins=engine.steps)
    while engine.steps < given["steps"]:
        loss = engine.step(*batch(engine.steps))
        if path is not None:
            engine.save(path)
        say(rank=engine.rank, step=engine.steps, loss=loss)
        time.sleep(given.get("pause_s", 0.0))
    engine.close()


if __name__ == "__main__":
    main()
