"""The slower memory below a machine's first device, as the planner sees it: how fast copies are, and how much fits."""

from __future__ import annotations

from outcore.errors import MachineError
from outcore.machine import Machine
from outcore.memory.offload.host_limit import HOST_SHARE
from outcore.planner.memory.copy_schedule import OffloadTarget

__all__ = ["offload_target"]


def offload_target(where: Machine) -> OffloadTarget | None:
    """Where saved tensors can be copied to; none where the machine's links are not known."""
    try:
        link = where.below(where.devices[0])
    except MachineError:
        return None
    # Copies share the memory and, both ways at once, the bus.
    both = link.both_bytes_per_s / (link.away_bytes_per_s + link.back_bytes_per_s)
    rates = (both * link.away_bytes_per_s, both * link.back_bytes_per_s)
    if where.devices[0].kind != "cuda" or where.host is None:
        return OffloadTarget(*rates)
    disk = OffloadTarget(where.disk.away_bytes_per_s, where.disk.back_bytes_per_s) if where.disk is not None else None
    return OffloadTarget(*rates, int(HOST_SHARE * where.host.memory_bytes), beyond=disk)
