"""`outcore machine --calibrate` as printed: how well each kind is predicted, and what was measured too little."""

from __future__ import annotations

import io
import itertools

from rich.console import Console

from outcore.cli.machine import show_calibration
from outcore.cost import Sample, fit_calibration
from outcore.cost.measured.op_sweep import sweep
from outcore.machine import Device
from outcore.machine.clock import TimedRuns

DEVICE = Device("a card", "cuda", 16 << 30, 1e12, {"fp32": 1e13}, sms=80, launch_s=2e-6, dispatch_s=5e-6)


def shown(samples: int) -> str:
    operations = itertools.islice(sweep(DEVICE, dtype="fp32", kinds=["linear"]), samples)
    timed = [
        Sample(o, TimedRuns.of([2 * DEVICE.roofline_s(flops=o.flops, nbytes=o.nbytes, dtype="fp32")] * 3))
        for o in operations
    ]
    text = io.StringIO()
    show_calibration(fit_calibration(timed, DEVICE, "fp32", methods=("polynomial",)), Console(file=text, width=80))
    return text.getvalue()


def test_each_kind_is_a_row_and_the_others_are_named() -> None:
    said = shown(60)
    row = next(line for line in said.splitlines() if line.startswith("linear/forward"))
    assert row.split()[1].isdigit() and row.count("%") == 2 and all(len(line) <= 80 for line in said.splitlines())
    words = " ".join(said.split())
    assert (
        "too few samples of conv/forward, conv/backward" in words and "linear/forward," not in words.split("too few")[1]
    )


def test_without_enough_samples_of_anything_there_is_no_table() -> None:
    said = shown(3)
    assert said.startswith("too few samples of") and "median error" not in said
    assert "the same command again goes on measuring" in " ".join(said.split())
