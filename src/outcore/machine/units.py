"""Bytes, rates and times as people read them.

Memory is shown in binary units (GiB), because that is what allocators count in; rates are shown in decimal
ones (GB/s, TFLOP/s), because that is what datasheets use.
"""

from __future__ import annotations

import re

from outcore.errors import MachineError

__all__ = ["counted", "format_bytes", "format_rate", "format_time", "parse_budget", "parse_bytes"]

_BINARY = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_bytes(text: str) -> int:
    """A size as people type it; GB is a thousand million, GiB is 2**30.

    >>> parse_bytes("8GiB") == 8 << 30, parse_bytes("1.5 GB"), parse_bytes("4096")
    (True, 1500000000, 4096)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGTkmgt]?)(i?)[Bb]?\s*", text)
    if match is None:
        raise MachineError(f"{text!r} is not a size; write for example 8GiB, 500MB or 4096")
    power = _BINARY[match[2].upper()]
    return int(float(match[1]) * (2**power if match[3] else 1000 ** (power // 10)))


def parse_budget(text: str, plain_bytes: int | None) -> int:
    """A size, or a share of what plain training is predicted to take, where that is known.

    >>> parse_budget("8GiB", None) == 8 << 30, parse_budget("50%", 1000)
    (True, 500)
    """
    if not (share := text.strip()).endswith("%"):
        return parse_bytes(text)
    try:
        part = float(share[:-1]) / 100
    except ValueError:
        part = 0.0
    if not 0 < part < float("inf"):
        raise MachineError(f"{text!r} is no share; write for example 50%")
    if plain_bytes is None:
        raise MachineError(
            f"{text} of what plain training takes was asked for, and that is not known here; give a size"
        )
    return int(part * plain_bytes)


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


def rounded_up(nbytes: int) -> str:
    """A size that is enough, as it is typed.

    >>> rounded_up(2**20 + 1), rounded_up(1000)
    ('2MiB', '1KiB')
    """
    unit, name = (2**20, "MiB") if nbytes >= 2**20 else (2**10, "KiB")
    return f"{-(-nbytes // unit)}{name}"


def format_rate(per_second: float, unit: str) -> str:
    """A rate in decimal units, three significant digits.

    >>> format_rate(4.8e12, "B/s"), format_rate(989.4e12, "FLOP/s")
    ('4.80 TB/s', '989 TFLOP/s')
    >>> format_rate(0, "FLOP")
    '0 FLOP'
    """
    if per_second == 0:
        return f"0 {unit}"
    for prefix in ("", "k", "M", "G", "T"):
        if abs(per_second) < 999.5 or prefix == "T":
            digits = 0 if abs(per_second) >= 99.95 else 1 if abs(per_second) >= 9.995 else 2
            return f"{per_second:.{digits}f} {prefix}{unit}"
        per_second /= 1000
    raise AssertionError("unreachable")


def format_time(seconds: float) -> str:
    """A duration with three significant digits; nothing and what is next to it as such.

    >>> format_time(4.2e-6), format_time(0.25), format_time(0.0), format_time(4e-10)
    ('4.20 µs', '250 ms', '0 s', '<1 ns')
    """
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 1e-9:
        return "<1 ns"
    for factor, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        value = seconds * factor
        if abs(value) < 999.5:
            digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{seconds:.2f} s"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it is not one.

    >>> counted(1, "epoch"), counted(2, "epoch"), counted(1200, "step"), counted(2, "batch")
    ('1 epoch', '2 epochs', '1,200 steps', '2 batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("tch", "sh", "s", "x")) else "s"
    return f"{number:,} {noun}{ending}"
