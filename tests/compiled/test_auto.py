"""The faster of two plans is chosen; where neither fits, the one that needs less is the refusal."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from outcore.compiled import auto, torch_partitioner
from outcore.errors import PlanError


def chosen(
    monkeypatch: pytest.MonkeyPatch, step_s: dict[bool, float], needs: dict[bool, int]
) -> tuple[Any, list[bool]]:
    """What is put over a model whose plans take so long, or need so many bytes; and what was tried, in order."""
    model, tried = nn.Linear(1, 1), list[bool]()

    def within(**asked: Any) -> nn.Module:
        tried.append(asked["compile"])
        if asked["compile"] in needs:
            refused = PlanError("too little")
            refused.least_bytes = needs[asked["compile"]]
            raise refused
        model.__dict__["forward"] = asked["compile"]
        return model

    monkeypatch.setattr(auto, "is_compiled", lambda forward: forward)
    monkeypatch.setattr(auto, "_step_s", lambda model, *_: step_s[model.__dict__["forward"]])
    asked = {"model": model, "quiet": True, "args": (), "kwargs": {}, "loss": None}
    return auto.faster_of(within, asked).__dict__["forward"], tried


def test_a_compiled_step_is_taken_where_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, {False: 1.0, True: 0.9}, {}) == (True, [False, True])
    assert chosen(monkeypatch, {False: 1.0, True: 0.99}, {}) == (False, [False, True, False])
    assert chosen(monkeypatch, {True: 9.0}, {False: 5}) == (True, [False, True])
    assert chosen(monkeypatch, {False: 9.0}, {True: 5}) == (False, [False, True, False])


@pytest.mark.parametrize("needs", [{False: 7, True: 5}, {False: 5, True: 7}])
def test_where_neither_fits_the_smaller_need_is_named(needs: dict[bool, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError) as refused:
        chosen(monkeypatch, {}, needs)
    assert refused.value.least_bytes == 5


def test_a_torch_without_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_partitioner.support() is None
    monkeypatch.delattr(torch_partitioner.partitioners, "choose_saved_values_set")
    assert "has no choose_saved_values_set" in str(torch_partitioner.support())
