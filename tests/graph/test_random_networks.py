"""Random networks: branches, skips, in-place operations, reuse; captured and replayed equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import outcore
from tests.graph.replay import check

CHANNELS = 3
LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    lambda: nn.BatchNorm2d(CHANNELS),
    lambda: nn.Dropout2d(0.3),
    lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.GELU()),
    lambda: nn.GroupNorm(1, CHANNELS),
)
FUNCTIONS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a + b,
    lambda a, b: torch.cat((a, b), 1)[:, ::2],
    lambda a, b: a * torch.sigmoid(b),
    lambda a, b: F.relu(a.clone(), inplace=True) - b,
    lambda a, b: (a.clone().add_(b)).tanh_(),
    lambda a, b: F.dropout(a, 0.2) + b.flip(2),
    lambda a, b: torch.stack((a, b)).amax(0),
    lambda a, b: a.transpose(2, 3).contiguous() + b.detach(),
)


class Random(nn.Module):
    """A chain of choices over the values made so far."""

    def __init__(self, program: list[tuple[bool, int, int, int]]) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList(make() for make in LAYERS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [x]
        for is_layer, which, first, second in self.program:
            a, b = values[first % len(values)], values[second % len(values)]
            made: Any = self.layers[which % len(LAYERS)](a) if is_layer else FUNCTIONS[which % len(FUNCTIONS)](a, b)
            if which % 3 == 0 and not is_layer:
                made = made.clone()
                made[:, 0] = b[:, 1]
                made += 1
            values.append(made)
        return values[-1], values[len(values) // 2]


programs = st.lists(
    st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=12
)
relaxed = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)


@relaxed
@given(programs, st.booleans())
def test_any_network_replays_bitwise(program: list[tuple[bool, int, int, int]], training: bool) -> None:
    torch.manual_seed(1)
    check(Random(program).train(training), (torch.randn(2, CHANNELS, 6, 6),))


@relaxed
@given(programs, st.integers(0, 100))
def test_any_cut_gives_two_parts_that_make_the_whole(program: list[tuple[bool, int, int, int]], place: int) -> None:
    torch.manual_seed(1)
    net, x = Random(program).eval(), torch.randn(2, CHANNELS, 6, 6)
    graph = outcore.capture(net, (x,))
    cuts = graph.cuts()
    if not cuts:
        return
    cut = cuts[place % len(cuts)]
    names = list(graph.calls)
    border = names.index(cut.before)
    torch.manual_seed(2)
    try:
        parts = [graph.subgraph(names[:border]), graph.subgraph(names[border:])]
    except outcore.OutcoreError as error:
        assert "writes into the memory" in str(error)
        return
    values: dict[str, Tensor] = {"x": x}
    for part in parts:
        values |= part(values)
    assert set(parts[1].inputs) <= {*cut.values, "x"}
    torch.manual_seed(2)
    expected = net(x)
    assert torch.equal(values[graph.outputs[0]], expected[0])
