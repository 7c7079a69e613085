"""outcore.within: one call, the loop unchanged, the same gradients, the peak below the number given."""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.errors import OutcoreError, PlanError
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.one_device import steps
from outcore.program.policies import policies_to_json

SIDE = 48


def network(blocks: int = 6, width: int = 8) -> nn.Module:
    torch.manual_seed(0)

    def block(i: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(i, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )

    layers = [block(3), *(block(width) for _ in range(blocks - 1))]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))


def images(batch: int = 4, side: int = SIDE) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


def budgeted(model: nn.Module, share: float, x: torch.Tensor | None = None) -> nn.Module:
    """The model within a share of what plain training takes."""
    x = images() if x is None else x
    graph = outcore.capture(model, (x,))
    costs = by_bytes(account(graph), 1e9)
    outcore.within(model, (x,), memory=None, optimizer=0.0, costs=costs, quiet=True)
    plain = outcore.memory_plan(model).plain_bytes
    return outcore.within(model, (x,), memory=int(share * plain), optimizer=0.0, costs=costs, quiet=True)


def step(model: nn.Module, x: torch.Tensor, seed: int = 3) -> torch.Tensor:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(x).square().sum()
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = [*zip(a.parameters(), b.parameters(), strict=True)]
    buffers = [*zip(a.buffers(), b.buffers(), strict=True)]
    return all(torch.equal(p.grad, q.grad) for p, q in pairs) and all(torch.equal(x, y) for x, y in buffers)  # type: ignore[arg-type]


def managed(model: nn.Module) -> ManagedForward:
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward)
    return managed_forward


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6, 0.45])
def test_gradients_of_plain_training_within_the_budget(share: float) -> None:
    model, x = network(), images()
    duplicate = copy.deepcopy(model)
    budgeted(model, share)
    plan = outcore.memory_plan(model)
    for seed in range(3):
        assert torch.equal(step(model, x, seed), step(duplicate, x, seed))
        assert same(model, duplicate)
    model.zero_grad()
    with LiveBytes([*model.parameters(), *model.buffers(), x]) as live:
        model(x).square().sum().backward()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    assert plan.budget_bytes is not None
    assert live.peak + held <= 1.01 * plan.budget_bytes
    assert (live.peak + held) == pytest.approx(plan.peak_bytes, rel=0.05)


def test_the_model_stays_what_it_was() -> None:
    model = network()
    names, kind = list(model.state_dict()), type(model)
    assert budgeted(model, 0.6) is model
    assert type(model) is kind and list(model.state_dict()) == names
    assert model.train().training and not model.eval().training
    outcore.release(model)
    assert "forward" not in model.__dict__


def test_a_whole_training_is_the_same() -> None:
    model = network()
    duplicate = copy.deepcopy(model)
    budgeted(model, 0.6)
    losses = []
    for net in (model, duplicate):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        torch.manual_seed(5)
        history = []
        for i in range(4):
            for part in images(4).split(2 + i % 2):  # accumulated over parts of unequal size
                loss = net(part).square().mean()
                loss.backward()
                history.append(loss.item())
            clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(history)
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), duplicate.parameters(), strict=True))


def test_a_smaller_and_a_larger_batch() -> None:
    model = network()
    duplicate = copy.deepcopy(model)
    budgeted(model, 0.7)
    for x in (images(3), images(1, 40)):
        step(model, x), step(duplicate, x)
        assert same(model, duplicate)
    assert len(managed(model).admitted) == 1  # the plan of a larger batch serves them
    larger = images(16)
    with pytest.warns(UserWarning, match="needs .* where the budget is"):
        step(model, larger)
    step(duplicate, larger)
    assert same(model, duplicate)


class _Deciding(nn.Module):
    """A branch on a number and a size that is computed: neither is known without the image."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.cell, self.head = what, nn.GRUCell(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 16)
        for step in x.unbind(1):
            h = self.cell(step, h)
            if self.what == "branch":
                h = h * 0.9 if float(h.detach().mean()) > 0.02 else h
            else:
                h = h + h[h.sum(1) > 0].mean()
        return self.head(h)


@pytest.mark.parametrize("what", ["branch", "size"])
def test_a_model_that_decides_by_its_numbers_is_refused_by_a_sentence_too(what: str) -> None:
    torch.manual_seed(0)
    model, x = _Deciding(what), torch.randn(3, 12, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=1)  # its state stays, so that something is refused
    with pytest.raises(PlanError, match="a training step cannot be done within") as refused:
        outcore.within(model, (x,), memory="10%", optimizer=optimizer, quiet=True)
    assert refused.value.least_bytes is not None and "forward" not in model.__dict__


def test_a_budget_too_small_is_refused_with_one_that_works() -> None:
    model, x = network(), images()
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    with pytest.raises(PlanError, match=r'give memory="\d+MiB" or more') as refused:
        outcore.within(model, (x,), memory="100KiB", optimizer=0.0, costs=costs, quiet=True)
    assert "forward" not in model.__dict__
    least = str(refused.value).partition('memory="')[2].partition('"')[0]
    del refused  # it holds the frames it came from
    outcore.within(model, (x,), memory=least, optimizer=0.0, costs=costs, quiet=True)
    step(model, x)


def test_the_smallest_budget_has_room_for_its_own_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps.__dict__["_MARGIN"], "cpu", 0.1)
    model, x = network(), images()
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    with pytest.raises(PlanError) as refused:
        outcore.within(model, (x,), memory=1000, optimizer=0.0, costs=costs, stream=False, quiet=True)
    least = refused.value.least_bytes
    del refused
    assert least is not None
    outcore.within(model, (x,), memory=least, optimizer=0.0, costs=costs, stream=False, quiet=True)
    assert 0.98 * least <= outcore.memory_plan(model).peak_bytes <= least
    with pytest.raises(PlanError):
        outcore.within(model, (x,), memory=int(0.97 * least), optimizer=0.0, costs=costs, stream=False, quiet=True)


def test_a_plan_by_hand(tmp_path: Path) -> None:
    model, x = network(), images()
    duplicate = copy.deepcopy(model)
    budgeted(model, 0.6)
    plan = outcore.memory_plan(model).document()
    plan.save(tmp_path / "plan.json")
    again = outcore.Plan.load(tmp_path / "plan.json")
    outcore.release(model)
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    outcore.within(model, (x,), memory=None, plan=again, costs=costs, quiet=True)
    assert policies_to_json(outcore.memory_plan(model).policy) == dict(again.policy)
    step(model, x), step(duplicate, x)
    assert same(model, duplicate)


def test_nothing_leaks_over_many_steps() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x = torch.randn(512, 64)
    graph = outcore.capture(model, (x,))
    policy = {"0.1#0:out": "offload", "1.1#0:out": "recompute", "1.0#0:out": "recompute", "2.1#0:out": "offload"}
    costs = by_bytes(account(graph), 1e9)
    outcore.within(model, (x,), memory=None, plan=policy, costs=costs, quiet=True)
    tier = managed(model).tier
    assert tier is not None
    free = tier.arena.free_bytes  # type: ignore[attr-defined]
    with LiveBytes([*model.parameters(), x]) as live:
        levels = []
        for _ in range(200):
            model.zero_grad()
            model(x).sum().backward()
            levels.append(live.live)
    assert levels[5] == levels[-1]
    assert tier.arena.free_bytes == free  # type: ignore[attr-defined]


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(512, 64)
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    with pytest.raises(OutcoreError, match="OUTCORE_SCRATCH"):
        outcore.within(model, (x,), memory=None, plan={"1#0:out": "offload"}, costs=costs, quiet=True)


def test_what_was_chosen_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = network(), images()
    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    plain = outcore.memory_plan(outcore.within(model, (x,), memory=None, costs=costs, quiet=True)).plain_bytes
    outcore.within(model, (x,), memory=int(0.7 * plain), costs=costs)
    said = capsys.readouterr().err
    assert "within" in said and "of plain" in said and "Adam" in said


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), lambda: nn.Sequential(nn.Linear(3, 3))])
def test_a_model_of_one_layer(make: Callable[[], nn.Module]) -> None:
    model = make()
    outcore.within(model, [(2, 3)], memory=None, quiet=True)
    model(torch.randn(2, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_forward_still_says_which_arguments_it_takes() -> None:
    class Net(nn.Linear):
        def forward(self, pixels: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(pixels) * scale

    model = outcore.within(Net(2, 2), [(3, 2)], memory=None, quiet=True)
    assert list(inspect.signature(model.forward).parameters) == ["pixels", "scale"]


@pytest.mark.parametrize("classes", [2, 64])
def test_the_loss_counts_where_it_is_held(classes: int) -> None:
    torch.manual_seed(0)
    body = [m for _ in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())]
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), *body, nn.Conv2d(8, classes, 1)), images(2, 64)

    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    costs = by_bytes(account(outcore.capture(model, (x,))), 1e9)
    outcore.within(model, (x,), memory=None, loss=loss, optimizer=0.0, costs=costs, quiet=True)
    predicted = outcore.memory_plan(model).plain_bytes
    outcore.release(model)
    here = [*model.parameters(), x]
    with LiveBytes(here) as live:
        loss(model(x)).backward()
    measured = live.peak + sum(t.nbytes for t in here)
    assert 0.95 * predicted <= measured <= 1.001 * predicted


def test_a_model_that_runs_otherwise_than_planned_is_planned_again() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.late = network(), network(), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(x) if self.late else self.first(x)

    model = Switched()
    duplicate = copy.deepcopy(model)
    budgeted(model, 0.6)
    assert all(name.startswith("first.") for name in outcore.memory_plan(model).policy)
    model.late = duplicate.late = True
    for seed in range(6):
        assert torch.equal(step(model, images(), seed), step(duplicate, images(), seed))
    plan = outcore.memory_plan(model)
    assert plan.policy and all(name.startswith("second.") for name in plan.policy)
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        step(model, images(), 9)
    held = plan.keeping.plain.moments[0].bytes
    assert live.peak <= plan.peak_bytes - held.weights


def test_a_share_of_what_plain_training_takes() -> None:
    model = network()
    costs = by_bytes(account(outcore.capture(model, (images(),))), 1e9)
    outcore.within(model, (images(),), memory="70%", optimizer=0.0, costs=costs, quiet=True)
    plan = outcore.memory_plan(model)
    assert plan.peak_bytes <= 0.7 * plan.plain_bytes
    with pytest.raises(OutcoreError, match='memory="50%"'):
        outcore.within(network(), (images(),), memory=0.5, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(OutcoreError, match='memory="50%"'):
        outcore.within(network(), (images(),), memory="half%", quiet=True)
    with pytest.raises(OutcoreError, match="wrap the result"):
        outcore.within(_ddp(network()), (images(),), memory="50%", quiet=True)


def _ddp(model: nn.Module) -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    return wrapped


def test_losses_of_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.other = network(), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            y = self.body(x)
            return {"logits": y, "more": (self.other(y), [y.mean()])}

    model, target = Two(), torch.randint(4, (4,))

    def loss(output: dict[str, Any]) -> torch.Tensor:
        return nn.functional.cross_entropy(output["logits"], target) + output["more"][0].sum() + output["more"][1][0]

    costs = by_bytes(account(outcore.capture(model, (images(),))), 1e9)
    outcore.within(model, (images(),), memory="80%", optimizer=0.0, costs=costs, loss=loss, quiet=True)
    loss(model(images())).backward()
    assert all(p.grad is not None for p in model.parameters())
