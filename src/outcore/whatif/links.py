"""The link between ranks, as a user types it, and what collectives take over it.

A name of the catalogue (`outcore.machine.catalogue.yaml`: networks, buses), the GPU's own link ("nvlink"), or figures:
"25gbit", "1gbit/s+20ms", "12GB/s". A rate is of one direction; both directions are used at once.

Collectives move what the ring algorithm moves (Patarasuk and Yuan, 2009): of `n` ranks each sends 2 (n - 1) / n of the
bytes of an all-reduce, in 2 (n - 1) messages one after the other. Libraries take a tree instead where many small
messages would wait for each other; its messages number 2 log2 n. What large messages reach of a link's rate is its
*share*.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from outcore.errors import MachineError, WhatIfError, suggest
from outcore.machine import Device, catalogue
from outcore.machine.link import Link

__all__ = ["ClusterLink", "parse_link"]

_SHARE = 0.80
"""Share of NVLink's and InfiniBand's rate that all-reduces of NCCL reach, as its own tests print it (busbw)."""
_TCP = 0.1
"""Rate at which a processor sends or receives by TCP and adds what it received, over that at which it copies memory:
2.1 and 20 GB/s of one core of an AMD EPYC (gloo, torch 2.13)."""
_NAMES = {
    "nvlink": "",
    "pcie3": "pcie3x16",
    "pcie4": "pcie4x16",
    "pcie5": "pcie5x16",
    "1gbe": "ethernet-1g",
    "10gbe": "ethernet-10g",
    "25gbe": "ethernet-25g",
    "100gbe": "ethernet-100g",
    "ib-edr": "infiniband-edr",
    "ib-hdr": "infiniband-hdr",
    "ib-ndr": "infiniband-ndr",
}
_FIGURES = re.compile(
    r"(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>[kmg])(?P<kind>bit|b|bit/s|b/s)(?:\+(?P<ms>\d+(?:\.\d+)?)ms)?"
)


@dataclass(frozen=True, slots=True)
class ClusterLink:
    """What joins ranks, and what a collective takes over it."""

    name: str
    link: Link
    share: float = _SHARE
    trees: bool = True
    """Whether the library takes a tree where that is faster; gloo does not."""
    steals: float = 0.0
    """Share of the time of hidden communication that the device loses to it."""
    gathered: float = 1.0
    """Rate of an all-gather over that of an all-reduce."""

    @property
    def bytes_per_s(self) -> float:
        """What a large collective reaches."""
        return self.share * self.link.away_bytes_per_s

    @property
    def latency_s(self) -> float:
        """Of one message."""
        return self.link.latency_s

    def all_reduce_s(self, nbytes: float, ranks: int) -> float:
        """An all-reduce of so many bytes."""
        if ranks < 2:
            return 0.0
        moved_s = 2 * (ranks - 1) / ranks * nbytes / self.bytes_per_s
        ring_s = moved_s + 2 * (ranks - 1) * self.latency_s
        tree_s = 2 * nbytes / self.bytes_per_s + 2 * math.ceil(math.log2(ranks)) * self.latency_s
        return min(ring_s, tree_s) if self.trees else ring_s

    def scatter_s(self, nbytes: float, ranks: int) -> float:
        """A reduce-scatter of so many bytes; gloo reduces all of it on every rank, and keeps a share."""
        return self.gather_s(nbytes, ranks) if self.trees else self.all_reduce_s(nbytes, ranks)

    def gather_s(self, nbytes: float, ranks: int) -> float:
        """An all-gather to so many bytes on each rank: half of an all-reduce."""
        if ranks < 2:
            return 0.0
        hops = math.ceil(math.log2(ranks)) if self.trees else ranks - 1
        return (ranks - 1) / ranks * nbytes / (self.gathered * self.bytes_per_s) + hops * self.latency_s

    def core_s(self, nbytes: float, ranks: int, device: Device) -> float:
        """What an all-reduce takes of the device's own time, while it is under way.

        A GPU leaves it to copy engines and a network card. On a CPU the cores that compute also copy what is sent, and
        add what is received, so no more than the rest of it can be hidden behind their work.
        """
        if device.kind == "cuda" or ranks < 2:
            return 0.0
        both_ways = 2 * 2 * (ranks - 1) / ranks * nbytes
        return both_ways / (_TCP * device.bandwidth_bytes_per_s)

    def faster(self, factor: float) -> ClusterLink:
        """The link so many times as fast."""
        link = self.link
        away, back, both = (factor * r for r in (link.away_bytes_per_s, link.back_bytes_per_s, link.both_bytes_per_s))
        return replace(self, link=Link(away, back, both, link.latency_s, link.host_s))


def parse_link(text: str, device: Device | None = None) -> ClusterLink:
    """The link that a text names.

    >>> parse_link("25gbe").link.away_bytes_per_s / 1e9
    3.125
    >>> parse_link("100mbit+20ms").latency_s
    0.02

    Raises:
        WhatIfError: it is not known; names those that are.
    """
    word = text.strip().lower()
    if word == "nvlink":
        return _own(device)
    if found := _FIGURES.fullmatch(word):
        bits = found["kind"].startswith("bit")
        rate = float(found["rate"]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found["unit"]] / (8 if bits else 1)
        unit = {"k": "k", "m": "M", "g": "G"}[found["unit"]] + ("bit/s" if bits else "B/s")
        shown = f"{float(found['rate']):g} {unit}" + (f" + {float(found['ms']):g} ms" if found["ms"] else "")
        if rate <= 0:
            raise WhatIfError(f"a link of {text!r} moves nothing; give a rate above 0, such as 25gbit")
        latency_s = float(found["ms"] or 0) * 1e-3
        return ClusterLink(shown, Link.symmetric(bandwidth_bytes_per_s=rate, latency_s=latency_s), share=0.95)
    name = _NAMES.get(word, word)
    try:
        if name.startswith("pcie"):
            return ClusterLink(word, catalogue.bus(name), share=_SHARE)
        return ClusterLink(word, catalogue.network(name), share=_ethernet(name))
    except MachineError:
        known = (*_NAMES, "25gbit", "1gbit+20ms", "12GB/s")
        near = suggest(word, _NAMES)
        hint = f"{near} " if near.startswith("did") else ""
        raise WhatIfError(f"unknown link {text!r}; {hint}known are {', '.join(known)}") from None


def _ethernet(name: str) -> float:
    """What is left of Ethernet's rate for a program that speaks TCP."""
    return 0.90 if name.startswith("ethernet") else _SHARE


def _own(device: Device | None) -> ClusterLink:
    if device is None:
        raise WhatIfError("nvlink is a link of a GPU; say which with --on, or name a link such as pcie4 or 25gbe")
    try:
        entry = catalogue.find(device.name)
    except MachineError:
        entry = None
    if entry is None or entry.between_devices == entry.host_link.pinned:
        raise WhatIfError(f"{device.name} has no NVLink in the catalogue; give --link pcie4 or a network such as 25gbe")
    return ClusterLink("nvlink", entry.between_devices)
