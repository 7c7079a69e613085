"""What forward makes without naming a device is where the weights are, for ranks that record without them too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outcore
from tests.run.making_tensors import Making, job, momentum, refused, steps, train
from tests.run.pool import Pool


def test_a_network_without_memory_is_recorded_with_what_it_makes() -> None:
    with torch.device("meta"):
        bare = Making()
    graph = outcore.capture(bare, (torch.empty(2, 6, dtype=torch.long, device="meta"),))
    assert not graph.notes and graph.values[graph.outputs[0]].shape == (2, 6, 20)
    named = outcore.capture(Making(), (torch.randint(20, (2, 6)),))
    assert list(graph.calls) == list(named.calls) and graph.fingerprint == named.fingerprint


@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_stages_of_a_network_that_makes_tensors_train_as_plain(ranks: Pool, schedule: Any) -> None:
    made = job()
    plain = made.build()
    optimizer = momentum(plain.parameters())
    for inputs, targets in steps():
        optimizer.zero_grad()
        assert made.loss is not None
        made.loss(plain(inputs), targets).backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    found: dict[str, Any] = {}
    for weights in ranks.run(train, 2, schedule):
        found |= weights
        assert all(float((wanted[name] - tensor).abs().max()) < 1e-12 for name, tensor in weights.items())
    assert found.keys() == wanted.keys()


def test_a_network_that_looks_at_numbers_is_refused_with_what_to_do(ranks: Pool) -> None:
    for said in ranks.run(refused, 2):
        assert "use a plan of one stage" in said
