"""A machine in one word: "h200", "v100x8", "4xa100", "2x8xv100", or a JSON file.

A command line needs a short way to name hardware that is not here. The grammar is counts and a GPU's name
joined by `x`, in either order; three parts are nodes, devices per node and name. Some names end in x or a
digit (MI300X, RTX 4090), so a whole that is itself a name wins, and otherwise the split whose name is known.
Anything that ends in `.json` is a file: one that `Machine.save` wrote, or a cluster in which devices are
given by such a word:

    {"version": 1, "name": "lab", "nodes": 4, "devices": "v100x4", "between_nodes": "infiniband-hdr"}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outcore.documents.reading import read_json
from outcore.documents.schema import MapOf, check
from outcore.errors import MachineError
from outcore.machine import catalogue
from outcore.machine.document import CLUSTER
from outcore.machine.link import Link
from outcore.machine.machine import VERSION, Machine

__all__ = ["parse"]

_MOST = 4096


def parse(text: str) -> Machine:
    """The machine that a word or a JSON file describes.

    >>> parse("v100x8").ranks, parse("2x8xv100").ranks, parse("mi300x").ranks
    (8, 16, 1)
    """
    if text.endswith(".json"):
        return _from_file(Path(text))
    word = text.strip().lower()
    if not word:
        raise MachineError('an empty machine was given; needed a name such as "h200" or "v100x8"')
    for nodes, count, name in _splits(word):
        try:
            entry = catalogue.find(name)
        except MachineError:
            continue
        return _cluster(entry, nodes=nodes, count=count)
    _, _, name = list(_splits(word))[-1]
    catalogue.find(name)
    raise AssertionError("unreachable: an unknown name raises")


def _splits(word: str) -> Iterator[tuple[int, int, str]]:
    yield 1, 1, word
    if found := re.fullmatch(r"(\d+)x(\d+)x(.+)", word):
        yield int(found[1]), int(found[2]), found[3]
    if found := re.fullmatch(r"(\d+)x(.+?)x(\d+)", word):
        yield int(found[1]), int(found[3]), found[2]
    if found := re.fullmatch(r"(\d+)x(.+)", word):
        yield 1, int(found[1]), found[2]
    if found := re.fullmatch(r"(.+)x(\d+)", word):
        yield 1, int(found[2]), found[1]


def _cluster(entry: catalogue.KnownGPU, *, nodes: int, count: int) -> Machine:
    if not (1 <= nodes <= _MOST and 1 <= count <= _MOST):
        raise MachineError(f"{nodes} nodes of {count} devices were given; each must be between 1 and {_MOST}")
    network = catalogue.default_network()
    parts = [str(n) for n in (nodes, count) if n > 1 or nodes > 1]
    return Machine(
        name="x".join([*parts, entry.key]),
        devices=(entry.device,) * count,
        host_link=entry.host_link,
        between_devices=entry.between_devices if count > 1 else None,
        nodes=nodes,
        between_nodes=catalogue.network(network) if nodes > 1 else None,
        source=entry.source + (f"; {network} assumed between nodes" if nodes > 1 else ""),
    )


def _from_file(path: Path) -> Machine:
    document = read_json(path, MapOf(), MachineError)
    if not isinstance(document.get("devices"), str) or document.get("version") != VERSION:
        return Machine.from_json(document, path)
    check(document, CLUSTER, path, MachineError)
    machine = parse(document["devices"])
    nodes = int(document.get("nodes", machine.nodes))
    between_nodes = _link(document.get("between_nodes")) or machine.between_nodes
    if nodes > 1 and between_nodes is None:
        between_nodes = catalogue.network(catalogue.default_network())
    return replace(
        machine,
        name=str(document.get("name", path.stem)),
        nodes=nodes,
        between_nodes=between_nodes,
        between_devices=_link(document.get("between_devices")) or machine.between_devices,
        disk=_link(document.get("disk")) or machine.disk,
        source=str(document.get("source", machine.source)),
    )


def _link(value: Any) -> Link | None:
    if value is None:
        return None
    if isinstance(value, str):
        return catalogue.network(value)
    if not isinstance(value, dict):
        raise MachineError(f"a link must be a network's name or an object, got {value!r}")
    try:
        if "bandwidth_bytes_per_s" in value:
            return Link.symmetric(**value)
        return Link(**value)
    except TypeError as error:
        raise MachineError(f"not a link: {value!r} ({error})") from error
