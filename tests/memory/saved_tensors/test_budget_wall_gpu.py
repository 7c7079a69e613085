"""Networks drawn at random train under a hard limit of the process at their budget, or are refused before training.

python -m tests.memory.saved_tensors.test_budget_wall_gpu FIRST COUNT [FILE]      a line of JSON for each
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.errors import PlanError
from tests.memory.drawn_networks import Drawn, drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS, REFUSALS = 3, 5


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def steps(case: Drawn, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses of some steps, as a loop takes them."""
    found = []
    torch.manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = case.model(case.batch)
        loss = loss_of(output)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    optimizer.zero_grad()
    return found


def on_device(seed: int) -> Drawn:
    case = drawn(seed, random.Random(seed).choice([4, 16, 32]))
    return Drawn(case.text, case.model.cuda(), case.batch.cuda(), case.optimizer)


def settled() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def _where(error: BaseException) -> list[str]:
    """The last places that an error came through."""
    return [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-12:]


def under_a_wall(seed: int) -> dict[str, Any]:
    """What became of a network at a budget between the smallest that is named and what plain training reserves."""
    total = torch.cuda.get_device_properties(0).total_memory
    case = on_device(seed)
    row: dict[str, Any] = {"seed": seed, "case": case.text}
    settled()
    want = steps(case, case.optimizer(case.model.parameters()))
    row["plain"] = torch.cuda.max_memory_reserved()
    del case
    settled()
    case = on_device(seed)
    optimizer = case.optimizer(case.model.parameters())
    begin = time.monotonic()

    def within(budget: int) -> None:
        options: dict[str, Any] = {"loss": loss_of, "optimizer": optimizer, "measure_s": 0.3, "quiet": True}
        outcore.within(case.model, (case.batch,), memory=budget, graphs=False, stream=False, **options)

    try:
        within(1)
    except PlanError as refused:
        row["least"] = refused.least_bytes
    budget = int(row["least"] + random.Random(-seed).random() ** 2 * max(0, row["plain"] - row["least"]))
    row["refused"] = []
    try:
        for _ in range(REFUSALS):
            settled()
            torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total))
            try:
                within(budget)
                break
            except PlanError as refused:
                row["refused"].append(budget)
                budget = max(refused.least_bytes or 0, budget + 1)
        row |= {"budget": budget, "state": str(getattr(outcore.memory_plan(case.model), "state", ""))}
        row["policies"] = len(getattr(outcore.memory_plan(case.model), "policy", ()))
        row["planned_s"] = round(time.monotonic() - begin, 1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        try:
            got = steps(case, optimizer)
            row["losses"] = max(abs(a - b) / (abs(a) + 1e-9) for a, b in zip(want, got, strict=True))
        except torch.OutOfMemoryError as error:
            row["out_of_memory"] = str(error)[:600]
            row["where"] = _where(error)
            row["allocated"] = torch.cuda.memory_allocated()
        after = torch.cuda.memory_stats()
        row["retries"], row["ooms"] = (after[n] - before[n] for n in ("num_alloc_retries", "num_ooms"))
        row["reserved"] = torch.cuda.max_memory_reserved()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return row


@pytest.mark.parametrize("seed", range(24))
def test_what_is_accepted_trains_under_a_hard_limit(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = under_a_wall(seed)
    print(row)
    assert "out_of_memory" not in row
    assert row["reserved"] <= row["budget"]
    assert row["losses"] < 0.05


def main(numbers: str, path: Path) -> None:
    """Try networks and write a line for each."""
    warnings.simplefilter("ignore")
    ranges = [[*map(int, part.split("-"))] for part in numbers.split(",")]
    for seed in [seed for part in ranges for seed in range(part[0], part[-1] + 1)]:
        try:
            row = under_a_wall(seed)
        except Exception as error:
            row = {"seed": seed, "error": f"{type(error).__name__}: {error}"[:400], "where": _where(error)}
            row["traceback"] = traceback.format_exc()[-5000:]
        with path.open("a") as file:
            print(json.dumps(row), file=file)
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "wall.jsonl"))
