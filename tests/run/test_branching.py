"""A parameter without a gradient has none after the replicas have added up theirs: a zero would be decayed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.run.branching import Net, batches, decaying, train
from tests.run.pool import Pool


def test_what_no_replica_has_a_gradient_of_is_left_alone(ranks: Pool) -> None:
    plain = Net()
    before = {n: t.clone() for n, t in plain.state_dict().items()}
    optimizer = decaying(plain.parameters())
    for inputs, targets in batches(3):
        optimizer.zero_grad()
        F.mse_loss(plain(inputs), targets).backward()
        optimizer.step()
    for weights in ranks.run(train, 2, 2, 3):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
        for name in ("dropped.weight", "dropped.bias"):
            assert torch.equal(weights[name], before[name])
        assert not torch.equal(weights["first.weight"], before["first.weight"])
