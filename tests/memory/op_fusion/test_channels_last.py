"""Images with their channels last inside a network: the same training up to rounding, nothing of it seen outside."""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import outcore
from outcore.cost.costs import Costs
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.errors import PlanError
from outcore.graph import Graph
from outcore.graph.memory_format import ChannelsLast, channels_last, recorded
from outcore.machine.clock import TimedRuns
from outcore.memory.op_fusion import channels_last as order_choice
from outcore.memory.saved_tensors.managed_forward import ManagedForward
from outcore.one_device import steps
from outcore.planner.memory.plan import MemoryPlan
from outcore.verification import verify_job

BOUND = 1e-10
"""Of the largest gradient, in float64."""


class Residual(nn.Module):
    """Convolutions, norms, a sum, a pool, a head."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.inner = nn.Sequential(
            nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(x + self.inner(x))
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """An image for an image, with a skip and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 6, 4, 2, 1), nn.ConvTranspose2d(6, 4, 2, 2)
        self.norm, self.last = nn.BatchNorm2d(7), nn.Conv2d(7, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        there = self.down(x)
        joined = torch.cat([x, self.up(F.silu(there))], 1)
        return {"mask": self.last(self.norm(joined)), "inner": there.permute(0, 2, 3, 1)}


class Volume(nn.Sequential):
    """Three dimensions, one channel."""

    def __init__(self) -> None:
        super().__init__(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 2, 1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (4, 3, 16, 16)),
    "one channel": (lambda: Residual(1), (2, 1, 16, 16)),
    "one image": (Residual, (1, 3, 16, 16)),
    "dense": (Dense, (2, 3, 12, 12)),
    "volume": (Volume, (2, 1, 8, 8, 8)),
}


def total(output: Any) -> torch.Tensor:
    values = output.values() if isinstance(output, dict) else [output]
    return torch.stack([v.square().mean() for v in values]).sum()


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    return build().double(), torch.randn(shape, dtype=torch.float64)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The order is a question on a CPU too, and the answer is to turn images, however long that takes."""
    monkeypatch.setattr(order_choice, "_DEVICES", {"cpu"})
    monkeypatch.setattr(order_choice, "_CLEARLY", float("inf"))
    yield


def turned(model: nn.Module, images: torch.Tensor, memory: int | None = None, **options: Any) -> MemoryPlan:
    """A model under `within`, its images turned."""
    options = {"optimizer": 0.0, "quiet": True, "measure_s": 0.4} | options
    outcore.within(model, (images,), memory=memory, exact="reassociated", **options)
    plan = outcore.memory_plan(model)
    assert isinstance(plan, MemoryPlan)
    return plan


def agrees(model: nn.Module, plain: nn.Module, images: torch.Tensor) -> None:
    """One step of both: loss, every gradient, every buffer; outputs in the same order of memory."""
    outputs = [m(images) for m in (model, plain)]
    pairs = zip(*(o.values() if isinstance(o, dict) else [o] for o in outputs), strict=True)
    assert all(a.stride() == b.stride() and a.shape == b.shape for a, b in pairs)
    losses = [total(o) for o in outputs]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=BOUND, atol=0)
    gradients = [[p.grad for p in m.parameters()] for m in (model, plain)]
    largest = max(g.abs().max().item() for g in gradients[1] if g is not None)
    for (name, parameter), a, b in zip(plain.named_parameters(), *gradients, strict=True):
        assert a is not None and b is not None
        assert (a - b).abs().max() <= BOUND * largest, name
        sized = [i for i, n in enumerate(parameter.shape) if n > 1]
        assert [a.stride(i) for i in sized] == [parameter.stride(i) for i in sized], name
    for (name, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=BOUND, atol=BOUND, msg=name)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "volume"])
def test_every_convolution_has_its_channels_last(name: str) -> None:
    model, images = made(name)
    graph = outcore.capture(model, (images,))
    order = channels_last(graph)
    assert isinstance(order, ChannelsLast)
    other = recorded(model, (images,), None, order)
    assert "forward" not in model.__dict__
    convolutions = [c for c in other.calls.values() if "Conv" in other.blocks[c.block].type]
    assert convolutions and all(other.values[c.outputs[0]].stride[1] == 1 for c in convolutions)
    ours = {"to()", "contiguous()", "permute()"}
    names = [[n for n, call in g.calls.items() if call.block not in ours] for g in (graph, other)]
    assert names[0] == names[1]
    assert [other.values[o].stride for o in other.outputs] == [graph.values[o].stride for o in graph.outputs]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("share", [None, 0.7])
@pytest.mark.usefixtures("everywhere")
def test_trains_as_plain_does(name: str, share: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_choice, "propose", _refusing(lambda graph: "to()#0" not in graph.calls))
    model, images = made(name)
    plain = copy.deepcopy(model)
    plan = turned(model, images)
    if share is not None:
        budget = int(share * plan.plain_bytes)
        try:
            plan = turned(model, images, budget, stream=False)
        except PlanError as refused:
            assert refused.least_bytes is not None
            plan = turned(model, images, refused.least_bytes + 64, stream=False)
        assert plan.policy
    assert plan.order.inside is not None and "memory order: channels last" in plan.explain()
    for _ in range(2):
        agrees(model, plain, images)


@pytest.mark.usefixtures("everywhere")
def test_nothing_of_it_is_seen_outside() -> None:
    model, images = made("residual")
    strides = {n: t.stride() for n, t in model.state_dict().items()}
    identities = [id(p) for p in model.parameters()]
    turned(model, images)
    assert {n: t.stride() for n, t in model.state_dict().items()} == strides
    assert [id(p) for p in model.parameters()] == identities and type(model) is Residual
    outcore.release(model)
    assert "forward" not in model.__dict__
    assert {n: t.stride() for n, t in model.state_dict().items()} == strides
    agrees(model, copy.deepcopy(model), images)


@pytest.mark.usefixtures("everywhere")
def test_optimizers_smaller_batches_and_evaluation() -> None:
    model, images = made("residual")
    plain = copy.deepcopy(model)
    turned(model, images)
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (model, plain)]
    for batch in (images, images[:3], images[1:]):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            total(m(batch)).backward()
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    managed_forward = model.__dict__["forward"]
    assert isinstance(managed_forward, ManagedForward) and len(managed_forward.admitted) == 2
    assert all(e is not None and e.plan.order.inside is not None for e in managed_forward.admitted.values())
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(images), plain(images))
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(model(images), plain(images))


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_turn_their_images_too(how: Callable[[nn.Module], nn.Module]) -> None:
    model, images = made("residual")
    plain = copy.deepcopy(model)
    turned(model, images)
    other = how(model)
    agrees(other, plain, images)
    assert outcore.memory_plan(other).order.inside is not None  # type: ignore[union-attr]


@pytest.mark.usefixtures("everywhere")
def test_gradients_of_the_images_come_back_in_their_order() -> None:
    model, images = made("residual")
    plain = copy.deepcopy(model)
    mine, theirs = images.clone().requires_grad_(), images.clone().requires_grad_()
    turned(model, mine)
    total(model(mine)).backward()
    total(plain(theirs)).backward()
    assert mine.grad is not None and theirs.grad is not None and mine.grad.stride() == theirs.grad.stride()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("everywhere")
def test_a_plan_names_the_order_and_brings_it_along(tmp_path: Path) -> None:
    model, images = made("dense")
    plain = copy.deepcopy(model)
    document = turned(model, images).document()
    assert document.memory_order == "channels_last" and document.exactness == "reassociated"
    document.save(tmp_path / "plan.json")
    outcore.release(model)
    again = outcore.within(
        model, (images,), memory=None, plan=outcore.Plan.load(tmp_path / "plan.json"), optimizer=0.0, quiet=True
    )
    plan = outcore.memory_plan(again)
    assert isinstance(plan, MemoryPlan) and plan.order.inside is not None and "by the plan" in plan.explain()
    agrees(again, plain, images)


@pytest.mark.usefixtures("everywhere")
def test_verification_takes_a_plan_with_an_order() -> None:
    model, images = made("residual")
    plan = turned(model, images).document()
    job = outcore.Job(lambda: made("residual")[0], lambda size: (made("residual")[1], None))
    verdict = verify_job(job, plan=plan, device="cpu")
    assert verdict.agrees and "re-associated" in verdict.grade


@pytest.mark.usefixtures("everywhere")
def test_data_parallel_and_sharded_around(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model, images = made("residual")
        plain = copy.deepcopy(model)
        turned(model, images)
        wrapped = nn.parallel.DistributedDataParallel(model)
        agrees(wrapped, nn.parallel.DistributedDataParallel(plain), images)
        model, images = made("residual")
        plain = copy.deepcopy(model)
        turned(model, images)
        fully_shard(model)
        for m in (model, plain):
            total(m(images)).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-9, atol=1e-12)  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


def timed(graph: Graph, factor: float) -> Costs:
    """Costs in which every call takes so long."""
    costs = by_bytes(account(graph), 1e9)
    timing = TimedRuns.of([factor])
    calls = {
        n: replace(
            c,
            forward=timing,
            backward=timing if c.backward is not None else None,
            workspace_forward_bytes=int(factor * 2**20),
        )
        for n, c in costs.calls.items()
    }
    return replace(costs, calls=calls)


@pytest.mark.parametrize(("given_s", "turned_s", "chosen"), [(1.0, 0.5, True), (1.0, 1.0, False), (0.5, 1.0, False)])
def test_the_faster_order_is_taken(
    monkeypatch: pytest.MonkeyPatch, given_s: float, turned_s: float, chosen: bool
) -> None:
    monkeypatch.setattr(order_choice, "_DEVICES", {"cpu"})
    monkeypatch.setattr(
        steps,
        "measured",
        lambda graph, **_: timed(graph, turned_s if "to()#0" in graph.calls else given_s),
    )
    model, images = made("residual")
    plain = copy.deepcopy(model)
    plan = turned(model, images)
    assert (plan.order.inside is not None) == chosen
    lines = [line for line in plan.explain().splitlines() if "memory order" in line]
    if chosen:
        assert len(lines) == 1 and "channels last (0." in lines[0] and "512.0 KiB less workspace" in lines[0]
        assert 0.4 < plan.slowdown < 0.6  # of plain training as images come
    else:
        assert len(lines) == 1 and "as given (with channels last the step would take" in lines[0]
    agrees(model, plain, images)


def test_the_other_order_is_taken_where_it_alone_meets_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_choice, "_DEVICES", {"cpu"})
    monkeypatch.setattr(
        steps,
        "measured",
        lambda graph, **_: timed(graph, 1.0 if "to()#0" in graph.calls else 0.9),
    )
    monkeypatch.setattr(order_choice, "propose", _refusing(lambda graph: "to()#0" not in graph.calls))
    model, images = made("residual")
    plan = turned(model, images)
    assert plan.order.inside is not None and "as given, no plan meets the budget" in plan.explain()
    monkeypatch.setattr(order_choice, "propose", _refusing(lambda graph: True))
    with pytest.raises(PlanError, match="refused"):
        turned(model, images, stream=False)


def _refusing(which: Callable[[Graph], bool]) -> Callable[..., Any]:
    from outcore.memory.saved_tensors.plan_call import propose

    def proposed(graph: Graph, *rest: Any) -> Any:
        if which(graph):
            refused = PlanError("refused")
            refused.least_bytes = 2**62
            raise refused
        return propose(graph, *rest)

    return proposed


class Viewing(nn.Module):
    """Asks for a view that only one order of memory has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.conv(x)
        return self.head(out.view(len(out), -1))


class Writing(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.mul_(0.5))


class Dropping(nn.Sequential):
    """Draws a number per pixel."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.Conv2d(4, 2, 3))


class Paths(nn.Module):
    """Draws a number per image, as stochastic depth does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.new_empty((len(x), 1, 1, 1)).bernoulli_(0.5)


class DroppingLate(nn.Sequential):
    """Draws a number per channel, then one per image, then one per feature."""

    def __init__(self) -> None:
        layers = nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5), Paths(), nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Flatten()
        super().__init__(*layers, nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.usefixtures("everywhere")
def test_the_same_random_numbers_are_drawn() -> None:
    torch.manual_seed(0)
    model, images = DroppingLate().double(), torch.randn(6, 3, 8, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    assert turned(model, images).order.inside is not None
    for m in (model, plain):
        torch.manual_seed(3)
        total(m(images)).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("network", "why"),
    [
        (Viewing, "cannot run with its channels last: RuntimeError"),
        (Writing, "writes into its input"),
        (Dropping, "1#0 could draw other random numbers"),
    ],
)
def test_networks_that_cannot_stay_as_they_are(network: type[nn.Module], why: str) -> None:
    torch.manual_seed(0)
    model, images = network().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    plan = turned(model, images.clone())
    assert plan.order.inside is None and why in plan.explain()
    mine, theirs = images.clone(), images.clone()
    outputs = []
    for m, given in ((model, mine), (plain, theirs)):
        torch.manual_seed(3)
        outputs.append(m(given))
    assert torch.equal(*outputs) and torch.equal(mine, theirs)


@pytest.mark.usefixtures("everywhere")
def test_there_is_nothing_to_choose_without_images_or_where_they_are_turned_already() -> None:
    line = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert turned(line, torch.randn(2, 4)).order.why == ""
    model, images = made("residual")
    assert turned(model, images.to(memory_format=torch.channels_last)).order.why == ""


def test_on_a_cpu_and_where_results_are_bitwise_the_order_stays() -> None:
    model, images = made("residual")
    assert turned(model, images).order.why == ""
    assert turned(model, images).document().memory_order is None


def test_a_plan_for_a_network_that_cannot_is_refused() -> None:
    model, images = Viewing(), torch.randn(2, 3, 8, 8)
    plan = turned(model, images).document()
    outcore.release(model)
    with pytest.raises(PlanError, match="stays as it is: the network cannot run with its channels last"):
        outcore.within(model, (images,), memory=None, plan=replace(plan, memory_order="channels_last"), quiet=True)
