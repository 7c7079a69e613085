"""Models drawn at random, against their twins: Keras itself in float64 on torch is the oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMPARED = ("evaluation", "training", "inputs", "weights", "statistics", "predict")


def drawn(first: int, last: int) -> list[dict[str, Any]]:
    """The differences of some models from their twins, in a process of its own: Keras has one backend in each."""
    environment = {**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.keras.drawn_twins", str(first), str(last)]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=900, check=False)
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines() if line.startswith("{")]


def check(rows: list[dict[str, Any]]) -> None:
    """Every model is carried over, and differs by rounding alone."""
    for row in rows:
        assert "refused" not in row and "failed" not in row, row
        if "plain Keras failed" in row:
            assert row["evaluation"] <= 1e-10, row
            continue
        allowed = max(1e-10, 100 * row["sensitivity"])
        assert allowed < 1e-6 and all(row[kind] <= allowed for kind in COMPARED), row


def test_some_drawn_models_are_carried_over() -> None:
    rows = drawn(0, 6)
    check(rows)
    assert len(rows) == 6


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_drawn_models_are_carried_over(first: int) -> None:
    rows = drawn(first, first + 50)
    check(rows)
    assert len(rows) == 50 and sum("plain Keras failed" in row for row in rows) < 3
    rows = [row for row in rows if "plain Keras failed" not in row]
    print(max(row[kind] for row in rows for kind in COMPARED))
