"""The catalogue: GPUs that need not be here to be planned for.

The rows are in `catalogue.yaml`, each with the public document it was read from, so a number can be checked
and a card added without touching code. This file finds a row by any of its names ("a100", "NVIDIA
A100-SXM4-80GB", "RTX 4090") and turns it into a device, its host link and its link to the next device.

What a datasheet promises and what a program reaches differ. Device rates stay as specified; how much of them
an operation reaches is the business of `outcore.cost`. Link rates are the bus specification times the share
that large copies commonly reach, because no cost model stands between a link and its user.
"""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from outcore.errors import MachineError
from outcore.machine.device import Device
from outcore.machine.link import HostLink, Link

__all__ = ["KnownGPU", "bus", "default_network", "find", "names", "network"]

_MAKERS = re.compile(r"nvidia|amd|geforce|tesla|instinct|radeon|graphics|[^a-z0-9]")


@dataclass(frozen=True, slots=True)
class KnownGPU:
    """One row: a GPU with the links that its form factor brings."""

    key: str
    device: Device
    host_link: HostLink
    between_devices: Link
    source: str


def names() -> tuple[str, ...]:
    """The names of all catalogued GPUs, in the order of the file.

    >>> "v100" in names()
    True
    """
    return tuple(_document()["gpus"])


def find(name: str) -> KnownGPU:
    """The row called `name`, by its key, its product name or the name torch reports.

    >>> find("NVIDIA A100-SXM4-80GB").key
    'a100-80gb'
    """
    wanted = _plain(name)
    known = _known()
    if wanted in known:
        return _entry(known[wanted])
    near = difflib.get_close_matches(wanted, known, n=8, cutoff=0.5)
    keys = list(dict.fromkeys(known[plain] for plain in near))[:4]
    hint = f"did you mean {', '.join(keys)}?" if keys else f"known are {', '.join(names())}."
    raise MachineError(f"unknown GPU {name!r}; {hint} `outcore machine --list` shows all")


def network(name: str) -> Link:
    """The link between two nodes for a named network, such as "infiniband-hdr"."""
    networks = _document()["networks"]
    if name not in networks:
        raise MachineError(f"unknown network {name!r}; known are {', '.join(networks)}")
    row = networks[name]
    return Link.symmetric(bandwidth_bytes_per_s=row["bandwidth"] * 1e9, latency_s=row["latency_us"] * 1e-6)


def bus(name: str) -> Link:
    """The link over a named bus, such as "pcie4x16", at the rate that large copies reach."""
    buses = _document()["buses"]
    if name not in buses:
        raise MachineError(f"unknown bus {name!r}; known are {', '.join(buses)}")
    row = buses[name]
    rate = row["bandwidth"] * row["pinned_share"] * 1e9
    return Link.symmetric(bandwidth_bytes_per_s=rate, latency_s=row["latency_us"] * 1e-6)


def default_network() -> str:
    """The network assumed between nodes when none was named."""
    return str(_document()["default_network"])


@functools.cache
def _document() -> dict[str, Any]:
    import yaml

    text = resources.files("outcore.machine").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def _plain(name: str) -> str:
    return _MAKERS.sub("", name.lower())


@functools.cache
def _known() -> dict[str, str]:
    return {
        _plain(name): key
        for key, row in _document()["gpus"].items()
        for name in (key, row["name"], *map(str, row["aliases"]))
    }


@functools.cache
def _entry(key: str) -> KnownGPU:
    document = _document()
    row, bus = document["gpus"][key], document["buses"][document["gpus"][key]["bus"]]
    device = Device(
        name=row["name"],
        kind="cuda",
        memory_bytes=row["memory_gib"] << 30,
        bandwidth_bytes_per_s=row["bandwidth"] * 1e9,
        rates={precision: rate * 1e12 for precision, rate in row["rates"].items()},
        sms=row["sms"],
        clock_hz=row["clock_mhz"] * 1e6,
        launch_s=_LAUNCH_S,
        dispatch_s=_DISPATCH_S,
        source=row["source"],
    )
    latency = bus["latency_us"] * 1e-6
    pinned = Link.symmetric(bandwidth_bytes_per_s=bus["bandwidth"] * bus["pinned_share"] * 1e9, latency_s=latency)
    pageable = Link.symmetric(
        bandwidth_bytes_per_s=bus["bandwidth"] * bus["pageable_share"] * 1e9, latency_s=latency, duplex=False
    )
    if "link" in row:
        between = Link.symmetric(bandwidth_bytes_per_s=row["link"] * 1e9, latency_s=_PEER_LATENCY_S)
    else:
        between = pinned
    return KnownGPU(key, device, HostLink(pinned=pinned, pageable=pageable), between, row["source"])


# No datasheet gives these: they are what recent cards and interpreters show, and a probe replaces them.
_LAUNCH_S = 2.5e-6
_DISPATCH_S = 9e-6
_PEER_LATENCY_S = 5e-6
