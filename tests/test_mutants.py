"""The named defects can still be put where they were, and a draw has every package in it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.mutation.defects import defects
from tests.mutation.named import named

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "outcore"


def test_every_named_defect_has_its_place_and_its_tests() -> None:
    for mutant in named(SOURCE):
        for asked in mutant.tests.split():
            file, _, test = asked.partition("::")
            assert (ROOT / file).is_file() and f"def {test}" in (ROOT / file).read_text()
        words = (SOURCE / mutant.file).read_bytes()
        wrong = words[: mutant.start] + mutant.text.encode() + words[mutant.stop :]
        assert wrong != words and ast.parse(wrong)


def test_a_defect_is_one_change_that_can_still_be_read() -> None:
    words = (SOURCE / "machine" / "units.py").read_text()
    found = list(defects("machine/units.py", words))
    assert len(found) > 50 and len({(m.start, m.text) for m in found}) == len(found)
    for mutant in found:
        wrong = words.encode()[: mutant.start] + mutant.text.encode() + words.encode()[mutant.stop :]
        assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(words)), mutant
