"""This machine with numbers to reckon with, whoever starts first: measured before, from the catalogue, or measured now.

`remembered` says what was measured and leaves gaps where nothing was. A command that predicts cannot use gaps, and
should not send its user away to probe: a GPU of the catalogue has the rates of its data sheet, and what is in no
catalogue (a CPU, another GPU) is measured once, in seconds, and remembered.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.errors import MachineError
from outcore.machine.catalogue import KnownGPU, find
from outcore.machine.device import Device
from outcore.machine.machine import Machine
from outcore.machine.probe import probe, remembered

__all__ = ["known", "rated"]


def known() -> Machine:
    """This machine, every device with its rates."""
    machine = remembered()
    if all(map(_is_measured, machine.devices)):
        return machine
    entry = _catalogued(machine.devices[0])
    link = machine.host_link if machine.host_link is not None or entry is None else entry.host_link
    return replace(machine, devices=tuple(rated(device) for device in machine.devices), host_link=link)


def rated(device: Device) -> Device:
    """A device of this machine with its rates."""
    if _is_measured(device):
        return device
    if (entry := _catalogued(device)) is not None:
        return replace(entry.device, name=device.name, memory_bytes=device.memory_bytes)
    measured = probe(devices=("cpu" if device.kind == "cpu" else "cuda:0",))
    return next(d for d in (*measured.devices, measured.host) if d is not None and d.kind == device.kind)


def _is_measured(device: Device) -> bool:
    """Whether all is there that times follow from: measuring may have been interrupted after the first rates."""
    return bool(device.rates) and device.bandwidth_bytes_per_s > 1 and (device.kind != "cpu" or device.dispatch_s > 0)


def _catalogued(device: Device) -> KnownGPU | None:
    try:
        return find(device.name) if device.kind == "cuda" else None
    except MachineError:
        return None
