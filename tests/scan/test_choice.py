"""Which backward pass is taken, and that it is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outcore.errors import ScanError
from outcore.scan import GRU, Options, choices
from outcore.scan.choice import RETRY, Choices, ScanTiming
from outcore.scan.report import SolveOutcome


@pytest.fixture(autouse=True)
def fresh() -> None:
    choices.clear()


def test_the_measured_winner_is_taken_and_measured_once() -> None:
    module = GRU(3, 4)
    x = torch.randn(100, 2, 3)
    module(x)
    (key,) = choices.timings
    assert "gru" in key
    assert "steps 64" in key
    cases = (
        (ScanTiming(1.0, 1.5, 2.0), "scan"),
        (ScanTiming(2.0, 3.0, 1.0), "torch"),
        (ScanTiming(1.9, 1.0, 2.0), "torch"),
    )
    for timing, winner in cases:
        choices.timings[key] = timing
        module(x)[0].sum().backward()
        assert module.report is not None
        assert module.report.backward == winner
        assert "measured scan" in module.report.reason


def test_a_layer_that_comes_to_need_slow_products_goes_back_to_torch_and_tries_again_later() -> None:
    module = GRU(3, 4)
    x = torch.randn(100, 2, 3)
    module(x)
    (key,) = choices.timings
    choices.timings[key] = ScanTiming(1.0, 3.0, 2.0)
    module(x)[0].sum().backward()
    assert module.report is not None
    assert module.report.backward == "scan"
    module.report.layers[0].outcomes[:] = [SolveOutcome("products", 2)]
    module(x)
    assert (module.report.backward, "no longer fade" in module.report.reason) == ("torch", True)
    calls = 0
    while module.report.backward == "torch":
        module(x)
        calls += 1
    assert calls == RETRY - 1


def test_measuring_leaves_random_numbers_gradients_and_parameters_alone() -> None:
    module = GRU(3, 4, num_layers=2, bidirectional=True)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    x = torch.randn(100, 2, 3)
    state = torch.random.get_rng_state()
    module(x)
    assert choices.timings
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, p in module.named_parameters():
        assert p.grad is None
        assert torch.equal(p, before[name])


def test_short_sequences_are_not_measured() -> None:
    module = GRU(3, 4)
    module(torch.randn(31, 2, 3))
    assert not choices.timings
    assert module.report is not None
    assert "31 steps" in module.report.reason


def test_what_was_asked_for_is_not_measured() -> None:
    for wanted in ("scan", "torch"):
        module = GRU(3, 4, options=Options(backward=wanted))  # type: ignore[arg-type]
        module(torch.randn(100, 2, 3))
        assert module.report is not None
        assert (module.report.backward, module.report.reason) == (wanted, "asked for")
    assert not choices.timings


def test_timings_survive_a_file(tmp_path: Path) -> None:
    first = Choices()
    first.timings["a gpu, gru"] = ScanTiming(0.5, 1.0, 1.5)
    first.save(tmp_path / "scan.json")
    second = Choices()
    second.load(tmp_path / "scan.json")
    assert second.timings == first.timings


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scan.json").write_text('{"a": 1}')
    with pytest.raises(ScanError, match=r"scan\.json: a is 1; expected an object"):
        Choices().load(tmp_path / "scan.json")
