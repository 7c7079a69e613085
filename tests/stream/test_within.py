"""`outcore.within` streams by itself when nothing else meets the budget; plain PyTorch is the oracle."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.cost.measured.live_bytes import LiveBytes
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.data import ArraySource, Batch
from outcore.errors import PlanError
from outcore.machine.units import format_bytes
from outcore.planner.memory.plan import MemoryPlan
from outcore.program.plan.document import Plan
from outcore.program.policies import RECOMPUTE, policies_to_json
from outcore.stream import PixelLoss, pixel_loss
from outcore.stream.execute.untiled_tail import UntiledTail
from outcore.stream.managed_forward import StreamedForward
from outcore.stream.plan.prepared import bound, divided
from outcore.stream.plan.step_document import StreamedStep

from .oracle import TOLERANCE, total, with_statistics

SIDE = 256


def classifier(norm: bool = True, depth: int = 5) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b, stride in [(3, 8, 1), (8, 8, 2), (8, 16, 1), (16, 16, 2), (16, 16, 1)][:depth]:
        layers += [nn.Conv2d(a, b, 3, stride, 1, bias=not norm), *([nn.BatchNorm2d(b)] if norm else []), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)]
    return with_statistics(nn.Sequential(*layers, *head)).double()


def image(side: int = SIDE) -> torch.Tensor:
    return torch.rand(1, 3, side, side + 11, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def within(net: nn.Module, *args, memory, **options) -> nn.Module:
    outcore.release(net)
    graph = outcore.capture(net, tuple(torch.empty(a.shape, dtype=a.dtype, device="meta") for a in args))
    costs = by_bytes(account(graph), 1e10)
    return outcore.within(net, args, memory=memory, costs=costs, optimizer=0.0, quiet=True, **options)


def plain_bytes(net: nn.Module, x: torch.Tensor) -> int:
    plain = copy.deepcopy(net)
    with LiveBytes([]) as live:
        total(plain(x)).backward()
        return live.peak


def assert_same_gradients(net: nn.Module, plain: nn.Module) -> None:
    largest = max(p.grad.abs().max() for p in plain.parameters() if p.grad is not None)
    for (name, mine), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad - other.grad).abs().max() <= TOLERANCE * largest, name
    for (name, mine), other in zip(net.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(mine, other[1], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def assert_trains_as_plain(net: nn.Module, given, x: torch.Tensor) -> StreamedStep:
    plain = copy.deepcopy(outcore.release(copy.deepcopy(net)))
    loss, expected = total(net(given)), total(plain(x))
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
    loss.backward()
    expected.backward()
    assert_same_gradients(net, plain)
    step = outcore.memory_plan(net)
    assert isinstance(step, StreamedStep)
    return step


def counted(net: nn.Module, x: torch.Tensor) -> int:
    """Peak of a step that is not the first: live tensors, the image, weights and buffers."""
    net.zero_grad(set_to_none=True)
    with LiveBytes([]) as live:
        total(net(x)).backward()
        found = live.peak
    found += sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))
    print(f"predicted {outcore.memory_plan(net).peak_bytes:,} counted {found:,}")
    return found


def test_a_budget_that_no_policy_meets_is_met_by_tiles() -> None:
    net, x = classifier().eval(), image()
    budget = plain_bytes(net, x) // 6
    assert within(net, x, memory=budget) is net
    step = assert_trains_as_plain(net, x, x)
    assert step.peak_bytes <= budget < step.plain_bytes
    whole = outcore.memory_plan(within(copy.deepcopy(outcore.release(copy.deepcopy(net))), x, memory=None))
    assert step.plain_bytes == pytest.approx(whole.plain_bytes, rel=1e-3)  # the image is in it once
    assert step.image_bytes == x.numel() * x.element_size() and "of it are images on the device" in step.explain()
    assert counted(net, x) <= budget
    assert outcore.release(net) is net and "forward" not in net.__dict__


def test_a_budget_that_policies_meet_is_not_streamed_unless_asked_to() -> None:
    net, x = classifier().eval(), image()
    budget = int(0.8 * plain_bytes(net, x))
    assert isinstance(outcore.memory_plan(within(net, x, memory=budget)), MemoryPlan)
    assert isinstance(outcore.memory_plan(within(net, x, memory=budget, stream=True)), StreamedStep)
    with pytest.raises(PlanError, match="cannot be done within"):
        within(net, x, memory=plain_bytes(net, x) // 6, stream=False)


def test_a_lazy_image_is_streamed() -> None:
    net, x = classifier().eval(), image()
    stored = (x[0] * 255).round().to(torch.uint8)
    lazy = Batch((ArraySource(stored),), dtype=torch.float64)
    net = within(net, lazy, memory=plain_bytes(net, x) // 6)
    assert_trains_as_plain(net, lazy, lazy.tensor())
    with torch.no_grad():
        torch.testing.assert_close(net(lazy), net(lazy.tensor()))


def test_the_plan_says_it_and_can_be_said_by_hand(tmp_path) -> None:
    net, x = classifier().eval(), image()
    step = outcore.memory_plan(within(net, x, memory=plain_bytes(net, x) // 6, stream=True))
    document = step.document()
    document.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.exactness == "reassociated" and read.stream == document.stream
    assert "reassociated" in step.explain() and "tiles of" in step.explain()
    again = outcore.memory_plan(within(net, x, memory=None, plan=read))
    assert again.peak_bytes == step.peak_bytes and again.plan.tiles == step.plan.tiles
    by_hand = Plan(read.graph, (("",),), exactness="reassociated", stream={"tile": 40, "boundary": "5"})
    step = assert_trains_as_plain(within(net, x, memory=None, plan=by_hand), x, x)
    assert step.plan.boundary == ("5",) and step.plan.tile == (40, 40)


def test_an_explanation_says_what_is_kept_where_and_what_follows() -> None:
    net, x = classifier().eval(), image(120)
    plan = Plan(outcore.capture(net, (x,)).fingerprint, (("",),), stream={"tile": 40, "boundary": "5"})
    step = outcore.memory_plan(within(net, x, memory=None, plan=plan))
    held = format_bytes(step.plan.bytes.boundary)
    assert f"boundary maps of {held} kept for what follows" in step.explain()
    assert "between passes" not in step.explain() and "policies" not in step.explain()

    def said(**changes) -> str:
        return dataclasses.replace(step, plan=dataclasses.replace(step.plan, **changes)).explain()

    assert "2 maps between passes kept in host memory" in said(keep=("a", "b"), on_host=True)
    assert "2 maps between passes kept on the device (0 B)" in said(keep=("a", "b"))
    assert "maps between passes made again from the image" in said(passes=2)
    policies = {"a": "recompute", "b": "encode:fp8", "c": "recompute", "d": "encode:bits"}
    assert "runs untiled under policies: 2 recompute, 2 encode" in said(rest=policies)
    stops = said(boundary=None, stopped=tuple((f"block{n}", "no rule") for n in range(5)))
    assert stops.count("stops before") == 3 and "stops before block0: no rule" in stops
    assert "x of plain (predicted)" not in dataclasses.replace(step, plain_s=None).explain()


@pytest.mark.parametrize(("stream", "said"), [({"tiles": 4}, "no field 'tiles'"), ({"boundary": "5"}, "needs a tile")])
def test_a_wrong_plan_is_refused(stream, said) -> None:
    net, x = classifier().eval(), image()
    plan = Plan(outcore.capture(net, (x,)).fingerprint, (("",),), stream=stream)
    with pytest.raises(PlanError, match=said):
        within(net, x, memory=None, plan=plan)


def test_a_refusal_names_what_both_ways_need() -> None:
    net, x = classifier().eval(), image()
    with pytest.raises(PlanError, match=r"cannot be done within .* nor in tiles: streaming cannot meet"):
        within(net, x, memory=1_800_000)
    with pytest.raises(PlanError, match="give images lazily"):
        within(net, x, memory=20_000)
    with pytest.raises(PlanError, match="tiles do not help: no input is an image"):
        within(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(512, 64), memory=200_000)


def test_norms_over_the_image_need_leave_and_the_refusal_tells_the_price() -> None:
    net, x = classifier(depth=3).train(), image(160)
    budget = plain_bytes(net, x) // 3
    with pytest.raises(PlanError, match=r"with statistics=True it fits, for \d forward passes .* the time of a plain"):
        within(net, x, memory=budget, stream=True)
    net = within(net, x, memory=budget, statistics=True, stream=True)
    step = assert_trains_as_plain(net, x, x)
    assert step.plan.passes > 1 and step.peak_bytes <= budget


def test_maps_between_passes_are_kept_where_the_budget_allows() -> None:
    net, x = classifier(depth=3).train(), image(120)
    most = plain_bytes(net, x)
    steps = []
    for share in (0.3, 0.5):
        within(net, x, memory=int(share * most), statistics=True, stream=True)
        steps.append(assert_trains_as_plain(net, x, x))
        assert counted(net, x) <= share * most
        net.zero_grad(set_to_none=True)
    assert any(step.plan.keep for step in steps)
    assert steps[1].plan.time_s < steps[0].plan.time_s


def test_what_follows_the_boundary_may_run_under_policies() -> None:
    net, x = classifier().eval(), image()
    prepared = divided(bound(outcore.capture(net, (x,)), folded=True), tile=64, boundary=("2",))
    rest = UntiledTail(prepared)
    assert not rest.planned and rest.policy == {} and rest.scripts is rest.links is None
    assert (rest.start_bytes, rest.plain_s, rest.slowdown) == (0, 0.0, 1.0)
    rest.plan(None, None)
    assert rest.planned and rest.start_bytes > 0 and rest.plain_s > 0
    keeping = rest.managed_forward.plan.keeping
    chosen = {b.name: RECOMPUTE for b in keeping.buffers.values() if b.savers and RECOMPUTE in keeping.choices(b)}
    less = UntiledTail(prepared)
    less.plan(None, None, chosen)
    assert chosen and less.peak_bytes < rest.peak_bytes
    refused = UntiledTail(prepared)
    refused.plan(1000, None)  # no policies meet it: it stays as it is
    assert refused.policy == {} and refused.planned and refused.peak_bytes == rest.peak_bytes
    stream = json.loads(json.dumps({"tile": 64, "boundary": "2", "rest": policies_to_json(chosen)}))
    plan = Plan(outcore.capture(net, (x,)).fingerprint, (("",),), stream=stream)
    step = assert_trains_as_plain(within(net, x, memory=None, plan=plan), x, x)
    assert step.policy == less.policy


def test_what_follows_the_boundary_may_write_into_it() -> None:
    layers = [
        nn.Conv2d(3, 8, 3, 1, 1),
        nn.ReLU(True),
        nn.Conv2d(8, 8, 3, 2, 1),
        nn.ReLU(True),
        nn.Conv2d(8, 4, 3, 1, 1),
    ]
    net, x = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).double(), image()
    plan = Plan(outcore.capture(net, (x,)).fingerprint, (("",),), stream={"tile": 64, "boundary": "2"})
    step = assert_trains_as_plain(within(net, x, memory=None, plan=plan), x, x)
    assert counted(net, x) <= step.peak_bytes


class FunctionalNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 3, 3, 2, 1)
        self.scale, self.shift = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x):
        x = F.group_norm(self.first(x), 2, self.scale, self.shift).relu()
        return F.instance_norm(self.last(x)).square().mean((2, 3))


def test_norms_that_are_functions_are_those_of_the_whole_image() -> None:
    net, x = FunctionalNorms().double(), image(100)
    stream = {"tile": 40, "statistics": True}
    plan = Plan(outcore.capture(net, (x,)).fingerprint, (("",),), stream=stream)
    assert assert_trains_as_plain(within(net, x, memory=None, plan=plan), x, x).plan.passes > 1


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.head = nn.Sequential(nn.Conv2d(11, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, x):
        return self.head(torch.cat([self.up(self.down(x)), x], 1))


def test_segmentation_by_the_plain_loop_and_in_one_pass() -> None:
    net = Segmenter().double()
    x = torch.rand(1, 3, 96, 128, dtype=torch.float64)
    target = torch.randint(2, (1, 96, 128))
    plain = copy.deepcopy(net)
    expected = pixel_loss(plain, x, target=target, loss=F.cross_entropy)
    expected.backward()
    budget = int(0.6 * plain_bytes(net, x))
    peaks = []
    for loss in (lambda out: F.cross_entropy(out, target), PixelLoss(F.cross_entropy)):
        within(net, x, memory=budget, stream=True, loss=loss)
        net.zero_grad(set_to_none=True)
        if isinstance(loss, PixelLoss):
            got = pixel_loss(net, x, target=target, loss=loss)
        else:
            got = loss(net(x))
        got.backward()
        torch.testing.assert_close(got, expected)
        assert_same_gradients(net, plain)
        peaks.append(outcore.memory_plan(net).peak_bytes)
        counts = net.__dict__["forward"].streamed.counts
        assert counts.forward == counts.backward
    assert max(peaks) <= budget


def test_slides_of_other_sizes_do_not_wait_for_a_plan() -> None:
    net, x = classifier().eval(), image()
    net = within(net, x, memory=plain_bytes(net, x) // 4, stream=True)
    streamed_forward = net.__dict__["forward"]
    assert isinstance(streamed_forward, StreamedForward)
    asked = []
    streamed, choose = streamed_forward.streamed, streamed_forward.choose
    streamed.planner = lambda *given: asked.append(given) or choose(*given)
    for side in (250, 190, SIDE, 250):
        assert_trains_as_plain(net, image(side), image(side))
        net.zero_grad(set_to_none=True)
    assert not asked
    net(image(140))
    assert len(asked) == 1
    net(image(133))
    assert len(asked) == 1


def test_the_model_stays_what_it_was() -> None:
    net, x = classifier().eval(), image()
    names = list(net.state_dict())
    net = within(net, x, memory=plain_bytes(net, x) // 6, stream=True)
    assert list(net.state_dict()) == names and type(net) is nn.Sequential
    seen = []
    net.register_forward_hook(lambda *_: seen.append(1))
    expected = net(x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(copy.deepcopy(classifier().eval())))):
        assert isinstance(other, nn.Sequential)
    torch.testing.assert_close(copy.deepcopy(net)(x), expected)
    assert seen
    within(net, x, memory=None)
    assert isinstance(outcore.memory_plan(net), MemoryPlan)


def test_verify_says_that_sums_were_reassociated() -> None:
    from outcore.verification import verify_job

    job = outcore.Job(lambda: classifier(norm=False), lambda size: (image(), None))
    plain = plain_bytes(classifier(norm=False), image())
    verdict = verify_job(job, memory=plain // 5, steps=1, device="cpu")
    assert verdict.agrees and "re-associated" in verdict.grade and "tiles of" in verdict.explained


def test_the_command_plans_tiles_where_nothing_else_fits(tmp_path, capsys) -> None:
    from outcore.cli.one_device import plan_on_one_device
    from outcore.machine import parse

    net, x = classifier(norm=False), image()
    job = outcore.Job(lambda: net, lambda size: (x, None), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    budget = plain_bytes(net, x) // 5
    path = tmp_path / "plan.json"
    plan_on_one_device(
        job, outcore.capture(net, (x,)), parse("v100"), budget, batch=None, output=path, svg=None, json=False
    )
    assert "tiles of" in capsys.readouterr().out
    step = assert_trains_as_plain(within(net, x, memory=None, plan=Plan.load(path)), x, x)
    assert step.peak_bytes - x.numel() * 8 <= budget
