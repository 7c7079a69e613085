"""What a step is predicted to take under a given assignment, moment by moment, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.planner.memory.copy_schedule import OffloadTarget, schedule_transfers
from outcore.planner.memory.evaluate import StepModel
from outcore.program.policies import RECOMPUTE, Encode


def step(tier: OffloadTarget | None = None) -> StepModel:
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    graph = outcore.capture(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), [(2, 4, 32, 32)])
    return StepModel(graph, by_bytes(account(graph), 1e9), 0.0, tier, 1e9)


def test_what_is_made_again_needs_its_workspace_there() -> None:
    keeping = step()
    name = "5#0:out"
    plain = keeping.evaluate({name: RECOMPUTE})
    at = keeping.backward_at[plain.recomputed[name][0]]
    room = 100 * plain.peak_bytes
    keeping.rows = [(replace(b, workspace_bytes=room) if b.name == name else b, gone) for b, gone in keeping.rows]
    del keeping._kept  # what it has counted of the rows before
    found = keeping.evaluate({name: RECOMPUTE})
    # Beside the gradients that the call makes only afterwards.
    assert found.curve[at] == plain.curve[at] - keeping.made[at] + room == found.peak_bytes
    assert [b for i, b in enumerate(found.curve) if i != at] == [b for i, b in enumerate(plain.curve) if i != at]
    assert keeping.evaluate({}).peak_bytes < room


class Standardized(nn.Module):
    """Convolutions whose weights are computed, as parametrizations and Keras on torch have them."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(self.first(x).tanh(), weight, padding=1)


@pytest.mark.parametrize("trained", [True, False])
def test_a_computed_weight_is_a_weight(trained: bool) -> None:
    """If it is trained, backward needs the image too; if it is not, it needs the weight alone."""
    graph = outcore.capture(Standardized(trained), [(2, 3, 16, 16)])
    keeping = StepModel(graph, by_bytes(account(graph), 1e9), 0.0, None, 1e9)
    (call,) = (name for name in graph.calls if name.startswith("conv2d"))
    image, weight = graph.calls[call].inputs[:2]
    place = list(graph.calls).index(call)
    assert keeping.buffers[weight].savers.get(place) == "full"
    assert (place in keeping.buffers[image].savers) == trained
    kept = keeping.evaluate({})
    assert not trained or kept.curve.tolist() == keeping.base.tolist()


def test_nothing_is_made_again_from_signs_alone() -> None:
    """ReLU's output as signs is enough for ReLU's own backward, but not to run the convolution that reads it."""
    keeping = step()
    made = "3#0:out"
    (signs,) = (n for n in keeping.buffers[made].sources if keeping.buffers[n].kind == "value")
    assert keeping.evaluate({made: RECOMPUTE}).peak_bytes < 2**62
    assert keeping.evaluate({signs: Encode("sign")}).peak_bytes < 2**62
    both = keeping.evaluate({signs: Encode("sign"), made: RECOMPUTE})
    assert both.peak_bytes == 2**62 and both.time_s == float("inf")


def test_copies_leave_one_after_the_other_and_not_before_their_last_use() -> None:
    """Two buffers of equal size; the first copy is over before the second can begin, or keeps it waiting."""
    keeping = step(OffloadTarget(1e9, 1e9, least_bytes=1))
    names = ["2#0:out", "3#0:out"]
    first, second = (keeping.buffers[n] for n in names)
    ends = [sum(keeping.forward_s[: i + 1]) for i in range(len(keeping.order))]
    needs = [(b, max(b.savers)) for b in (first, second)]
    between = ends[second.last] - ends[first.last]
    for lasts in (between / 100, 0.8 * between, *(between * k / 8 for k in range(9, 40)), ends[-1]):
        rate = first.bytes / lasts
        found = {
            t.buffer: t for t in schedule_transfers(keeping, needs, {}, OffloadTarget(rate, 1e15, least_bytes=1)).moved
        }
        out = ends[first.last] + lasts
        for buffer, gone_s in ((first, out), (second, max(out, ends[second.last]) + lasts)):
            phase, position = found[buffer.name].wait
            if gone_s <= ends[-1]:
                assert phase == "forward"
                assert position == next(i for i, end in enumerate(ends) if end >= gone_s * (1 - 1e-12))
            else:
                assert phase == "backward"
            assert found[buffer.name].gone_at > keeping.forward_at[buffer.last]


@pytest.mark.parametrize("slower", [1, 7])
def test_a_slow_link_makes_the_computing_wait_by_what_is_missing(slower: int) -> None:
    """Everything moved at a rate at which the copies back alone take longer than the step."""
    keeping = step(OffloadTarget(1e9, 1e9, least_bytes=1))
    buffer = keeping.buffers["5#0:out"]
    lasts = slower * keeping.plain_s
    ends = [sum(keeping.forward_s[: i + 1]) for i in range(len(keeping.order))]
    need = max(buffer.savers)
    moved = schedule_transfers(keeping, [(buffer, need)], {}, OffloadTarget(buffer.bytes / lasts, buffer.bytes / lasts))
    begins = ends[-1] + sum(keeping.backward_s[need + 1 :])
    assert moved.stall_s == pytest.approx(ends[buffer.last] + 2 * lasts - begins)
