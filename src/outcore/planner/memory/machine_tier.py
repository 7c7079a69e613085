"""The memory below a machine's devices, as the planner sees it: how fast values leave and come back, and how many."""

from __future__ import annotations

from outcore.errors import MachineError
from outcore.machine import Machine
from outcore.planner.memory.copy_schedule import OffloadTarget

__all__ = ["HOST_SHARE", "tier_of"]

HOST_SHARE = 0.8
"""Share of the host's memory that values of a device may take."""


def tier_of(machine: Machine) -> OffloadTarget | None:
    """Where the first device's values can be offloaded to: the host, and the disk beyond it; none if that is not known.

    >>> from outcore.machine import parse
    >>> target = tier_of(parse("h100"))
    >>> target is not None and target.out_bytes_per_s > 1e9
    True
    """
    device = machine.devices[0]
    try:
        link = machine.below(device)
    except MachineError:
        return None
    # Copies share the memory and, both ways at once, the bus.
    both = link.both_bytes_per_s / (link.away_bytes_per_s + link.back_bytes_per_s)
    rates = (both * link.away_bytes_per_s, both * link.back_bytes_per_s)
    if device.kind != "cuda" or machine.host is None:
        return OffloadTarget(*rates)
    disk = None
    if machine.disk is not None:
        disk = OffloadTarget(machine.disk.away_bytes_per_s, machine.disk.back_bytes_per_s)
    return OffloadTarget(*rates, int(HOST_SHARE * machine.host.memory_bytes), beyond=disk)
