"""Every catalogued GPU is complete and plausible, and is found by the names people and drivers use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outcore.errors import MachineError
from outcore.machine import Machine, find, names, parse


def test_the_catalogue_holds_the_gpus_people_have() -> None:
    wanted = "k80 p100 v100 t4 a100-40gb a100-80gb l4 l40s h100 h100-pcie h200 b200 rtx3090 rtx4090 mi300x"
    assert set(wanted.split()) <= set(names())


@pytest.mark.parametrize("name", names())
def test_a_row_is_complete_and_dense_rates_are_ordered(name: str) -> None:
    entry = find(name)
    device = entry.device
    assert len(entry.source) > 10
    assert device.kind == "cuda" and device.sms and device.clock_hz and "fp32" in device.rates
    assert device.memory_bytes >= 12 * 10**9
    rates = device.rates
    assert rates.get("fp64", 0) <= rates["fp32"]
    if "tf32" in rates:
        # Sparse figures slip in as a factor of two: bf16 is twice tf32 on every card that has both.
        assert rates["bf16"] / rates["tf32"] == pytest.approx(2, rel=0.02)
        assert rates["fp16"] == rates["bf16"]
    if "fp8" in rates:
        assert rates["fp8"] / rates["bf16"] == pytest.approx(2, rel=0.03)
    pinned, pageable = entry.host_link.pinned, entry.host_link.pageable
    assert pageable.away_bytes_per_s < pinned.away_bytes_per_s < device.bandwidth_bytes_per_s
    assert Machine.from_json(json.loads(json.dumps(parse(name).to_json()))) == parse(name)


@pytest.mark.parametrize("name", ["p100", "v100", "a100-40gb", "h100", "h200", "l4", "l40s", "rtx3090", "rtx4090"])
def test_fp32_rates_follow_from_cores_and_clock(name: str) -> None:
    device = find(name).device
    cores = device.sms * (64 if name in ("p100", "v100", "a100-40gb") else 128)  # type: ignore[operator]
    assert device.rates["fp32"] == pytest.approx(2 * cores * device.clock_hz, rel=0.03)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "ranks", "gpu"),
    [
        ("h200", 1, "h200"),
        ("v100x8", 8, "v100"),
        ("4xa100", 4, "a100-40gb"),
        ("a100-80gbx4", 4, "a100-80gb"),
        ("2x8xV100", 16, "v100"),
        ("2xv100x8", 16, "v100"),
        ("mi300x", 1, "mi300x"),
        ("mi300xx8", 8, "mi300x"),
        ("8xmi300x", 8, "mi300x"),
        ("rtx4090x2", 2, "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", 1, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 1, "h100"),
        ("NVIDIA GeForce RTX 4090", 1, "rtx4090"),
        ("Tesla V100-SXM2-32GB", 1, "v100-32gb"),
    ],
)
def test_a_word_names_a_machine(text: str, ranks: int, gpu: str) -> None:
    machine = parse(text)
    assert machine.ranks == ranks
    assert machine.devices[0] == find(gpu).device
    assert (machine.between_nodes is not None) == (machine.nodes > 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v10x8", "did you mean v100"),
        ("4xh20", "did you mean h200"),
        ("tpu", "known are k80, p100"),
        ("", "empty"),
        ("0xv100", "between 1 and"),
        ("missing.json", "no file missing.json"),
    ],
)
def test_an_unknown_word_gets_near_matches(text: str, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        parse(text)


def test_a_cluster_file_names_devices_and_links(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    document = {
        "version": 1,
        "name": "lab",
        "nodes": 4,
        "devices": "v100x4",
        "between_nodes": "infiniband-hdr",
        "between_devices": {"bandwidth_bytes_per_s": 11e9, "latency_s": 8e-6},
    }
    path.write_text(json.dumps(document))
    machine = parse(str(path))
    assert (machine.name, machine.nodes, machine.ranks) == ("lab", 4, 16)
    assert machine.between_nodes is not None and machine.between_nodes.away_bytes_per_s == 25e9
    assert machine.between_devices is not None and machine.between_devices.away_bytes_per_s == 11e9
    machine.save(path)
    assert parse(str(path)) == machine

    path.write_text(json.dumps({**document, "between_nodes": "string and cup"}))
    with pytest.raises(MachineError, match="unknown network 'string and cup'; known are"):
        parse(str(path))
    path.write_text(json.dumps({**document, "between_devices": {"speed": 3}}))
    with pytest.raises(MachineError, match=r"between_devices\.\w+ is not"):
        parse(str(path))


@pytest.mark.parametrize(("name", "gib"), [("k80", 12), ("p100", 16), ("a100-40gb", 40), ("a100-80gb", 80), ("l4", 24)])
def test_memory_is_what_the_name_says(name: str, gib: int) -> None:
    assert find(name).device.memory_bytes == gib * 2**30


def test_a_wrong_name_is_answered_with_a_few_near_ones() -> None:
    with pytest.raises(MachineError) as refusal:
        find("a100-90gb")
    assert "a100-80gb" in str(refusal.value)
