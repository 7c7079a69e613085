"""A rank that is stopped before it has joined: the launcher sees it, ends all and names it."""

from __future__ import annotations

import time

import pytest

from outcore.errors import EngineError
from outcore.run import stopped
from outcore.run.ranks.launch import launch
from tests.run.launched import stopped_before_joining


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_starting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped, "SILENT_AFTER_S", 2.0)
    began = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 was stopped while starting, and is so for 2 s"):
        launch(stopped_before_joining, 2)
    print(f"named after {time.monotonic() - began:.0f} s")
