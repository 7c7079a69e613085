"""Bytes of a tile that runs without gradients: what is alive at once, counted by running it in the same order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from outcore.program.script import Encode, Fetch, Run
from outcore.stream.plan.step_figures import _moved, alive


def node(output: str, *values: str) -> Any:
    return SimpleNamespace(output=output, values=values)


def case(needs: set[str], targets: dict[str, str]) -> tuple[Any, Any, Any]:
    """x is read twice, a and b are joined into c; d is made of c, and e of x for somebody else."""
    sizes = {"x": 10, "w": 1, "a": 20, "b": 4, "c": 40, "d": 50, "e": 500, "y": 700}
    network = SimpleNamespace(dtypes=dict.fromkeys(sizes, torch.float16) | {"b": torch.float64})
    nodes = [node("a", "x", "w"), node("b", "x"), node("e", "x"), node("c", "a", "b"), node("d", "c")]
    stage = SimpleNamespace(sources=("x", "y"), smalls=("w",), nodes=nodes, targets=targets)
    regions = {name: ((0, size),) for name, size in sizes.items() if name != "y"}
    return network, stage, SimpleNamespace(regions=regions, needs=needs, targets=dict.fromkeys(targets))


def test_a_value_is_held_until_it_was_read_last() -> None:
    network, stage, plan = case({"a", "b", "c", "d"}, {"t": "d"})
    # In bytes: x 20 and w 2 are there first; a 40; b 32 while x is still read; c 80 beside a and b; d 100 beside c.
    assert alive(network, stage, plan) == 80 + 100


def test_what_leaves_a_pass_is_held_to_its_end_and_what_is_not_needed_is_not_made() -> None:
    network, stage, plan = case({"a", "b", "c", "d"}, {"t": "d", "u": "a"})
    assert alive(network, stage, plan) == 40 + 80 + 100
    network, stage, plan = case({"a", "b"}, {"t": "a"})
    assert alive(network, stage, plan) == 20 + 40 + 32


def test_the_scripts_of_the_tail_are_moved_to_the_time_and_the_memory_of_a_step() -> None:
    run = _moved(Run(("a",), 2.0, 3, 100), 0.5, 11)
    assert isinstance(run, Run) and (run.time_s, run.saves, run.bytes) == (1.0, 3, 111)
    held = _moved(Run(("a",), 2.0, 3, 100), 1.0, -200)
    assert isinstance(held, Run) and held.bytes == 0
    fetch = Fetch("a")
    assert _moved(fetch, 0.5, 11) is fetch
    encoded = _moved(Encode("a", "fp8", 7, 2.0), 0.5, 11)
    assert isinstance(encoded, Encode) and encoded.time_s == 1.0
