"""Calibrating: measure a sweep of operations on a device that is present.

This is the part that needs the device and takes minutes; fitting (`outcore.cost.predicted.calibration`) needs neither.
What it leaves behind is a samples file per precision, which can be carried to another computer, fitted there,
and added to later.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import torch

from outcore.cost.measured.op_sweep import Bounds, sweep
from outcore.cost.measured.runnable import time_operation
from outcore.cost.measured.samples import Progress, Sample, measure_samples
from outcore.cost.predicted.calibration import Calibration, file_name, fit_calibration
from outcore.cost.predicted.operation import Kind, Operation
from outcore.cost.predicted.regression import check_can_fit
from outcore.errors import MachineError
from outcore.machine.clock import TimedRuns
from outcore.machine.device import Device
from outcore.machine.probe import cache_directory


def calibrate(
    device: Device,
    place: str,
    *,
    dtypes: Sequence[str],
    seconds: float,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> list[Calibration]:
    """Measure a device for `seconds` in all, fit what is there, and keep both in the cache directory.

    Samples of earlier calls are kept and used: calling again makes a calibration better.
    """
    check_can_fit()  # before minutes are spent on measuring
    directory = cache if cache is not None else cache_directory()
    fitted = []
    for dtype in dtypes:
        path = samples_path(directory, device, dtype)
        share = seconds / len(dtypes)
        samples = collect(device, place, dtype=dtype, path=path, seconds=share, progress=progress)
        if progress is not None:
            progress(share, share, f"fitting {len(samples):,} samples")
        about = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
        calibration = fit_calibration(samples, device, dtype, about=about)
        calibration.save(directory / file_name(device.name, dtype))
        fitted.append(calibration)
    return fitted


def samples_path(directory: Path, device: Device, dtype: str) -> Path:
    """Where the samples of a device and precision are kept."""
    plain = "".join(c if c.isalnum() else "-" for c in device.name.lower()).strip("-")
    return directory / f"{plain}-{dtype}.jsonl"


def collect(
    device: Device,
    place: str,
    *,
    dtype: str,
    path: Path,
    seconds: float,
    kinds: Sequence[Kind] | None = None,
    seed: int = 0,
    most: int | None = None,
    bounds: Bounds | None = None,
    progress: Progress | None = None,
) -> list[Sample]:
    """Measure a random sweep for `seconds`, appending to `path`; call again to go on.

    Args:
        device: the numbers of the device, from a probe.
        place: the same device as torch names it, "cpu" or "cuda:0".
        most: stop once the file holds this many samples.
    """
    operations = sweep(device, dtype=dtype, kinds=kinds, seed=seed, bounds=bounds)
    # A file that is already full must not make the endless sweep spin for ever.
    return collect_listed(
        islice(operations, 200_000),
        device,
        place,
        dtype=dtype,
        path=path,
        seconds=seconds,
        most=most,
        progress=progress,
    )


def collect_listed(
    operations: Iterable[Operation],
    device: Device,
    place: str,
    *,
    dtype: str,
    path: Path,
    seconds: float,
    most: int | None = None,
    each_s: float | None = None,
    progress: Progress | None = None,
) -> list[Sample]:
    """Measure the given operations, about `each_s` each, appending to `path`."""
    where = torch.device(place)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise MachineError(f"calibrating on {place!r} was asked for, but torch sees no CUDA device")
    about = {
        "device": device.name,
        "dtype": dtype,
        "torch": torch.__version__,
        "threads": torch.get_num_threads() if where.type == "cpu" else None,
    }
    budget = each_s if each_s is not None else 0.02 if where.type == "cuda" else 0.05

    def timer(operation: Operation) -> TimedRuns:
        return time_operation(operation, where, seconds=budget)

    return measure_samples(operations, timer, path, about=about, seconds=seconds, most=most, progress=progress)
