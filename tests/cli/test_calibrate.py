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
        "few samples of conv/forward, conv/backward" in words and "linear/forward," not in words.split("few samples")[1]
    )


def test_what_has_few_samples_is_named_also_where_it_is_fitted() -> None:
    said = shown(3)
    assert "median error" in said and "few samples of conv/forward" in " ".join(said.split())
    assert "linear/forward, linear/backward" in " ".join(said.split())
    assert "the same command again goes on measuring" in " ".join(said.split())
