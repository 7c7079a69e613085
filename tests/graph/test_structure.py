"""What is found in a structure, and how long is looked for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outcore.graph.structure import leaves


class Counting(type):
    """Counts how often something is asked whether it is one of a class."""

    asked = 0

    def __instancecheck__(cls, instance: Any) -> bool:
        Counting.asked += 1
        return type(instance) is cls


class Wanted(metaclass=Counting):
    """What is looked for."""


class Box:
    """An object of a class that nothing is known of."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def tied(levels: int, width: int, last: Any) -> Any:
    """Objects in levels, of which each refers to all of the next: paths are many, objects few."""
    row: list[Any] = [last] * width
    for _ in range(levels):
        row = [Box(**{f"to_{n}": one for n, one in enumerate(row)}) for _ in range(width)]
    return row[0]


@pytest.mark.parametrize("found", [False, True])
def test_objects_that_many_paths_lead_to_are_looked_into_once(found: bool) -> None:
    """Layers of Keras refer to one another, and a function over them was looked through for hours."""
    Counting.asked = 0
    tree = tied(5, 4, Wanted() if found else object())
    assert len(list(leaves(tree, Wanted))) == (4**5 if found else 0)
    if not found:
        assert Counting.asked < 6 * 4 * 4 * 4  # and not a thousand paths


def test_what_is_deeper_than_the_bound_is_not_found_and_what_is_nearer_on_another_path_is() -> None:
    leaf = torch.ones(2)
    assert [x is leaf for _, x in leaves(tied(10, 1, leaf), torch.Tensor)] == [True]
    assert not list(leaves(tied(40, 1, leaf), torch.Tensor))
    near = Box(way=tied(11, 1, Box(x=leaf)), x=Box(x=leaf))
    assert len(list(leaves(near, torch.Tensor))) >= 1


def test_objects_that_refer_to_themselves_end() -> None:
    one = Box()
    one.__dict__.update(other=Box(back=one), again=one)
    assert not list(leaves(one, torch.Tensor))
