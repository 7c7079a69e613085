"""A machine that nobody has probed has numbers to reckon with all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from outcore.machine import Device, Machine, find, known, probe, probe_cpu, rated, remembered


def test_a_cpu_is_measured_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probe_cpu, "measure_matmul", lambda *_, **__: 1e11)  # measured in test_probe.py
    monkeypatch.setattr(probe_cpu, "measure_disk", lambda *_, **__: (5e8, 2e9))
    cpu = next(d for d in (*remembered().devices, remembered().host) if d is not None and d.kind == "cpu")
    assert not cpu.rates
    made = rated(cpu)
    assert made.rates["fp32"] > 0 and made.bandwidth_bytes_per_s > 1
    with mock.patch("outcore.machine.probe._steps", return_value=[]):
        assert rated(cpu).rates == made.rates


@pytest.mark.parametrize("after", range(7))
def test_a_machine_whose_measuring_was_interrupted_is_measured_further(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rates without its bandwidth made a step of 9 ms one of 80,000 hours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (("matmul", 1e11), ("copy", 3e10), ("dispatch", 2e-6), ("disk", (5e8, 2e9))):
        monkeypatch.setattr(probe_cpu, f"measure_{name}", lambda *_, value=value, **__: value)

    def interrupt(position: int, total: int, words: str) -> None:
        assert after < total, words
        if position == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe(devices=("cpu",), progress=interrupt)
    with mock.patch("outcore.machine.probe._present", return_value=("cpu",)):
        (cpu,) = known().devices
    assert cpu.rates["fp32"] == 1e11 and cpu.bandwidth_bytes_per_s == 3e10 and cpu.dispatch_s == 2e-6


def test_a_gpu_of_the_catalogue_has_its_rates_and_keeps_its_name_and_memory() -> None:
    gpu = Device("NVIDIA H200", "cuda", 139 << 30, 1.0, {})
    with mock.patch("outcore.machine.known.remembered", return_value=Machine("here", (gpu, gpu))):
        machine = known()
    sheet = find("h200").device
    assert machine.devices == (replace(sheet, name="NVIDIA H200", memory_bytes=139 << 30),) * 2
    assert machine.host_link == find("h200").host_link


def test_what_was_measured_is_left_alone() -> None:
    gpu = Device("NVIDIA H200", "cuda", 139 << 30, 4e12, {"fp32": 5e13})
    with mock.patch("outcore.machine.known.remembered", return_value=Machine("here", (gpu,))):
        assert known().devices == (gpu,)


def test_the_link_is_that_of_the_first_device() -> None:
    first, second = Device("NVIDIA H200", "cuda", 139 << 30, 1.0, {}), Device("Tesla T4", "cuda", 15 << 30, 1.0, {})
    with mock.patch("outcore.machine.known.remembered", return_value=Machine("here", (first, second))):
        assert known().host_link == find("h200").host_link != find("t4").host_link
    with mock.patch("outcore.machine.known.remembered", return_value=Machine("here", (second,))):
        assert known().host_link == find("t4").host_link
