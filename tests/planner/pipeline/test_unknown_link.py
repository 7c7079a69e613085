"""Devices whose link nobody has measured are taken to be on PCIe, by the library and by the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import outcore
from outcore.machine import parse
from outcore.planner.pipeline.plan_job import UNKNOWN_LINK
from tests.cli.command import outcore_command

UNKNOWN = parse("v100")
PCIE = replace(UNKNOWN, between_devices=UNKNOWN_LINK)
SLOW = replace(UNKNOWN, between_devices=replace(UNKNOWN_LINK, latency_s=1.0))


def test_a_plan_over_an_unknown_link_is_the_one_over_pcie() -> None:
    assert UNKNOWN.between_devices is None
    graph = outcore.capture(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), (torch.randn(8, 64),))
    plans = [outcore.plan(graph, devices=2, machine=m, schedule="gpipe") for m in (UNKNOWN, PCIE, SLOW)]
    unknown, pcie, slow = (replace(plan, machine="") for plan in plans)
    assert unknown == pcie and unknown.predicted is not None and slow.predicted is not None
    assert slow.predicted.time_s > unknown.predicted.time_s + 1.0


def test_the_command_folds_a_unet_over_the_same(tmp_path: Path) -> None:
    network = ["outcore.models:UNet", "-i", "2x3x16x16", "--arg", "width=2", "--arg", "depth=1", "--vertical"]
    found = []
    for name, machine in (("unknown", UNKNOWN), ("pcie", PCIE), ("slow", SLOW)):
        machine.save(tmp_path / f"{name}.json")
        shown = outcore_command(
            "plan", *network, "--machine", f"{name}.json", "--devices", "2", "--json", folder=tmp_path
        )
        assert shown.returncode == 0, shown.stderr
        found.append(json.loads(shown.stdout)["predicted"])
    unknown, pcie, slow = found
    assert unknown == pcie and slow["time_s"] > unknown["time_s"] + 1.0
