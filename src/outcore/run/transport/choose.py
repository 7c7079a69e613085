"""Which way tensors go between the ranks of a run."""

from __future__ import annotations

import torch

from outcore.run.ranks.world import World
from outcore.run.transport.p2p import HostPointToPoint, PointToPoint
from outcore.run.transport.p2p_via_host import StagedPointToPoint
from outcore.run.transport.shared_memory import SharedRows


def point_to_point(world: World, device: torch.device, shared_rows: SharedRows) -> PointToPoint:
    """Between tensors on the hosts, or on GPUs through host memory."""
    if device.type == "cuda":
        return StagedPointToPoint(world.p2p_group, shared_rows, device, world.watched_wait)
    return HostPointToPoint(world.p2p_group, shared_rows, world.watched_wait)
