"""A sweep is repeatable and bounded; its samples survive interruption, failure and damage."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from outcore.cost.measured.calibrate import collect, samples_path
from outcore.cost.measured.op_sweep import Bounds, sweep
from outcore.cost.measured.samples import measure_samples, read_samples
from outcore.cost.predicted.operation import KINDS, Operation
from outcore.errors import MachineError
from outcore.machine import Device, find
from outcore.machine.clock import TimedRuns

CPU = Device("a processor", "cpu", 8 << 30, 20e9, {"fp32": 5e10, "bf16": 5e10}, sms=2, dispatch_s=2e-6)


def fake(operation: Operation) -> TimedRuns:
    return TimedRuns.of([1e-6 * (1 + operation.nbytes % 97)] * 3)


def test_a_sweep_is_the_same_each_time_and_stays_in_bounds() -> None:
    for device, dtype in ((CPU, "fp32"), (find("h200").device, "bf16")):
        drawn = list(itertools.islice(sweep(device, dtype=dtype), 600))
        assert drawn == list(itertools.islice(sweep(device, dtype=dtype), 600))
        assert drawn != list(itertools.islice(sweep(device, dtype=dtype, seed=1), 600))
        assert {operation.kind for operation in drawn} == set(KINDS)
        limits = Bounds.of(device)
        for operation in drawn:
            if operation.direction == "forward":
                assert 3 * operation.nbytes <= limits.most_bytes
                assert device.roofline_s(flops=operation.flops, nbytes=operation.nbytes, dtype=dtype) <= limits.most_s


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    operations = list(itertools.islice(sweep(CPU, dtype="fp32"), 30))
    path, seen = tmp_path / "samples.jsonl", []

    def interrupted(operation: Operation) -> TimedRuns:
        if len(seen) == 12:
            raise KeyboardInterrupt
        seen.append(operation)
        return fake(operation)

    with pytest.raises(KeyboardInterrupt):
        measure_samples(operations, interrupted, path, about={"device": "x"}, seconds=60)
    assert [sample.operation for sample in read_samples(path)] == operations[:12]
    with path.open("a") as file:
        file.write('{"operation": {"kind": "co')  # killed in the middle of a line
    again: list[Operation] = []

    def counted(operation: Operation) -> TimedRuns:
        again.append(operation)
        return fake(operation)

    samples = measure_samples(operations, counted, path, about={"device": "x"}, seconds=60)
    assert again == operations[12:]
    assert [sample.operation for sample in samples] == operations
    assert [sample.timing for sample in samples] == [fake(operation) for operation in operations]


def test_time_and_count_limits_hold_and_progress_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    operations = list(itertools.islice(sweep(CPU, dtype="fp32"), 30))
    path = tmp_path / "samples.jsonl"
    none = measure_samples(operations, fake, path, about={}, seconds=0)
    assert none == []
    some = measure_samples(
        operations, fake, path, about={}, seconds=60, most=5, progress=lambda used, allowed, words: told.append(words)
    )
    assert len(some) == 5 and told == [str(operation) for operation in operations[:5]]


def test_an_operation_that_fails_is_noted_and_not_tried_again(tmp_path: Path) -> None:
    operations = list(itertools.islice(sweep(CPU, dtype="fp32"), 6))
    tried: list[Operation] = []

    def failing(operation: Operation) -> TimedRuns:
        tried.append(operation)
        if operation == operations[2]:
            raise RuntimeError("out of memory\nand more lines")
        return fake(operation)

    path = tmp_path / "samples.jsonl"
    assert len(measure_samples(operations, failing, path, about={}, seconds=60)) == 5
    assert len(measure_samples(operations, failing, path, about={}, seconds=60)) == 5
    assert len(tried) == 6 and "out of memory" in path.read_text()


def test_samples_of_another_device_are_never_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    operations = list(itertools.islice(sweep(CPU, dtype="fp32"), 2))
    measure_samples(operations, fake, path, about={"device": "one"}, seconds=60)
    with pytest.raises(MachineError, match=r"holds samples of .*one"):
        measure_samples(operations, fake, path, about={"device": "two"}, seconds=60)
    with pytest.raises(MachineError, match="cannot read the samples"):
        read_samples(tmp_path / "none.jsonl")


def test_a_sweep_on_a_gpu_that_is_absent_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is present")
    path = samples_path(tmp_path, CPU, "fp32")
    assert path.name == "a-processor-fp32.jsonl"
    with pytest.raises(MachineError, match="torch sees no CUDA device"):
        collect(find("h200").device, "cuda:0", dtype="bf16", path=path, seconds=1)
