"""Pieces of tensors, region by region."""

from __future__ import annotations

import torch

from outcore.graph.record.recording import Ref
from outcore.stream.call import RuleContext
from outcore.stream.rules.pieces import Slice


def test_one_channel_is_taken_alike_wherever_the_pixels_lie() -> None:
    """So that tiles with the same contents are computed once, whatever their position."""
    x = torch.arange(3 * 8 * 8.0).view(1, 3, 8, 8)
    rule = Slice((Ref("value", "x"),), tuple(x.shape), ((0, 1, 0), (1, 1, None), (0, 1, 1), (0, 1, 2)), 3)
    regions = [((0, 1), (a, a + 4), (b, b + 4)) for a in (0, 4) for b in (0, 4)]
    for region in regions:
        (needed,) = rule.needs(region)
        crop = x[tuple(slice(*side) for side in needed)]
        wanted = x[:, 1][tuple(slice(*side) for side in region)]
        assert torch.equal(rule.run([crop], region, RuleContext()), wanted)
    assert len({rule.place(region) for region in regions}) == 1
