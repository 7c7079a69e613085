"""A machine is a value: it prints, saves, loads equal, compares, and refuses nonsense."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outcore.errors import MachineError, OutcoreError
from outcore.machine import (
    Device,
    HostLink,
    Link,
    Machine,
    format_bytes,
    format_rate,
    format_time,
    machine_table,
    parse,
    precision_of,
)


def cpu(**changes: object) -> Device:
    known = Device("a processor", "cpu", 16 << 30, 20e9, {"fp32": 1e11}, sms=4, source="made up")
    return replace(known, **changes)  # type: ignore[arg-type]


def whole_machine() -> Machine:
    gpu = Device("a card", "cuda", 8 << 30, 500e9, {"fp32": 1e13, "bf16": 8e13}, sms=60, clock_hz=1.5e9, launch_s=3e-6)
    link = Link(12e9, 13e9, 20e9, 1e-5)
    return Machine(
        "whole",
        (gpu, gpu),
        host=cpu(),
        host_link=HostLink(link, Link(5e9, 6e9, 6e9)),
        disk=Link(5e8, 2e9, 2e9),
        between_devices=Link.symmetric(bandwidth_bytes_per_s=50e9),
        nodes=3,
        between_nodes=Link.symmetric(bandwidth_bytes_per_s=12.5e9, latency_s=3e-6),
    )


def test_a_machine_loads_equal_to_what_was_saved(tmp_path: Path) -> None:
    machine = whole_machine()
    path = tmp_path / "deep" / "machine.json"
    machine.save(path)
    assert Machine.load(path) == machine
    assert json.loads(path.read_text())["version"] == 1
    assert list(path.parent.iterdir()) == [path]


def test_the_fingerprint_names_the_hardware_and_not_the_measurement() -> None:
    machine = Machine("here", (cpu(),))
    again = Machine("here", (cpu(bandwidth_bytes_per_s=21e9, rates={"fp32": 1.1e11}),))
    other = Machine("here", (cpu(memory_bytes=32 << 30),))
    assert machine.fingerprint == again.fingerprint != other.fingerprint
    assert machine != again
    assert machine.differences(again) == [
        "devices.0.bandwidth_bytes_per_s: 20000000000.0 -> 21000000000.0",
        "devices.0.rates.fp32: 100000000000.0 -> 110000000000.0",
    ]
    assert machine.differences(machine) == []


def test_a_machine_counts_ranks_and_finds_devices() -> None:
    machine = whole_machine()
    assert machine.ranks == 6
    assert machine.device().name == machine.device("cuda:1").name == "a card"
    assert machine.device("cpu").kind == "cpu"
    with pytest.raises(MachineError, match=r"no device 'cuda:2'.*a card"):
        machine.device("cuda:2")


def test_the_tier_below_a_gpu_is_pinned_memory_and_below_a_cpu_the_disk() -> None:
    machine = whole_machine()
    assert machine.host_link is not None
    assert machine.below(machine.device("cuda")) == machine.host_link.pinned
    assert machine.below(machine.device("cpu")) == machine.disk
    with pytest.raises(MachineError, match=r"disk rate .* is not known"):
        Machine("bare", (cpu(),)).below(cpu())


def test_printing_names_every_part() -> None:
    text = str(whole_machine())
    for part in (
        "3 nodes x 2 devices",
        "2 x a card",
        "bf16 80.0 TFLOP/s",
        "host a processor",
        "pinned",
        "disk",
        "3.00 µs",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "the document is .1.; expected an object"),
        ('{"version": 99}', "version 99"),
        ('{"version": 1, "name": "x"}', "devices is not there; expected a list"),
        ('{"version": 1, "name": "x", "devices": []}', "devices is ..; expected a list of at least 1"),
        (
            '{"version": 1, "name": "x", "devices": [{"name": "y"}]}',
            r"devices\[0\]\.kind is not there",
        ),
    ],
)
def test_a_file_that_is_no_machine_is_refused_with_its_reason(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(OutcoreError, match=message):
        Machine.load(path)
    with pytest.raises(MachineError, match="no file"):
        Machine.load(tmp_path / "none.json")


def test_nonsense_is_refused_when_it_is_made() -> None:
    with pytest.raises(MachineError, match="positive bandwidth"):
        cpu(bandwidth_bytes_per_s=0.0)
    with pytest.raises(MachineError, match="positive rates"):
        cpu(rates={"fp32": float("nan")})
    with pytest.raises(MachineError, match="fp33"):
        cpu(rates={"fp33": 1.0})
    with pytest.raises(MachineError, match="0 nodes"):
        Machine("x", (cpu(),), nodes=0)
    with pytest.raises(MachineError, match="positive rates"):
        Link(1.0, -1.0, 1.0)


def test_a_precision_without_units_runs_in_the_wider_one() -> None:
    device = cpu(rates={"fp32": 2e12, "fp16": 8e12})
    assert device.rate("fp16") == 8e12
    assert device.rate("bf16") == device.rate("tf32") == 2e12
    with pytest.raises(MachineError, match="no int8 rate"):
        device.rate("int8")
    with pytest.raises(MachineError, match="unknown precision"):
        precision_of("complex64")


def test_the_roofline_is_the_slower_of_arithmetic_and_memory() -> None:
    device = cpu(rates={"fp32": 1e12}, bandwidth_bytes_per_s=1e10)
    assert device.roofline_s(flops=2e12, nbytes=1e10, dtype="fp32") == 2.0
    assert device.roofline_s(flops=1e12, nbytes=3e10, dtype="fp32") == 3.0
    assert device.roofline_s(flops=0, nbytes=1e10, dtype="int8") == 1.0


def test_units_read_well() -> None:
    assert [format_bytes(n) for n in (512, 1536, 3 << 30, 5 << 40)] == [
        "512 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert [format_rate(r, "B/s") for r in (5e8, 2.75e9, 4.8e12, 2e15)] == [
        "500 MB/s",
        "2.75 GB/s",
        "4.80 TB/s",
        "2000 TB/s",
    ]
    assert [format_time(t) for t in (3e-9, 4.2e-6, 0.25, 3.0)] == ["3.00 ns", "4.20 µs", "250 ms", "3.00 s"]


def test_a_table_has_a_column_for_each_kind_of_device_and_one_for_the_words() -> None:
    table = machine_table(parse("a100x4"))
    heads = [str(column.header) for column in table.columns]
    assert heads[0] == "" and any("A100" in head for head in heads[1:])
    words, first = (list(column.cells) for column in table.columns[:2])
    assert words[:2] == ["memory", "memory copy"] and first[0] == format_bytes(parse("a100").devices[0].memory_bytes)
    assert len(words) == len(first) and "kernel launch" in words
