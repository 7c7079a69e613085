"""How a recurrent layer is to be scanned: small values, checked when made.

`Options` speaks of the backward pass (which solver, how long the chunks are, how much memory it may take, in
which precision), `Newton` of the parallel forward pass. In both, ``None`` means "you choose"; what was chosen
is in the layer's `report`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from outcore.errors import ScanError

Backward = Literal["scan", "torch"]
Solver = Literal["products", "relaxation"]
Precision = Literal["full", "tf32", "bf16"]
Jacobian = Literal["full", "diagonal", "none"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def as_bytes(size: int | str) -> int:
    """Bytes of a size like ``"2GiB"``, ``"500 MB"`` or a plain number.

    >>> as_bytes("2GiB")
    2147483648
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2].upper() not in _UNITS:
            raise ScanError(f'cannot read {size!r} as a size of memory; write it like "2GiB", "500MB" or 1073741824')
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ScanError(f"a memory limit must be positive, not {size} bytes")
    return size


@dataclass(frozen=True, slots=True)
class Newton:
    """A forward pass that is parallel over time, by Newton's method on the states at the chunk boundaries.

    Every iteration runs all chunks at once from guessed boundary states and corrects the guesses through the
    chunks' Jacobians. It stops when the largest correction is at most `tolerance`; after `iterations` without
    that, the layer runs sequentially instead, says so, and does not try again for 64 calls.

    Args:
        tolerance: largest accepted correction of a state; none: 1e-5 in float32, 1e-10 in float64.
        iterations: how many to try before the sequential fallback.
        jacobian: ``"full"`` is Newton's method (DEER when `chunk` is 1), ``"diagonal"`` keeps the diagonal of
            the chunks' Jacobians (quasi-DEER), ``"none"`` only passes states on (Picard; the cheapest, and
            enough when the recurrence forgets within a chunk); none: starts with ``"none"`` and goes on with
            ``"full"``, on a GPU after a try without iterations, in which each chunk guesses its first state from
            the steps before it.
        damping: factor ``1 - damping`` on the Jacobians: 0 is Newton, 1 is Picard. Raised by itself when an
            iteration makes things worse.
        chunk: steps per chunk; none: chosen from the length and the batch.
    """

    tolerance: float | None = None
    iterations: int = 16
    jacobian: Jacobian | None = None
    damping: float = 0.0
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None and not self.tolerance > 0:
            raise ScanError(f"tolerance must be positive, not {self.tolerance}")
        if self.iterations < 1:
            raise ScanError(f"iterations must be at least 1, not {self.iterations}")
        if self.jacobian not in (None, "full", "diagonal", "none"):
            raise ScanError(f'jacobian must be "full", "diagonal", "none" or None, not {self.jacobian!r}')
        if not 0 <= self.damping <= 1:
            raise ScanError(f"damping must lie between 0 (Newton) and 1 (Picard), not {self.damping}")
        _check_chunk(self.chunk)


@dataclass(frozen=True, slots=True)
class Options:
    """How a layer runs; every field may be left out.

    Args:
        backward: ``"scan"`` or ``"torch"``; none: whichever was measured to be faster for this shape on this
            device.
        solver: ``"products"`` multiplies Jacobians out (always works), ``"relaxation"`` repeats parallel
            sweeps until the chunks agree (faster when the recurrence forgets within a chunk, and turns to
            products when it does not); none: relaxation first, products if it does not settle at once.
        chunk: steps per chunk; none: chosen from length, batch, hidden size and memory.
        memory: bound on the workspace of the backward pass, as bytes or ``"2GiB"``; none: a quarter of the
            free memory of the device.
        precision: of the matrix products on a GPU: ``"full"``, ``"tf32"``, or ``"bf16"`` (operands only; sums
            are float32); none: what ``torch.get_float32_matmul_precision()`` allows, never bf16.
        forward: a `Newton` to run the forward pass parallel over time; none: torch's own forward.
    """

    backward: Backward | None = None
    solver: Solver | None = None
    chunk: int | None = None
    memory: int | str | None = None
    precision: Precision | None = None
    forward: Newton | None = None

    def __post_init__(self) -> None:
        if self.backward not in (None, "scan", "torch"):
            raise ScanError(f'backward must be "scan", "torch" or None, not {self.backward!r}')
        if self.solver not in (None, "products", "relaxation"):
            raise ScanError(f'solver must be "products", "relaxation" or None, not {self.solver!r}')
        if self.precision not in (None, "full", "tf32", "bf16"):
            raise ScanError(f'precision must be "full", "tf32", "bf16" or None, not {self.precision!r}')
        if self.forward is not None and self.backward == "torch":
            raise ScanError('a Newton forward keeps nothing for torch\'s backward; leave out backward="torch"')
        _check_chunk(self.chunk)
        if self.memory is not None:
            as_bytes(self.memory)


def _check_chunk(chunk: int | None) -> None:
    if chunk is not None and chunk < 1:
        raise ScanError(f"chunk must be at least 1 step, not {chunk}")
