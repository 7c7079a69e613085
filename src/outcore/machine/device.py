"""A device: one place where a network can be trained.

A GPU and a CPU are described by the same few numbers: how much memory, how fast it is read and written, how
many floating-point operations per second a large matrix product reaches in each precision, and what it costs
to start one operation. That is all the roofline needs (time >= operations / rate and time >= bytes /
bandwidth), and it is what datasheets and probes can both provide. Rates are dense: no structured sparsity.

A precision is named `fp64`, `fp32`, `tf32`, `bf16`, `fp16`, `fp8` or `int8`. TF32 is a precision of its own
although its tensors are `torch.float32`, because that is what decides the rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from outcore.errors import MachineError

__all__ = ["ELEMENT_BYTES", "PRECISIONS", "Device", "DeviceKind", "precision_of"]

DeviceKind = Literal["cpu", "cuda"]

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8")

ELEMENT_BYTES: Mapping[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
}

# What the hardware does when a precision has no unit of its own: convert, and compute in the wider one.
_FALLBACK = {"tf32": "fp32", "bf16": "fp32", "fp16": "fp32", "fp64": "fp32"}

_TORCH_NAMES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
}


def precision_of(dtype: object) -> str:
    """The precision of a torch dtype or of its name; a precision's own name is returned as it is.

    >>> precision_of("torch.bfloat16"), precision_of("tf32")
    ('bf16', 'tf32')
    """
    name = str(dtype).removeprefix("torch.")
    name = _TORCH_NAMES.get(name, name)
    if name not in PRECISIONS:
        raise MachineError(f"unknown precision {dtype!s}; use one of {', '.join(PRECISIONS)} or a torch dtype")
    return name


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or one CPU (all the cores of a node together)."""

    name: str
    kind: DeviceKind
    memory_bytes: int
    bandwidth_bytes_per_s: float
    """Bytes read plus bytes written per second by a large copy."""
    rates: Mapping[str, float] = field(hash=False)
    """Dense matrix rate in FLOP/s by precision (a multiply and an add are two), where known."""
    sms: int | None = None
    """Streaming multiprocessors, compute units, or on a CPU cores."""
    clock_hz: float | None = None
    launch_s: float = 0.0
    """Time on the device between two dependent tiny kernels; 0 on a CPU, where dispatch is all there is."""
    dispatch_s: float = 0.0
    """Time the Python interpreter and torch need to issue one operation."""
    source: str = ""
    """Where the numbers come from: a datasheet, or a measurement and its date."""

    def __post_init__(self) -> None:
        if self.kind not in ("cpu", "cuda"):
            raise MachineError(f'device {self.name!r} has kind {self.kind!r}; needed "cpu" or "cuda"')
        if self.memory_bytes <= 0:
            raise MachineError(f"device {self.name!r} has {self.memory_bytes} bytes of memory; needed more than 0")
        if not (math.isfinite(self.bandwidth_bytes_per_s) and self.bandwidth_bytes_per_s > 0):
            raise MachineError(f"device {self.name!r} needs a positive bandwidth, got {self.bandwidth_bytes_per_s}")
        unknown = sorted(set(self.rates) - set(PRECISIONS))
        if unknown:
            raise MachineError(f"device {self.name!r} has rates for {unknown}; known are {', '.join(PRECISIONS)}")
        wrong = {p: r for p, r in self.rates.items() if not (math.isfinite(r) and r > 0)}
        if wrong:
            raise MachineError(f"device {self.name!r} needs positive rates in FLOP/s, got {wrong}")

    def rate(self, dtype: object) -> float:
        """Dense matrix rate in FLOP/s for a precision or torch dtype.

        A precision the device has no unit for runs in the next wider one it has (bf16 on a V100 as fp32).

        >>> v100 = Device("V100", "cuda", 16 << 30, 900e9, {"fp32": 15.7e12, "fp16": 125e12})
        >>> v100.rate("bf16") == v100.rate("fp32")
        True
        """
        precision = precision_of(dtype)
        if precision in self.rates:
            return self.rates[precision]
        wider = _FALLBACK.get(precision)
        if wider is not None and wider in self.rates:
            return self.rates[wider]
        known = ", ".join(p for p in PRECISIONS if p in self.rates) or "none"
        raise MachineError(f"no {precision} rate is known for {self.name!r} (known: {known}); probe the machine again")

    def roofline_s(self, *, flops: float, nbytes: float, dtype: object) -> float:
        """The time below which this device cannot do `flops` operations on `nbytes` of memory traffic."""
        compute = flops / self.rate(dtype) if flops else 0.0
        return max(compute, nbytes / self.bandwidth_bytes_per_s, self.launch_s)
