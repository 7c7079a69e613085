"""The same network, recorded with fewer samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.errors import CaptureError
from outcore.graph.record.part_of_batch import batch_size, capture_part


class Weighted(nn.Module):
    """Takes a tensor of the batch by name, and one that belongs to all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, table: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * mask[:, None] @ table
        return found


def test_tensors_of_the_batch_are_cut_and_the_others_stay() -> None:
    given = {"table": torch.zeros(3, 5), "mask": torch.zeros(8)}
    graph = outcore.capture(Weighted(), (torch.zeros(8, 3),), given)
    part = capture_part(graph, 2)
    assert batch_size(graph) == 8 and batch_size(part) == 2
    assert [part.values[name].shape for name in part.inputs] == [(2, 3), (3, 5), (2,)]
    assert list(part.calls) == list(graph.calls) and part.module.model is graph.module.model


def test_modes_of_the_recording_hold_again() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        graph = outcore.capture(nn.Linear(4, 4), (torch.zeros(8, 4),))
    part = capture_part(graph, 2)
    assert {part.values[name].dtype for name in part.outputs} == {"bfloat16"}


def test_a_recording_that_is_kept_holds_no_data() -> None:
    given = outcore.capture(nn.Linear(4, 4), (torch.zeros(8, 4),)).module.given
    assert given is not None and given[0][0].is_meta and given[0][0].shape == (8, 4)


class Branching(nn.Module):
    """Runs something else on few samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.other = kind, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        few = x.shape[0] < 4
        if self.kind == "more" and few:
            x = self.other(x)
        if self.kind == "dtype" and few:
            return self.layer(x).double()
        if self.kind == "dtype":
            return self.layer(x).float()
        if self.kind == "samples":
            return torch.stack([self.layer(row) for row in x])
        if self.kind == "fails" and few:
            raise ValueError("too few samples")
        return self.layer(x)


@pytest.mark.parametrize("kind", ["more", "dtype", "samples", "fails"])
def test_a_network_that_runs_otherwise_on_fewer_samples_is_refused(kind: str) -> None:
    graph = outcore.capture(Branching(kind), (torch.zeros(8, 4),))
    with pytest.raises(CaptureError):
        capture_part(graph, 2)


def test_a_graph_from_a_file_has_no_parts() -> None:
    graph = outcore.Graph.from_json(outcore.capture(nn.Linear(4, 4), (torch.zeros(8, 4),)).to_json())
    with pytest.raises(CaptureError, match="not known"):
        capture_part(graph, 2)
