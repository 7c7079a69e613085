"""Costs that were measured before are not measured again, unless something they depend on has changed."""

from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.cost import cost_cache
from outcore.cost.measured.measure import measure
from outcore.graph import Graph


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Graph]:
    """The graphs that are measured, with a cache of their own."""
    found: list[Graph] = []

    def counting(graph: Graph, *, time_limit_s: float, between: bool) -> outcore.Costs:
        found.append(graph)
        return measure(graph, time_limit_s=0.2)

    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_cache, "measure", counting)
    monkeypatch.setattr(cost_cache, "_KNOWN", {})
    return found


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))


def within(model: nn.Module, batch: int = 6) -> nn.Module:
    return outcore.within(model, (torch.randn(batch, 4),), memory="1GiB", quiet=True)


def test_two_budgets_in_a_row_and_a_second_process_measure_once(
    counted: list[Graph], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    within(net())
    within(net())
    assert len(counted) == 1
    monkeypatch.setattr(cost_cache, "_KNOWN", {})  # as in another process
    model = within(net())
    assert len(counted) == 1 and len(list((tmp_path / "costs").iterdir())) == 1
    model(torch.randn(6, 4)).sum().backward()


def test_what_costs_depend_on_is_measured_again(counted: list[Graph]) -> None:
    within(net())
    within(net(), batch=7)
    within(net(width=16))
    within(net().eval())
    frozen = net()
    frozen[0].requires_grad_(False)
    within(frozen)
    with torch.autocast("cpu", torch.bfloat16):
        within(net())
    assert len(counted) == 6


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": 99}', b'{"format": 1, "calls": 3}'])
def test_a_damaged_file_is_measured_again_and_replaced(
    counted: list[Graph], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    within(net())
    (file,) = (tmp_path / "costs").iterdir()
    good = file.read_bytes()
    file.write_bytes(content)
    monkeypatch.setattr(cost_cache, "_KNOWN", {})
    within(net())
    assert len(counted) == 2 and len(file.read_bytes()) > len(good) // 2


def test_a_folder_that_cannot_be_written_does_no_harm(
    counted: list[Graph], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "file"))
    within(net())
    assert len(counted) == 1


def test_no_cache_if_none_is_wanted(counted: list[Graph], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTCORE_CACHE", "off")
    within(net())
    within(net())
    assert len(counted) == 2 and not (tmp_path / "costs").exists()
