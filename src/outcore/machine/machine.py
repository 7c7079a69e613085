"""A machine: the devices of a node, the links around them, and how many such nodes there are.

Everything that is predicted or planned is predicted or planned *for a machine*: this one, as probed, or
another one, from the catalogue or a file. A machine is a plain value. It prints itself, saves to JSON, loads
back equal, and has a fingerprint that names the hardware and not the day's measurement, so two probes of one
computer share it.

    node 0                                          node 1
    devices[0] ──between_devices── devices[1]        …
        │ host_link (pinned, pageable)
      host ──disk──                ──between_nodes──

On a machine without a GPU the CPU is the device, and its slower tier is the disk: `machine.below(device)`
answers for both kinds, so that offloading is one mechanism.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from outcore.documents.reading import read_json, write_text
from outcore.documents.schema import MapOf, check
from outcore.errors import MachineError
from outcore.machine.device import PRECISIONS, Device
from outcore.machine.document import MACHINE
from outcore.machine.link import HostLink, Link
from outcore.machine.units import format_bytes, format_rate, format_time

__all__ = ["VERSION", "Machine"]

VERSION = 1
"""Version of the JSON document."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware a job runs on.

    >>> gpu = Device("V100", "cuda", 16 << 30, 900e9, {"fp32": 15.7e12})
    >>> machine = Machine("eight", (gpu,) * 8)
    >>> machine.ranks, Machine.from_json(machine.to_json()) == machine
    (8, True)
    """

    name: str
    devices: tuple[Device, ...]
    """The devices of one node; the CPU alone where there is no GPU."""
    host: Device | None = None
    """The CPU of a node; None where it is not known."""
    host_link: HostLink | None = None
    disk: Link | None = None
    between_devices: Link | None = None
    nodes: int = 1
    between_nodes: Link | None = None
    source: str = ""
    processors: int | None = None
    """How many devices of a node compute at the same time at full rate, where they stand for ranks that share one (on a
    GPU, or on fewer cores); None for all."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise MachineError(f"machine {self.name!r} has no device; needed at least one")
        if self.nodes < 1:
            raise MachineError(f"machine {self.name!r} has {self.nodes} nodes; needed at least 1")
        if self.processors is not None and self.processors < 1:
            raise MachineError(f"machine {self.name!r} has {self.processors} processors; needed at least 1")

    @property
    def ranks(self) -> int:
        """Devices in the whole machine."""
        return self.nodes * len(self.devices)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that name the hardware, the same for every probe of it."""
        parts = [(d.name, d.kind, d.memory_bytes >> 28, d.sms) for d in (*self.devices, self.host) if d is not None]
        text = json.dumps([parts, self.nodes])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def device(self, name: str = "") -> Device:
        """The device called `name`: "cuda:1", "cuda", "cpu", or the first one."""
        kind, _, index = name.partition(":")
        if kind == "cpu" and self.host is not None:
            return self.host
        found = [d for d in self.devices if not kind or d.kind == kind]
        position = int(index) if index.isdecimal() else 0
        if position < len(found):
            return found[position]
        have = ", ".join(d.name for d in self.devices)
        raise MachineError(f"machine {self.name!r} has no device {name!r}; it has {have}")

    def below(self, device: Device) -> Link:
        """The link to the next slower tier: pinned host memory for a GPU, the disk for a CPU."""
        if device.kind == "cuda" and self.host_link is not None:
            return self.host_link.pinned
        if device.kind == "cpu" and self.disk is not None:
            return self.disk
        tier = "host link" if device.kind == "cuda" else "disk rate"
        raise MachineError(f"the {tier} of machine {self.name!r} is not known; probe it or add it to its file")

    def differences(self, other: Machine) -> list[str]:
        """One line per number that differs, as `path: mine -> theirs`; empty when the machines are equal."""
        mine, theirs = _flatten(self.to_json()), _flatten(other.to_json())
        return [
            f"{path}: {mine.get(path)} -> {theirs.get(path)}"
            for path in sorted(mine.keys() | theirs.keys())
            if mine.get(path) != theirs.get(path)
        ]

    def to_json(self) -> dict[str, Any]:
        """The machine as plain lists, dictionaries, strings and numbers."""
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            **asdict(self),
            "devices": self._devices_json(),
        }

    def _devices_json(self) -> list[dict[str, Any]]:
        return [{**asdict(device), "rates": dict(device.rates)} for device in self.devices]

    @classmethod
    def from_json(cls, document: Mapping[str, Any], source: str | Path = "the machine document") -> Machine:
        """The machine that `to_json` described; `source` is what a refusal calls it."""
        check(document, MapOf(), source, MachineError)
        version = document.get("version")
        if version != VERSION:
            raise MachineError(f"a machine document of version {version} was given; this outcore reads {VERSION}")
        check(document, MACHINE, source, MachineError)
        try:
            return cls(
                name=str(document["name"]),
                devices=tuple(_build(Device, device) for device in document["devices"]),
                host=_maybe(Device, document.get("host")),
                host_link=_host_link(document.get("host_link")),
                disk=_maybe(Link, document.get("disk")),
                between_devices=_maybe(Link, document.get("between_devices")),
                nodes=int(document.get("nodes", 1)),
                between_nodes=_maybe(Link, document.get("between_nodes")),
                source=str(document.get("source", "")),
                processors=document.get("processors"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise MachineError(f"not a machine document: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON; a reader never sees half a file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a machine that `save` wrote."""
        return cls.from_json(read_json(path, MapOf(), MachineError), path)

    def __str__(self) -> str:
        size = f"{self.nodes} nodes x {len(self.devices)} devices" if self.nodes > 1 else f"{len(self.devices)} device"
        plural = "s" if self.nodes == 1 and len(self.devices) > 1 else ""
        lines = [f"{self.name} ({size}{plural})"]
        lines += [f"  {count} x {_line(device)}" for device, count in _runs(self.devices)]
        if self.host is not None and self.host not in self.devices:
            lines.append(f"  host {_line(self.host)}")
        if self.host_link is not None:
            lines.append(f"  host link pinned {_link(self.host_link.pinned)}")
            lines.append(f"  host link pageable {_link(self.host_link.pageable)}")
        named = (("disk", self.disk), ("devices", self.between_devices), ("nodes", self.between_nodes))
        lines += [f"  {label} {_link(link)}" for label, link in named if link is not None]
        return "\n".join(lines)


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    return cls(**{key: value for key, value in values.items() if key in known})


def _maybe(cls: type[T], values: Mapping[str, Any] | None) -> T | None:
    return None if values is None else _build(cls, values)


def _host_link(values: Mapping[str, Any] | None) -> HostLink | None:
    if values is None:
        return None
    return HostLink(pinned=_build(Link, values["pinned"]), pageable=_build(Link, values["pageable"]))


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return {path: value}
    return {p: v for key, item in items for p, v in _flatten(item, f"{path}.{key}".lstrip(".")).items()}


def _runs(devices: tuple[Device, ...]) -> list[tuple[Device, int]]:
    runs: list[tuple[Device, int]] = []
    for device in devices:
        if runs and runs[-1][0] == device:
            runs[-1] = (device, runs[-1][1] + 1)
        else:
            runs.append((device, 1))
    return runs


def _line(device: Device) -> str:
    rates = ", ".join(f"{p} {format_rate(device.rates[p], 'FLOP/s')}" for p in PRECISIONS if p in device.rates)
    memory = f"{format_bytes(device.memory_bytes)} at {format_rate(device.bandwidth_bytes_per_s, 'B/s')}"
    return f"{device.name} ({device.kind}): {memory}; {rates or 'rates not known'}"


def _link(link: Link) -> str:
    away, back, both = (
        format_rate(rate, "B/s") for rate in (link.away_bytes_per_s, link.back_bytes_per_s, link.both_bytes_per_s)
    )
    latency = f", latency {format_time(link.latency_s)}" if link.latency_s else ""
    return f"away {away}, back {back}, both at once {both}{latency}"
