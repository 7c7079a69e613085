"""Machines as tables on a terminal.

`str(machine)` is for logs; these tables are for reading. Devices that are equal share a column, a number that
is not known shows as a dash, and nothing is rounded to more digits than a measurement has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outcore.machine import catalogue
from outcore.machine.device import PRECISIONS, Device
from outcore.machine.link import Link
from outcore.machine.machine import Machine
from outcore.machine.units import format_bytes, format_rate, format_time

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["catalogue_table", "machine_table"]


def machine_table(machine: Machine) -> Table:
    """One column per kind of device, one row per number; links below."""
    from rich.table import Table

    columns = list(dict.fromkeys(machine.devices))
    if machine.host is not None and machine.host not in columns:
        columns.append(machine.host)
    table = Table(title=_title(machine), caption=machine.source or None, show_edge=False)
    table.add_column("")
    for device in columns:
        table.add_column(_heading(machine, device), justify="right")
    table.add_row("memory", *(format_bytes(d.memory_bytes) for d in columns))
    table.add_row("memory copy", *(_bandwidth(d) for d in columns))
    for precision in PRECISIONS:
        if any(precision in d.rates for d in columns):
            table.add_row(f"matrix {precision}", *(_rate(d, precision) for d in columns))
    table.add_row("SMs or cores", *(str(d.sms or "–") for d in columns))
    table.add_row("clock", *(f"{d.clock_hz / 1e9:.2f} GHz" if d.clock_hz else "–" for d in columns))
    table.add_row("kernel launch", *(format_time(d.launch_s) if d.launch_s else "–" for d in columns))
    table.add_row("operation issue", *(format_time(d.dispatch_s) if d.dispatch_s else "–" for d in columns))
    table.add_section()
    for label, link in _links(machine):
        table.add_row(f"{label}: away / back", f"{_giga(link.away_bytes_per_s)} / {_giga(link.back_bytes_per_s)} GB/s")
        latency = f", {format_time(link.latency_s)}" if link.latency_s else ""
        table.add_row(f"{label}: both at once", f"{_giga(link.both_bytes_per_s)} GB/s{latency}")
    return table


def catalogue_table() -> Table:
    """All known GPUs, one row each; rates in dense TFLOP/s."""
    from rich.table import Table

    table = Table(title="Known GPUs (dense TFLOP/s; bandwidth and links in GB/s, each way)", show_edge=False)
    for heading in ("name", "memory", "bandwidth", *PRECISIONS, "SMs", "GHz", "host", "peer"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for key in catalogue.names():
        entry = catalogue.find(key)
        device = entry.device
        table.add_row(
            key,
            format_bytes(device.memory_bytes),
            f"{device.bandwidth_bytes_per_s / 1e9:.0f}",
            *(f"{device.rates[p] / 1e12:.4g}" if p in device.rates else "–" for p in PRECISIONS),
            str(device.sms),
            f"{(device.clock_hz or 0) / 1e9:.2f}",
            f"{entry.host_link.pinned.away_bytes_per_s / 1e9:.0f}",
            f"{entry.between_devices.away_bytes_per_s / 1e9:.0f}",
        )
    return table


def _title(machine: Machine) -> str:
    size = f"{machine.nodes} nodes x {len(machine.devices)}" if machine.nodes > 1 else str(len(machine.devices))
    return f"{machine.name} · {size} device{'s' if machine.ranks > 1 else ''} · {machine.fingerprint}"


def _heading(machine: Machine, device: Device) -> str:
    count = machine.devices.count(device)
    return f"{count} x {device.name}" if count > 1 else device.name


def _bandwidth(device: Device) -> str:
    # A probe that was interrupted before this step leaves one byte per second.
    return format_rate(device.bandwidth_bytes_per_s, "B/s") if device.bandwidth_bytes_per_s > 1 else "–"


def _giga(per_second: float) -> str:
    return f"{per_second / 1e9:.3g}"


def _rate(device: Device, precision: str) -> str:
    return format_rate(device.rates[precision], "FLOP/s") if precision in device.rates else "–"


def _links(machine: Machine) -> list[tuple[str, Link]]:
    pinned = machine.host_link.pinned if machine.host_link else None
    pageable = machine.host_link.pageable if machine.host_link else None
    named = (
        ("pinned", pinned),
        ("pageable", pageable),
        ("disk", machine.disk),
        ("device to device", machine.between_devices),
        ("node to node", machine.between_nodes),
    )
    return [(label, link) for label, link in named if link is not None]
