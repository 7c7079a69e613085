"""The list of tests that take seconds names tests that are there, and every commit runs some of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONG_TESTS
from tests.foreign import sample

ROOT = Path(__file__).parents[1]


def test_every_name_is_that_of_a_test() -> None:
    lines = LONG_TESTS.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines)) and len(lines) > 100
    for line in lines:
        path, _, name = line.partition("::")
        assert Path(path).parent.name != "tests", f"{line} says something of the whole project: every run takes it"
        function = name.partition("[")[0].rpartition("::")[2]
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), line


def test_states_draw_a_third_each_and_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LONG_TESTS.read_text(encoding="utf-8").splitlines()
    left = set(lines)
    for number in range(30):
        monkeypatch.setattr(sample, "state", lambda number=number: f"state {number}")
        found = {line for line in lines if sample.drawn(line, 3)}
        assert 0.2 * len(lines) < len(found) < 0.5 * len(lines)
        left -= found
    assert not left
