"""The probe: this machine, measured once and remembered.

A probe is a list of small steps, each of which adds one entry to a dictionary of measures. The dictionary is
written to the user's cache directory after every step, under the fingerprint of the hardware, so an
interrupted probe loses nothing and the next one goes on where it stopped. The machine itself is put together
from the dictionary, by a function that measures nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from outcore.documents.reading import read_json, write_text
from outcore.documents.schema import Anything, MapOf, Record
from outcore.errors import MachineError, OutcoreError
from outcore.machine.device import Device
from outcore.machine.link import HostLink, Link
from outcore.machine.machine import VERSION, Machine
from outcore.machine.units import counted

__all__ = ["Progress", "cache_directory", "probe", "remembered"]

Progress = Callable[[int, int, str], None]
"""Called as (steps done, steps in all, what comes next)."""

Measures = dict[str, Any]
Step = tuple[str, str, Callable[[], Any]]
"""Key in the measures, words for the user, and the function that measures."""

_PRECISIONS = {"cpu": ("fp32", "fp64", "bf16", "fp16"), "cuda": ("fp32", "tf32", "bf16", "fp16", "fp64")}


def cache_directory() -> Path:
    """Where outcore keeps what it measured: `$XDG_CACHE_HOME/outcore`, or `~/.cache/outcore`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outcore"


def probe(
    *,
    fresh: bool = False,
    progress: Progress | None = None,
    cache: Path | None = None,
    devices: tuple[str, ...] | None = None,
) -> Machine:
    """Measure this machine, or recall what was measured before.

    Args:
        fresh: measure everything again.
        progress: called before every step.
        cache: directory to remember in; the user's cache directory unless given.
        devices: device names to probe, such as `("cpu",)`; all that torch sees unless given.

    Raises:
        KeyboardInterrupt: as the user pressed the keys; the steps done until then are kept.
    """
    names = devices if devices is not None else _present()
    directory = cache if cache is not None else cache_directory()
    facts = _facts(names)
    path = directory / f"machine-{_assemble(facts, {}).fingerprint}.json"
    measures: Measures = {} if fresh else _recall(path, facts)
    steps = list(_steps(names, directory))
    for position, (key, words, measure) in enumerate(steps):
        if key in measures:
            continue
        if progress is not None:
            progress(position, len(steps), words)
        measures[key] = _plain(measure())
        measures["date"] = datetime.date.today().isoformat()
        _remember(path, measures)
    return _assemble(facts, measures)


def remembered(*, cache: Path | None = None, devices: tuple[str, ...] | None = None) -> Machine:
    """This machine with what is already measured of it; where nothing was, there are no rates."""
    facts = _facts(devices if devices is not None else _present())
    directory = cache if cache is not None else cache_directory()
    return _assemble(facts, _recall(directory / f"machine-{_assemble(facts, {}).fingerprint}.json", facts))


def _present() -> tuple[str, ...]:
    import torch

    return (*(f"cuda:{index}" for index in range(torch.cuda.device_count())), "cpu")


def _facts(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What is known of each device without measuring."""
    from outcore.machine import probe_cpu as cpu

    facts: dict[str, dict[str, Any]] = {}
    for name in names:
        if name == "cpu":
            cores = cpu.cpu_cores()
            facts[name] = {
                "name": f"{cpu.cpu_name()} ({counted(cores, 'core')})",
                "kind": "cpu",
                "memory_bytes": cpu.cpu_memory_bytes(),
                "sms": cores,
                "clock_hz": cpu.cpu_clock_hz(),
            }
            continue
        import torch

        if not torch.cuda.is_available():
            raise MachineError(f"device {name!r} was asked for, but torch sees no CUDA device; use cpu")
        properties = torch.cuda.get_device_properties(name)
        clock_khz = getattr(properties, "clock_rate", None)
        facts[name] = {
            "name": properties.name,
            "kind": "cuda",
            "memory_bytes": properties.total_memory,
            "sms": properties.multi_processor_count,
            "clock_hz": clock_khz * 1e3 if clock_khz else None,
        }
    return facts


def _steps(names: tuple[str, ...], directory: Path) -> Iterator[Step]:
    import torch

    from outcore.machine import probe_cpu as cpu
    from outcore.machine import probe_cuda as cuda

    for name in names:
        kind, device = name.partition(":")[0], torch.device(name)
        for precision in _PRECISIONS[kind]:
            matmul = cpu.measure_matmul if kind == "cpu" else partial(cuda.measure_cuda_matmul, device)
            yield (
                f"{name}/rate/{precision}",
                f"{name}: matrix product in {precision}",
                partial(matmul, precision),
            )
        if kind == "cpu":
            yield f"{name}/bandwidth", f"{name}: memory copy", cpu.measure_copy
            yield f"{name}/dispatch", f"{name}: starting an operation", cpu.measure_dispatch
            yield "disk", "disk: write and read", partial(cpu.measure_disk, directory)
        else:
            yield f"{name}/bandwidth", f"{name}: memory copy", partial(cuda.measure_cuda_copy, device)
            yield f"{name}/launch", f"{name}: kernel launch", partial(cuda.measure_launch, device)
            yield (
                f"{name}/dispatch",
                f"{name}: starting an operation",
                partial(cuda.measure_cuda_dispatch, device),
            )
            if name == "cuda:0":
                yield "host_link", "host link: pinned and pageable", partial(cuda.measure_host_link, device)


def _assemble(facts: Mapping[str, Mapping[str, Any]], measures: Mapping[str, Any]) -> Machine:
    """The machine from what is known and what was measured; 1 stands for what was not."""
    found: dict[str, Device] = {}
    for name, known in facts.items():
        prefix = f"{name}/rate/"
        rates = {key.removeprefix(prefix): v for key, v in measures.items() if key.startswith(prefix) and v}
        found[name] = Device(
            **known,
            rates=rates,
            bandwidth_bytes_per_s=measures.get(f"{name}/bandwidth", 1.0),
            launch_s=measures.get(f"{name}/launch", 0.0),
            dispatch_s=measures.get(f"{name}/dispatch", 0.0),
            source=f"measured {measures['date']}" if "date" in measures else "not measured",
        )
    link, disk = measures.get("host_link"), measures.get("disk")
    gpus = tuple(device for device in found.values() if device.kind == "cuda")
    return Machine(
        name="this machine",
        devices=gpus or tuple(found.values()),
        host=found.get("cpu"),
        host_link=HostLink(Link(**link["pinned"]), Link(**link["pageable"])) if link else None,
        # A disk is not duplex in practice: two streams share what one had.
        disk=Link(disk[0], disk[1], max(disk)) if disk else None,
        source=f"measured {measures['date']}" if "date" in measures else "not measured",
    )


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, HostLink) else value


def _recall(path: Path, facts: dict[str, dict[str, Any]]) -> Measures:
    """What was measured before, if a machine can be made of it."""
    try:
        document = read_json(path, Record({"version": Anything(), "measures": MapOf()}, open=True), MachineError)
        measures = dict(document["measures"]) if document["version"] == VERSION else {}
        _assemble(facts, measures)
        return measures
    except (MachineError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        return {}  # nothing kept, or kept by another version: measuring again costs seconds


def _remember(path: Path, measures: Measures) -> None:
    """Keep what was measured; a home that takes no files costs a measurement every time, and nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"version": VERSION, "measures": measures}, indent=2) + "\n")
    except (OSError, OutcoreError) as trouble:
        said = f"what was measured of this machine is not kept ({trouble}); XDG_CACHE_HOME names another folder"
        warnings.warn(said, stacklevel=2)
