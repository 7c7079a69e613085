"""The schema of a machine's document: what `Machine.save` writes, and what people write by hand."""

from __future__ import annotations

from outcore.documents.schema import Anything, Either, Flag, ListOf, Maybe, Number, OneOf, Record, Text, Whole
from outcore.machine.device import PRECISIONS

__all__ = ["CLUSTER", "MACHINE"]

_RATE = Number(above=0, most=1e21)
_SECONDS = Number(least=0, most=1e6)
_DEVICE = Record(
    {
        "name": Text(),
        "kind": OneOf(("cpu", "cuda")),
        "memory_bytes": Whole(least=1, most=2**60),
        "bandwidth_bytes_per_s": _RATE,
        "rates": Record(may=dict.fromkeys(PRECISIONS, _RATE)),
    },
    {
        "sms": Maybe(Whole(least=1, most=10**7)),
        "clock_hz": Maybe(Number(least=0, most=1e12)),
        "launch_s": _SECONDS,
        "dispatch_s": _SECONDS,
        "source": Text(),
    },
)
_LINK_TIMES = dict.fromkeys(("latency_s", "host_s", "adding_s_per_byte", "gap_s"), _SECONDS)
_LINK = Record(
    {"away_bytes_per_s": _RATE, "back_bytes_per_s": _RATE, "both_bytes_per_s": _RATE},
    _LINK_TIMES,
)
_SYMMETRIC = Record({"bandwidth_bytes_per_s": _RATE}, {**_LINK_TIMES, "duplex": Flag()})
_NAMED = Maybe(Either((Text(1), _LINK, _SYMMETRIC)))
_COMMON = {"version": Anything(), "fingerprint": Text(), "name": Text(), "source": Text(), "nodes": Whole(1, 65_536)}

MACHINE = Record(
    {"name": Text(), "devices": ListOf(_DEVICE, 1, 65_536)},
    {
        **{name: kind for name, kind in _COMMON.items() if name != "name"},
        "host": Maybe(_DEVICE),
        "host_link": Maybe(Record({"pinned": _LINK, "pageable": _LINK})),
        "disk": Maybe(_LINK),
        "between_devices": Maybe(_LINK),
        "between_nodes": Maybe(_LINK),
        "processors": Maybe(Whole(1, 65_536)),
    },
)
"""A machine with all its numbers."""
CLUSTER = Record(
    {"devices": Text(1)},
    {**_COMMON, "disk": _NAMED, "between_devices": _NAMED, "between_nodes": _NAMED},
)
"""A cluster whose devices, and perhaps links, are given by name."""
