"""Sizes, rates and times as people read and write them, at the edges between two units."""

from __future__ import annotations

import pytest

from outcore.errors import MachineError
from outcore.machine.units import counted, format_bytes, format_rate, format_time, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("7", 7),
        ("7b", 7),
        ("1k", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        (" 2.5 mib ", 5 << 19),
        (".5GB", 5 * 10**8),
        ("3T", 3 * 10**12),
        ("1TiB", 1 << 40),
        ("2Gi", 2 << 30),
    ],
)
def test_sizes_as_people_type_them(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5.2GB", "8 GiB of it", "1e9", "8PiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(MachineError, match="is not a size; write for example 8GiB"):
        parse_bytes(text)


def test_shares_are_of_what_plain_training_takes() -> None:
    assert parse_budget(" 12.5% ", 1000) == 125
    assert parse_budget("150%", 1000) == 1500
    assert parse_budget("1KiB", 1000) == 1024
    for text in ("0%", "-5%", "%", "half%", "inf%", "nan%"):
        with pytest.raises(MachineError, match="is no share; write for example 50%"):
            parse_budget(text, 1000)
    with pytest.raises(
        MachineError, match="50% of what plain training takes was asked for, and that is not known here"
    ):
        parse_budget("50%", None)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        ((1 << 30) - 1, "1024.0 MiB"),
        (1 << 30, "1.0 GiB"),
        (5 << 40, "5.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0 B/s"),
        (9.994, "9.99 B/s"),
        (9.996, "10.0 B/s"),
        (99.94, "99.9 B/s"),
        (99.96, "100 B/s"),
        (999.4, "999 B/s"),
        (999.6, "1.00 kB/s"),
        (25e9, "25.0 GB/s"),
        (1e12, "1.00 TB/s"),
        (2e16, "20000 TB/s"),
    ],
)
def test_rates_have_three_digits(rate: float, text: str) -> None:
    assert format_rate(rate, "B/s") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (9e-10, "<1 ns"),
        (1e-9, "1.00 ns"),
        (999.4e-9, "999 ns"),
        (999.6e-9, "1.00 µs"),
        (12.34e-6, "12.3 µs"),
        (0.1234, "123 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (90, "90.00 s"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "step", "0 steps"),
        (1, "batch", "1 batch"),
        (3, "pass", "3 passes"),
        (2, "box", "2 boxes"),
        (1234567, "rank", "1,234,567 ranks"),
    ],
)
def test_nouns_are_counted(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text
