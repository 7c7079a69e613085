"""Free memory of a host: cached pages count as free, and a container's limit as the end of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outcore.errors import OutcoreError
from outcore.explore.measured_step import check_room
from outcore.machine import free_memory
from outcore.machine.free_memory import free_bytes, host_free_bytes
from outcore.machine.probe_cpu import cpu_memory_bytes

CPU = torch.device("cpu")
KIB = 1024


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system of which 6,000 KiB are available, and an empty folder for the files of a container."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 6000 kB\n")
    monkeypatch.setattr(free_memory, "_SYSTEM", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_CONTAINER", tmp_path)
    return tmp_path


def limit(folder: Path, most: str) -> None:
    """A container that may have so many KiB, of which 1,000 are used."""
    (folder / "memory.max").write_text(most if most == "max" else str(int(most) * KIB))
    (folder / "memory.current").write_text(str(1000 * KIB))


@pytest.mark.parametrize(("most", "free"), [("max", 6000), ("4000", 3000), ("90000", 6000), ("500", 0)])
def test_free_is_what_system_and_container_leave(system: Path, most: str, free: int) -> None:
    limit(system, most)
    assert host_free_bytes() == free_bytes(CPU) == free * KIB


def test_without_a_container_the_system_alone_counts(system: Path) -> None:
    assert host_free_bytes() == 6000 * KIB


def test_a_host_that_does_not_say_has_all_of_its_memory_free(system: Path) -> None:
    (system / "meminfo").unlink()
    assert host_free_bytes() == cpu_memory_bytes()


def test_a_step_larger_than_the_container_is_refused(system: Path) -> None:
    limit(system, "4000")
    check_room(2000 * KIB, CPU)
    with pytest.raises(OutcoreError, match="choose a smaller batch"):
        check_room(5000 * KIB, CPU)
