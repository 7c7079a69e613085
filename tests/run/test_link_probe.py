"""The link between the ranks of a run, as they measure it."""

from __future__ import annotations

import pytest
import torch

from outcore.errors import EngineError
from outcore.machine.link import Link
from outcore.run import measure_link
from outcore.run.link_probe import _fitted, _Probe
from outcore.run.ranks.world import World
from tests.run.pool import Pool


def _measured() -> Link:
    return measure_link(sizes={1 << 10: 4, 1 << 16: 3, 1 << 20: 2})


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_learns_the_same_link(ranks: Pool, size: int) -> None:
    found = ranks.run(_measured, size)
    assert len(set(found)) == 1
    assert found[0].host_s > 0 and found[0].away_bytes_per_s > 1e6 and found[0].gap_s == 0.0


_ALONE_S = 1e-9
"""What a message is said to take alone: less than any does."""


def _gap_after_exchanges() -> float:
    """What GPUs are asked for: exchanges between two ranks, then rows from everybody to everybody."""
    world = World.join(timeout_s=8.0)
    try:
        probe = _Probe(world, torch.device("cpu"))
        probe._exchange(1 << 10, 3)
        found = probe._gap_s(2, _ALONE_S)
        probe.close()
        return found
    finally:
        world.close()


def test_ranks_that_sat_out_the_exchanges_take_part_in_what_follows(ranks: Pool) -> None:
    """Of three ranks two exchange messages; the third has to number those of all three as they do."""
    found = ranks.run(_gap_after_exchanges, 3)
    assert found == [_ALONE_S] * 3  # a message never comes later than it would alone


def test_one_rank_has_no_link() -> None:
    with pytest.raises(EngineError, match="two ranks"):
        measure_link()


def test_times_that_lie_on_a_line_give_its_rate_and_latency() -> None:
    """Ten bytes a second, two seconds of latency and half a second of each host."""
    found = {nbytes: (3.0 + nbytes / 10, 1.0) for nbytes in (10, 100, 1000)}
    assert _fitted(found, False) == pytest.approx((0.1, 2.0, 0.5))
    assert _fitted(found, True) == pytest.approx((0.1, 3.0, 0.0))
    assert _fitted({10: None}, False) is None


def test_short_messages_that_go_another_way_do_not_make_the_link_faster() -> None:
    """What a link of 12.5 MB/s was seen to take whose first 16 KiB after a pause are not held up."""
    walls = {1 << 10: 0.19e-3, 1 << 13: 0.22e-3, 1 << 16: 4.6e-3, 1 << 20: 90e-3, 1 << 22: 374e-3}
    per_byte, latency_s, host_s = (
        _fitted({nbytes: (wall, 0.18e-3) for nbytes, wall in walls.items()}, False) or (0,) * 3
    )
    assert 1 / per_byte == pytest.approx(11.3e6, rel=0.02)
    assert host_s == pytest.approx(0.09e-3) and latency_s == 0.0
    for nbytes in (1 << 20, 1 << 22):
        assert latency_s + 2 * host_s + nbytes * per_byte == pytest.approx(walls[nbytes], rel=0.05)
