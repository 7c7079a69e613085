"""Batches are told apart by their form, in words that name the place; outputs of micro-batches become one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outcore.run.engine.batch import arguments, describe, difference, fingerprint, joined, meta_batch

IMAGE = torch.zeros(8, 3)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (IMAGE, torch.zeros(4, 3), "inputs: float32 8x3 and float32 4x3"),
        (IMAGE, IMAGE.double(), "inputs: float32 8x3 and float64 8x3"),
        (IMAGE, torch.zeros(3, 8).t(), "inputs: strides [3, 1] and strides [1, 8]"),
        (torch.tensor(1.0), torch.tensor(1), "inputs: float32 number and int64 number"),
        ((IMAGE, 3), (IMAGE, 4), "inputs[1]: 3 and 4"),
        ((IMAGE, [1, None]), (IMAGE, [1, "x"]), "inputs[1][1]: None and 'x'"),
        ((IMAGE,), (IMAGE, IMAGE), "inputs: a tuple of 1 and one of 2"),
        ((IMAGE,), [IMAGE], "inputs: a tuple and a list"),
        ({"x": IMAGE, "y": 1}, {"x": IMAGE, "z": 1}, "inputs: names x, y and x, z"),
        ({"x": {"y": 1}}, {"x": {"y": 2}}, "inputs['x']['y']: 1 and 2"),
        (IMAGE, 3, "inputs: float32 8x3 and 3"),
        (object(), {}, "inputs: builtins.object and a dict"),
    ],
)  # fmt: skip
def test_where_two_batches_differ_first_is_said(one: Any, other: Any, said: str) -> None:
    assert difference(describe(one), describe(other)) == said
    assert fingerprint(describe(one)) != fingerprint(describe(other))


def test_batches_of_one_form_do_not_differ_whatever_their_numbers() -> None:
    one, other = ({"x": [torch.randn(2, 3), None], "y": (1, "a")} for _ in range(2))
    assert difference(describe(one), describe(other)) is None
    assert fingerprint(describe(one)) == fingerprint(describe(other))


def test_a_batch_without_numbers_has_the_same_form() -> None:
    batch = {"x": [torch.zeros(3, 8).t(), None], "y": (torch.tensor(1), "a")}
    made = meta_batch(describe(batch))
    assert difference(describe(batch), describe(made)) is None
    assert made["x"][0].is_meta and made["x"][1] is None and made["y"][1] == "a"


def test_outputs_of_micro_batches_become_one() -> None:
    first, second = ({"y": torch.full((n, 2), float(n)), "loss": [torch.tensor(float(n)), "same"]} for n in (1, 3))
    whole = joined([first, second])
    assert torch.equal(whole["y"], torch.tensor([[1.0, 1.0], [3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]))
    assert whole["loss"][0].tolist() == [1.0, 3.0] and whole["loss"][1] == "same"


def test_inputs_are_given_by_name_by_position_or_alone() -> None:
    assert arguments({"x": 1}) == ((), {"x": 1})
    assert arguments((1, 2)) == arguments([1, 2]) == ((1, 2), {})
    assert arguments(3) == ((3,), {})
    named = torch.return_types.max((torch.ones(1), torch.ones(1)))
    assert arguments(named) == ((named,), {}), "a tuple with a type of its own is one argument"
