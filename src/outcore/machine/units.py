"""Bytes, rates and times as people read them.

Memory is shown in binary units (GiB), because that is what allocators count in; rates are shown in decimal
ones (GB/s, TFLOP/s), because that is what datasheets use.
"""

from __future__ import annotations

__all__ = ["format_bytes", "format_rate", "format_time"]


def format_bytes(nbytes: float) -> str:
    """A size in binary units.

    >>> format_bytes(16 << 30)
    '16.0 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def format_rate(per_second: float, unit: str) -> str:
    """A rate in decimal units, three significant digits.

    >>> format_rate(4.8e12, "B/s"), format_rate(989.4e12, "FLOP/s")
    ('4.80 TB/s', '989 TFLOP/s')
    """
    for prefix in ("", "k", "M", "G", "T"):
        if abs(per_second) < 999.5 or prefix == "T":
            digits = 0 if abs(per_second) >= 99.95 else 1 if abs(per_second) >= 9.995 else 2
            return f"{per_second:.{digits}f} {prefix}{unit}"
        per_second /= 1000
    raise AssertionError("unreachable")


def format_time(seconds: float) -> str:
    """A duration with three significant digits.

    >>> format_time(4.2e-6), format_time(0.25)
    ('4.20 µs', '250 ms')
    """
    for factor, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        value = seconds * factor
        if abs(value) < 999.5:
            digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{seconds:.2f} s"
