"""Help in words that people type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outcore.cli.common.help_text import flowing, plain_usage, word_for


@pytest.mark.parametrize(
    ("hint", "word"),
    [(int, "N"), (int | None, "N"), (float, "X"), (Path | None, "PATH"), (list[str] | None, "TEXT"), (None, None)],
)
def test_a_value_has_a_word_by_its_type(hint: Any, word: str | None) -> None:
    assert word_for(hint) == word


def test_what_must_be_given_is_bare() -> None:
    assert plain_usage(["[OPTIONS]", "{JOB}", "[PLAN]", "{A}..."]) == ["[OPTIONS]", "JOB", "[PLAN]", "{A}..."]


def test_paragraphs_of_help_are_broken_by_the_terminal_and_examples_stay() -> None:
    text = "Do this.\n\n    A sentence that\n    goes on:\n\n        outcore a\n        outcore b\n\n    The\n    end."
    wanted = "Do this.\n\nA sentence that goes on:\n\noutcore a\noutcore b\n\nThe end."
    assert flowing(text) == wanted and flowing(wanted) == wanted
