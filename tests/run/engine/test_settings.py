"""The keyword arguments of an engine are the fields of its settings."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import EngineError
from outcore.run import EngineSettings
from outcore.run.engine.settings import EngineOptions


def test_options_and_settings_have_the_same_fields() -> None:
    assert get_type_hints(EngineOptions) == get_type_hints(EngineSettings)
    assert [f.name for f in fields(EngineSettings)] == list(get_type_hints(EngineOptions))


def test_settings_train_as_keyword_arguments_do_and_arguments_go_first() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    given = {"loss": nn.functional.mse_loss, "example": x, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}

    def losses(settings: EngineSettings | None, **options: object) -> list[float]:
        torch.manual_seed(0)
        with outcore.Engine(nn.Linear(3, 2), settings=settings, **options) as engine:
            return [engine.step(x, y) for _ in range(2)]

    assert losses(EngineSettings(**given)) == losses(None, **given)
    other = EngineSettings(**given | {"optimizer": lambda p: torch.optim.SGD(p, lr=0.2)})
    assert losses(other) != losses(None, **given) == losses(other, optimizer=given["optimizer"])
    with pytest.raises(TypeError, match="learning_rate"):
        outcore.Engine(nn.Linear(3, 2), learning_rate=0.1)
    with pytest.raises(EngineError, match="no loss"):
        outcore.Engine(nn.Linear(3, 2), example=x)
