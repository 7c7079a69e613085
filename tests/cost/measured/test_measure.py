from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured.bench import CallBench
from outcore.cost.measured.measure import measure
from tests.foreign.sample import quarter
from tests.foreign.zoo import QUICK, Foreign


class Everything(nn.Module):
    """In-place calls, calls without gradient, opaque ones, several outputs and none, indices of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True)
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        with torch.no_grad():
            self.steps.add_(1)
            scale = x.abs().amax().clamp(min=1.0)
        x, (h, c) = self.lstm(x / scale)
        x = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = checkpoint(self.inside, x, use_reentrant=False)
        values, places = x.topk(2, dim=-1)
        x = x + x.gather(-1, places).sum(-1, keepdim=True) + values.mean()
        x[:, 0] = h[0] * c[0]
        with torch.no_grad():
            torch.multinomial(x.softmax(-1)[:, 0], 2)  # takes no negative numbers
        first = x[torch.arange(x.shape[0]), target]
        return F.cross_entropy(F.dropout(first, 0.1), target)


def everything() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Everything(), (torch.randint(11, (4, 6)), torch.randint(4, (4,)))


def quick(model: nn.Module, args: Any, **options: Any) -> Costs:
    return measure(outcore.capture(model, args), "cpu", **{"time_limit_s": 30.0, "runs": 3, **options})


def test_every_kind_of_call_is_measured() -> None:
    costs = quick(*everything(), time_limit_s=30.0, runs=3)
    assert costs.unmeasured == {}
    assert {c.time_source for c in costs.calls.values()} == {"measured"}
    for name in ("embedding#0", "lstm#0", "conv#0", "cross_entropy()#0"):
        forward, backward = costs[name].forward, costs[name].backward
        assert forward is not None and backward is not None
        assert 0 < forward.min_s <= forward.median_s <= forward.max_s
    assert costs["amax()#0"].backward is None


def test_the_model_its_buffers_and_the_random_numbers_are_left_alone() -> None:
    model, args = everything()
    graph = outcore.capture(model, args)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    measure(graph, "cpu", runs=2)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


class _BackwardAgain(torch.autograd.Function):
    """Checkpointing as people write it: backward runs the part again, and a backward inside of it."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.run(x), gradient)
        return None, x.grad


WAYS = {
    "checkpoint": lambda part, x: checkpoint(part, x, use_reentrant=False),
    "reentrant": lambda part, x: checkpoint(part, x, use_reentrant=True),
    "own": _BackwardAgain.apply,
}


class Parted(nn.Module):
    """A part with statistics, checkpointed in somebody's way; a slice, so a module that is none of the model's."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first = way, nn.Conv2d(3, 4, 3)
        self.part = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](self.part[:3], self.first(x)).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("held", [False, True], ids=["", "with gradients"])
def test_parts_that_run_again_in_backward_leave_statistics_and_gradients_alone(way: str, held: bool) -> None:
    model, x = Parted(way), torch.randn(2, 3, 8, 8)
    for p in model.parameters() if held else ():
        p.grad = torch.full_like(p, 0.5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    measure(outcore.capture(model, (x,)), "cpu", runs=3)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for p in model.parameters():
        assert (p.grad is not None and bool((p.grad == 0.5).all())) if held else p.grad is None


def test_calls_that_are_alike_are_measured_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(4)))
    measured: list[str] = []
    costs = quick(model, [(1, 3, 8, 8)], progress=lambda done, of, name: measured.append(name))
    # The first convolution and ReLU differ from the rest in that the image needs no gradient.
    assert len([name for name in measured if name]) == 3
    assert costs["2.0#0"].forward == costs["3.0#0"].forward


def test_a_call_that_is_too_large_is_scaled_from_a_smaller_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    costs = quick(model, [(1, 3, 4096, 4096)], memory_limit_bytes=4 * 2**20)
    assert {c.time_source for c in costs.calls.values()} == {"scaled"}
    assert costs["0#0"].flops_forward == 2 * 8 * 3 * 9 * 4096**2
    assert costs["0#0"].forward is not None and costs["0#0"].forward.median_s > 0.01


def test_a_batch_is_made_smaller_before_an_image() -> None:
    costs = quick(nn.Sequential(nn.Linear(64, 64), nn.GELU()), [(4096, 64)], memory_limit_bytes=2**20)
    assert {c.time_source for c in costs.calls.values()} == {"scaled"}


def test_a_call_that_fits_nowhere_has_a_reason() -> None:
    costs = quick(nn.Sequential(nn.Linear(64, 64)), [(2, 64)], memory_limit_bytes=10)
    assert costs.unmeasured and "of 10" in costs.unmeasured["0#0"]


def test_when_the_time_is_up_what_was_measured_is_kept() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4), nn.Tanh())
    costs = quick(model, [(64, 512)], time_limit_s=0.0)
    assert len(costs.unmeasured) == 4
    assert "time limit of 0 s" in costs.unmeasured["0#0"]
    assert costs["0#0"].saved  # bytes need no time


def test_when_the_time_is_up_the_memory_of_the_rest_is_still_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CallBench, "memory_only", lambda self, name: replace(self.costs.calls[name], workspace_forward_bytes=7)
    )
    costs = measure(outcore.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), [(2, 4)]), time_limit_s=0)
    assert len(costs.unmeasured) == 3
    assert all(cost.workspace_forward_bytes == 7 for cost in costs.calls.values())


def test_an_interruption_keeps_what_was_measured() -> None:
    def interrupt(done: int, of: int, name: str) -> None:
        if done == 1 and name:
            raise KeyboardInterrupt

    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    costs = quick(model, [(64, 512)], progress=interrupt)
    assert len(costs.unmeasured) == 2
    assert costs["0#0"].forward is not None  # the largest comes first
    assert any("interrupted after 1 of 3" in note for note in costs.notes)


def test_a_model_without_weights_in_memory_is_measured() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(256, 2)
        )
    costs = quick(model, [(2, 3, 10, 10)])
    assert costs.unmeasured == {}
    assert all(p.is_meta for p in model.parameters())


def test_evaluation_has_no_backward() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).eval().requires_grad_(False)
    costs = quick(model, [(2, 3, 10, 10)])
    assert costs.unmeasured == {}
    assert all(c.backward is None and not c.saved for c in costs.calls.values())


def test_a_gpu_that_is_not_here_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(outcore.OutcoreError, match="no GPU here"):
        quick(nn.Sequential(nn.ReLU()), [(2, 2)]) and measure(outcore.capture(nn.ReLU(), [(2, 2)]), "cuda")


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("foreign", quarter(QUICK), ids=str)
def test_foreign_models_are_measured_call_by_call(foreign: Foreign) -> None:
    torch.manual_seed(0)
    model = foreign.build().train()
    args, kwargs = foreign.inputs(2)
    costs = measure(outcore.capture(model, args, kwargs), "cpu", time_limit_s=60.0)
    assert costs.unmeasured == {}
    assert costs.total().saved_bytes > 0
