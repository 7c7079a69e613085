"""Programs that do what Python can, trained under policies and plainly: none differs, whatever it does."""

import pytest

from ..foreign.sample import one_in, quarter, rotating
from .programs import attributes, effects, found, loops, surroundings, tools  # noqa: F401 - they fill the collection
from .programs.run import PROGRAMS, VARIANTS, differences, run_program

MANY = [name for names in VARIANTS.values() if len(names) >= 10 for name in names]
"""Of one program with many cases every second is tried, the others with another commit."""
QUICK = [*(name for name in PROGRAMS if name not in MANY), *one_in(2, MANY)]

MODES = ("recompute", "offload", "encode", "keep", *(f"mixture {seed}" for seed in range(6)))


def test_there_are_enough_programs() -> None:
    assert len(PROGRAMS) >= 120


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_a_program_trains_as_plain_pytorch_does(name: str) -> None:
    (mode,) = rotating(["recompute", "mixture"], 1)  # the other one with another commit, and in the slow tests
    plain = run_program(name, None)
    assert plain.notes
    assert differences(plain, run_program(name, mode)) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mode"), quarter((name, mode) for name in PROGRAMS for mode in MODES))
def test_a_program_trains_as_plain_pytorch_does_under_every_policy(name: str, mode: str) -> None:
    how, _, seed = mode.partition(" ")
    plain = run_program(name, None, int(seed or 0))
    assert differences(plain, run_program(name, how, int(seed or 0))) == []
