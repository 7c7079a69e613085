"""What ranks that are threads have sent is counted, tensor by tensor."""

from __future__ import annotations

import torch

from outcore.spatial.communicator import ThreadRanks


def test_messages_and_bytes_are_counted_and_what_nobody_took_is_known() -> None:
    ranks = ThreadRanks(2)
    for size in (3, 5):
        tensor = torch.ones(size, dtype=torch.float64)
        ranks.count(tensor)
        ranks.line(0, 1, 7).put(tensor)
    assert (ranks.messages, ranks.sent_bytes, ranks.leftovers()) == (2, 64, 2)
    assert ranks.line(0, 1, 7).get().numel() == 3 and ranks.leftovers() == 1 and ranks.line(1, 0, 7).empty()
