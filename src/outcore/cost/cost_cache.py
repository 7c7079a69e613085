"""Measured costs, kept on disk and in memory, so that the second start of a training does not measure again.

Measuring the calls of a network takes most of the time of planning it, and gives the same figures every time on the
same machine. What they depend on is the key: the network with every shape, stride and dtype, the modes it runs under,
the device, the versions of torch and of this package, and the switches of its libraries. Another key is measured when
it first comes. A file that cannot be read, or whose content is not what it should be, is measured again and replaced.

Files are in the folder that ``OUTCORE_CACHE`` names, else in ``~/.cache/outcore``; ``OUTCORE_CACHE=off`` keeps none and
remembers nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import torch

from outcore.cost.costs import Costs
from outcore.cost.measured.measure import measure
from outcore.cost.measured.saved_bytes import device_name, device_of
from outcore.errors import OutcoreError
from outcore.graph import Graph

_MOST = 32
"""Networks whose costs are remembered in memory."""
_KNOWN: dict[str, Costs] = {}


def measured(graph: Graph, *, time_limit_s: float, between: bool = True) -> Costs:
    """The measured costs of a network: those that were measured before, if nothing has changed since.

    Args:
        graph: as captured.
        time_limit_s: how long measuring may take, if it has to be done.
        between: whether what the host does between calls is measured too.
    """
    if cache_folder() is None:
        return measure(graph, time_limit_s=time_limit_s, between=between)
    key = _key(graph, time_limit_s, between=between)
    found = _KNOWN.get(key) or _read(key, graph)
    if found is None:
        found = measure(graph, time_limit_s=time_limit_s, between=between)
        _write(key, found)
    if len(_KNOWN) >= _MOST:
        _KNOWN.pop(next(iter(_KNOWN)))
    _KNOWN[key] = found
    return found


def cache_folder() -> Path | None:
    """The folder of the files; None if none are kept."""
    configured = os.environ.get("OUTCORE_CACHE")
    if configured is not None and configured.strip().lower() in ("", "off", "0", "no"):
        return None
    base = (
        Path(configured)
        if configured
        else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "outcore"
    )
    return base / "costs"


def _key(graph: Graph, time_limit_s: float, *, between: bool) -> str:
    """A hash of everything that measured costs depend on."""
    from outcore import __version__

    recording, device = graph.recording, device_of(graph)
    cudnn = torch.backends.cudnn
    facts = [
        graph.fingerprint,
        [(v.name, v.shape, v.stride, v.dtype, v.requires_grad) for v in graph.values.values()],
        [(c.name, c.detail, c.parameters) for c in graph.calls.values()],
        [(b.path, b.type, b.detail) for b in graph.blocks.values()],
        [(n, p.shape, p.stride(), p.dtype, p.requires_grad) for n, p in graph.module.model.named_parameters()],
        sorted({repr(step.context) for step in recording.steps}),
        [module.training for module in graph.module.model.modules()],
        device_name(device),
        [torch.__version__, __version__, torch.get_num_threads(), time_limit_s, between],
        [cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, torch.get_float32_matmul_precision()],
        [torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32],
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]


def _read(key: str, graph: Graph) -> Costs | None:
    """What a file holds; none if there is no good one."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        found = Costs.load(folder / f"{key}.json")
    except Exception:
        return None
    return found if found.calls.keys() == graph.calls.keys() else None


def _write(key: str, costs: Costs) -> None:
    """Keep costs in a file, if that can be."""
    folder = cache_folder()
    if folder is None:
        return
    with contextlib.suppress(OSError, OutcoreError):
        folder.mkdir(parents=True, exist_ok=True)
        costs.save(folder / f"{key}.json")
