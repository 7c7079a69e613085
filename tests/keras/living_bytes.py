"""The bytes of tensors that are alive at once in TensorFlow, as they were asked for.

`tf.config.experimental.get_memory_info` counts the chunks that TensorFlow's allocator gives, which may be twice as
large as what was asked for, by what the process did before. The profiler notes every request of 256 KiB or more with
both sizes, and what was in use then. What a chunk has too much is taken off while it is held; of what was there before
only the chunks are known. Smaller requests have no chunks: they count as they are, with their own peak.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.keras.oracle import tf

CPU = "CPU:0"


def living_bytes(run: Callable[[], Any]) -> int:
    """The most that is alive at once while something runs, with what was there before."""
    memory = tf.config.experimental
    with tempfile.TemporaryDirectory() as folder:
        memory.reset_memory_stats(CPU)
        tf.profiler.experimental.start(folder)
        try:
            run()
        finally:
            tf.profiler.experimental.stop()
        peak = int(memory.get_memory_info(CPU)["peak"])
        events = sorted(_events(Path(folder)), key=lambda event: event[0])
    if not events:
        return peak
    most = large = wasted = 0
    waste: dict[int, int] = {}
    for _, name, facts in events:
        wasted -= waste.pop(facts["addr"], 0)
        if name == "MemoryAllocation":
            waste[facts["addr"]] = facts["allocation_bytes"] - facts["requested_bytes"]
            wasted += waste[facts["addr"]]
        large = max(large, facts["bytes_allocated"])
        most = max(most, facts["bytes_allocated"] - wasted)
    return most + max(0, peak - large)


def _events(folder: Path) -> Iterator[tuple[int, str, dict[str, int]]]:
    """When memory was taken and given back, and how much."""
    protocol = importlib.import_module("tensorflow.tsl.profiler.protobuf.xplane_pb2")
    for path in folder.rglob("*.xplane.pb"):
        space = protocol.XSpace()
        space.ParseFromString(path.read_bytes())
        for plane in space.planes:
            names = {number: kind.name for number, kind in plane.event_metadata.items()}
            kinds = {number: kind.name for number, kind in plane.stat_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    if names[event.metadata_id] in ("MemoryAllocation", "MemoryDeallocation"):
                        facts = {kinds[s.metadata_id]: int(s.int64_value or s.uint64_value) for s in event.stats}
                        yield line.timestamp_ns * 1000 + event.offset_ps, names[event.metadata_id], facts
