"""What a layer says about itself, and when it asks the device for it."""

from __future__ import annotations

import pytest
import torch

from outcore.scan.report import LayerReport, SolveOutcome


@pytest.mark.parametrize(
    ("cells", "solver", "sweeps"),
    [
        ([0, 0, 0, 0], "relaxation", 1),
        ([1, 0, 0, 0], "relaxation", 2),
        ([1, 1, 0, 0], "products", 3),
        ([1, 1, 0, 1], "sequential", 4),
    ],
)
def test_an_outcome_is_read_from_the_cells_of_the_device(cells: list[int], solver: str, sweeps: int) -> None:
    outcome = SolveOutcome.on_device(torch.tensor(cells, dtype=torch.int32), 2, looked=False)
    assert outcome.known
    assert (outcome.solver, outcome.sweeps) == (solver, sweeps)
    assert outcome.gave_up == (solver != "relaxation")


def test_a_sequence_of_one_chunk_did_not_give_up() -> None:
    assert not SolveOutcome("sequential", 1).gave_up


def test_an_outcome_tells_of_the_last_replay() -> None:
    cells = torch.zeros(4, dtype=torch.int32)
    outcome = SolveOutcome.on_device(cells, 2, looked=False)
    assert outcome.solver == "relaxation"
    cells[:2] = 1
    assert outcome.solver == "products"


def test_a_forward_pass_that_ran_sequentially_on_the_device_is_said() -> None:
    cells, changes = torch.tensor([1, 1, 0, 0], dtype=torch.int32), torch.tensor([0.25, 0.5])
    forward = SolveOutcome.on_device(cells, 2, looked=False, otherwise="sequential", changes=changes)
    layer = LayerReport(segment=100, chunk=10, forward=forward)
    assert (layer.iterations, layer.correction) == (3, 0.5)
    assert "5.0e-01" in layer.fell_back
    assert "forward sequential" in str(layer)
