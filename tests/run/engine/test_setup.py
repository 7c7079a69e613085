"""Before a run: which device a rank gets."""

from __future__ import annotations

import pytest
import torch

from outcore.errors import EngineError
from outcore.run.engine.setup import choose_device


def test_without_a_gpu_the_host_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(EngineError, match='torch sees no GPU here; use "cpu"'):
        choose_device("cuda")
    with pytest.raises(EngineError, match="no device 'gpu'; use cpu, cuda or"):
        choose_device("gpu")


def test_each_rank_of_a_computer_gets_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device(None, rank).index for rank in range(3)] == [0, 1, 0]
    assert choose_device("cuda:1", 0).index == 1
    with pytest.raises(EngineError, match="device cuda:2 was asked for, but there are 2 GPUs"):
        choose_device("cuda:2")
