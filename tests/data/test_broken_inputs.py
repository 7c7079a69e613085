"""Thousands of broken images and tables: each is read, or refused with an error of ours; none hangs or takes memory."""

from __future__ import annotations

import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outcore.data import open_slide, read_table
from outcore.data.opening import SLIDE_ENDINGS
from outcore.errors import OutcoreError
from outcore.infer.slides import find_slides
from tests.data.mutations import FORMATS, broken

_SECONDS = 20
"""A read of a few kilobytes takes milliseconds; so long is a hang."""
_MORE_BYTES = 256 << 20
"""A few kilobytes that claim to be more must be found out."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raise inside of what hangs, and after what made the process grow by more than a piece of a file may take."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    most = _most_bytes()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert _most_bytes() - most <= _MORE_BYTES


def _most_bytes() -> int:
    """The most memory that this process has ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def use(path: Path) -> str:
    """Read an input as a run would: all levels, or all rows."""
    try:
        if path.suffix == ".csv":
            found = find_slides(path)
            table = read_table(path, on_bad="skip")
            for example in table.examples():
                example.image.read([(0, n) for n in example.image.shape])
            return f"{len(found)} rows"
        slide = open_slide(path)
        for number in range(len(slide.levels)):
            level = slide.at(level=number)
            box = [(0, min(n, 200)) for n in level.shape]
            assert tuple(level.read(box).shape) == tuple(b for _, b in box)
        slide.region((0,) * (len(slide.shape) - 1), (10,) * (len(slide.shape) - 1))
        return "read"
    except OutcoreError as error:
        assert str(error) and "\n\n" not in str(error)
        return "refused"


def try_all(folder: Path, form: str, seeds: range) -> dict[str, int]:
    outcomes: dict[str, int] = {}
    for seed in seeds:
        path = broken(folder, form, seed)
        with bounded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outcome = use(path)
            except Exception as error:
                raise AssertionError(f"{form} {seed}: {type(error).__name__}: {error}") from error
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


@pytest.mark.parametrize("form", FORMATS)
def test_a_few_of_each(tmp_path: Path, form: str) -> None:
    assert sum(try_all(tmp_path, form, range(12)).values()) == 12


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_many_of_each(tmp_path: Path, form: str) -> None:
    outcomes = try_all(tmp_path, form, range(1000, 1500))
    print(form, outcomes)
    assert sum(outcomes.values()) == 500


def test_an_ending_that_is_not_known_is_answered_with_all_that_are(tmp_path: Path) -> None:
    (tmp_path / "x.gif").write_bytes(b"GIF89a")
    with pytest.raises(OutcoreError) as refused:
        open_slide(tmp_path / "x.gif")
    assert set(str(refused.value).split("known are ")[1].split(", ")) == SLIDE_ENDINGS
