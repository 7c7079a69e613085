import json
from pathlib import Path

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.costs import CallCost, Costs, total
from outcore.cost.measured.saved_bytes import account
from outcore.cost.saved import Saved
from outcore.machine.clock import TimedRuns


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


@pytest.fixture(scope="module")
def costs() -> Costs:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Residual(), Residual(), nn.Flatten(), nn.Linear(4 * 64, 5))
    return account(outcore.capture(model, [(2, 3, 8, 8)]))


def test_totals_of_blocks_add_up_to_the_network(costs: Costs) -> None:
    whole = costs.total()
    for parts in (costs.by_depth(1), costs.by_depth(3), costs.by_kind()):
        assert sum(t.flops_forward for t in parts.values()) == whole.flops_forward
        assert sum(t.parameter_bytes for t in parts.values()) == whole.parameter_bytes
        assert sum(t.calls for t in parts.values()) == whole.calls
    assert list(costs.by_depth(1)) == ["0", "1", "2", "3", "4"]
    assert "1.body" in costs.by_depth(2)
    assert costs.by_kind()["Conv2d"].calls == 5


def test_flops_are_those_of_the_formula(costs: Costs) -> None:
    pixels, kernel = 2 * 8 * 8, 9
    assert costs["0#0"].flops_forward == 2 * pixels * 4 * 3 * kernel
    assert costs["0#0"].flops_backward == 2 * pixels * 4 * 3 * kernel  # the image needs no gradient
    assert costs["1.body.0#0"].flops_backward == 2 * 2 * pixels * 4 * 4 * kernel
    assert costs["4#0"].flops_forward == 2 * 2 * 256 * 5


def test_a_grouped_convolution_has_the_work_of_its_groups() -> None:
    def of(inputs: int, outputs: int, groups: int) -> tuple[int, int]:
        layers = nn.Sequential(nn.Conv2d(inputs, inputs, 1), nn.Conv2d(inputs, outputs, 3, groups=groups))
        cost = account(outcore.capture(layers, [(2, inputs, 9, 9)]), "cpu")["1#0"]
        return cost.flops_forward, cost.flops_backward

    for inputs, outputs, groups in ((8, 16, 4), (6, 6, 6)):
        forward, backward = of(inputs // groups, outputs // groups, 1)
        assert of(inputs, outputs, groups) == (groups * forward, groups * backward)


def test_memory_kept_by_two_calls_is_counted_once() -> None:
    rows = [
        CallCost("a", "a", "ReLU", saved=(Saved("v", "value", 100),)),
        CallCost("b", "b", "Conv2d", saved=(Saved("v", "value", 100), Saved("w", "parameter", 7))),
        CallCost("c", "c", "Pool", saved=(Saved("c~0", "derived", 8),)),
    ]
    assert total(rows).saved_bytes == 108
    assert total(rows[:1]).saved_bytes == 100


def test_costs_survive_a_file(costs: Costs, tmp_path: Path) -> None:
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    timed = CallCost("a", "a", "ReLU", forward=TimedRuns.of([1.0, 2.0]), time_source="measured")
    whole = Costs("m", "f", "cpu", "cpu", {"a": timed})
    assert Costs.from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_another_format_and_unknown_names_are_refused(costs: Costs) -> None:
    with pytest.raises(outcore.OutcoreError, match="format is 99"):
        Costs.from_json({"format": 99})
    with pytest.raises(outcore.OutcoreError, match="no call 'nothing'"):
        costs["nothing"]
    with pytest.raises(outcore.OutcoreError, match="block '7'"):
        costs.total("7")


def test_costs_print_a_line_per_kind_and_say_what_has_no_time(costs: Costs) -> None:
    text = str(costs)
    assert "Conv2d" in text and "kept for backward" in text
    assert f"{len(costs.calls)} calls have no time" in text
