"""Models and training loops written at random, under policies drawn at random: none differs from plain PyTorch."""

from collections.abc import Iterable

import pytest

from ..foreign.sample import rotating
from .programs.drawn import outcome

QUICK, MANY, BLOCK = 12, 2000, 50
FOUND = (463, 1512)
"""Programs that showed a defect once."""


def test_few_programs_others_with_every_commit_differ_in_nothing() -> None:
    _none_differs([*FOUND, *rotating(range(MANY), QUICK)])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MANY, BLOCK))
def test_many_programs_differ_in_nothing(first: int) -> None:
    _none_differs(range(first, first + BLOCK))


def _none_differs(seeds: Iterable[int]) -> None:
    ended = [outcome(seed) for seed in seeds]
    assert [(o.seed, o.mode, o.ended, o.told) for o in ended if o.found] == []
    idle = [o for o in ended if o.ended != "same"]
    assert len(idle) <= 0.3 * len(ended), "most of the programs have to be ones that plain PyTorch trains"
