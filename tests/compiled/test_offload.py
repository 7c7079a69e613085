"""Values that leave the device between the two graphs of a compiled step."""

from __future__ import annotations

import copy
import gc
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._inductor.utils import run_and_get_code

from outcore.compiled import offload_ops
from outcore.compiled.compiled_forward import _AS_PLANNED
from outcore.compiled.in_place import install_compiled_forward
from outcore.compiled.joint_graph import JointGraph, Rates
from outcore.compiled.lifetimes import StepOfGraph, step_of
from outcore.compiled.measured_peak import measured_peak
from outcore.compiled.pieces import choice_of
from outcore.compiled.search import search
from outcore.compiled.settings import CompileSettings
from outcore.compiled.times.copy_times import copies_back, copies_out
from outcore.compiled.torch_partitioner import Partitioner, SavedChoice, TracedStep, compile_planned, compiling
from outcore.cost.optimizer_cost import OptimizerCost
from outcore.graph.strides import is_dense
from tests.compiled.oracle import LINK
from tests.compiled.test_search import VALUE, joint, named

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1), compiling():  # so that no pool of threads stays
        yield
    torch._dynamo.reset()


def linked() -> JointGraph:
    """The joint graph of a chain of layers, with a link over which values can leave."""
    graph = copy.copy(joint())
    graph.rates = replace(graph.rates, link=LINK)
    return graph


# The times of copies


@pytest.mark.parametrize("seed", range(40))
def test_no_value_is_gone_before_it_is_copied_and_none_is_read_before_it_is_back(seed: int) -> None:
    draw = random.Random(seed)
    kernels = draw.randint(1, 12)
    seconds = [draw.random() for _ in range(kernels)]
    ends = [sum(seconds[: k + 1]) for k in range(kernels)]
    made = {value: draw.randrange(kernels) for value in range(draw.randint(1, 6))}
    last = {value: draw.randrange(k, kernels) for value, k in made.items() if draw.random() < 0.7}
    takes = {value: draw.random() * draw.choice((0.1, 1, 5)) for value in made}
    out = copies_out(seconds, made, last, takes)
    clock = 0.0
    for value in sorted(made, key=lambda v: (made[v], v)):
        clock = max(clock, ends[made[value]]) + takes[value]
        free = out.free_after[value]
        assert free >= last.get(value, made[value])
        over = ends[free] if free < kernels else ends[-1] + out.wait_s
        assert over >= clock - 1e-9
        if free < kernels and free > last.get(value, made[value]):
            assert free == 0 or ends[free - 1] < clock  # and it is not held longer
    assert out.wait_s == pytest.approx(max(0.0, clock - ends[-1]))

    read = {value: draw.randrange(kernels) for value in made}
    early = draw.choice((0.0, 1.0, 1.3, 100.0))
    back = copies_back(seconds, read, takes, early)
    starts = [0.0, *ends]
    free_at = late = 0.0
    for value in sorted(read, key=lambda v: (read[v], v)):
        assert 0 <= back.fetch_before[value] <= read[value]
        free_at = max(free_at, starts[back.fetch_before[value]] + late) + takes[value]
        late = max(late, free_at - starts[read[value]])
    assert back.wait_s == pytest.approx(late)
    if early >= 1 and all(sum(takes.values()) * early <= starts[read[v]] for v in read):
        assert back.wait_s == pytest.approx(0.0)


@pytest.mark.parametrize("seed", range(20))
def test_dense_is_what_has_no_gaps_and_no_overlaps(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 4))]
    whole = torch.empty(shape, device="meta").permute(draw.sample(range(len(shape)), len(shape)))
    assert is_dense(whole.shape, whole.stride())
    part = whole[..., ::2] if whole.dim() and whole.shape[-1] > 2 else whole.unsqueeze(0).expand(2, *whole.shape)
    assert not is_dense(part.shape, part.stride())


# Lifetimes and the search


def test_a_value_that_is_away_is_not_held_in_between() -> None:
    graph = linked()
    saved = named(graph, "tanh")
    away = frozenset(saved[:4])
    kept, sent = step_of(graph, saved), step_of(graph, saved, offloaded=away, early=0.0)
    assert sent.offloaded == away and sent.offloaded_bytes == 4 * VALUE
    assert sent.forward_bytes == kept.forward_bytes - 4 * VALUE
    assert sent.saved == kept.saved and sent.again == kept.again
    assert sent.seconds > kept.seconds
    assert {way.value for way in sent.ways} == away
    assert step_of(joint(), saved, offloaded=away).ways == ()  # without a link nothing leaves


def test_what_is_returned_or_has_no_room_stays() -> None:
    graph = linked()
    result = graph.source[graph.outputs[0]]
    step = step_of(graph, named(graph, "tanh"), offloaded=frozenset([result, *named(graph, "tanh")]))
    assert result not in step.offloaded and step.offloaded
    graph.rates = replace(graph.rates, link=replace(LINK, capacity_bytes=2 * VALUE + 1))
    assert step_of(graph, named(graph, "tanh"), offloaded=step.offloaded).offloaded_bytes == 2 * VALUE


def test_a_fast_link_makes_the_frontier_smaller_and_a_slow_one_leaves_it() -> None:
    graph = linked()
    without = search(joint())
    fast, slow = replace(LINK, out_bytes_per_s=1e13, in_bytes_per_s=1e13), replace(LINK, in_bytes_per_s=1.0)
    graph.rates = replace(graph.rates, link=fast)
    away = search(graph)
    for point in without.points:  # no budget gets a slower step
        found = away.within(point.peak_bytes)
        assert found is not None and found.seconds <= point.seconds
    assert any(p.offloaded for p in away.points)
    assert away.least.peak_bytes <= without.least.peak_bytes
    graph.rates = replace(graph.rates, link=slow)
    assert next(p for p in search(graph).points if not p.offloaded).seconds == without.points[0].seconds


# Steps that run


class Sent:
    """Chooses torch's saved values, all that can of them away, or none."""

    def __init__(self, away: bool, early: float = 1.0) -> None:
        self.away, self.early = away, early
        self.step: StepOfGraph | None = None

    def __call__(self, partition: TracedStep) -> SavedChoice:
        """What is saved."""
        graph = JointGraph(partition, replace(Rates.of(CPU), link=LINK))
        saved = [graph.index[node] for node in partition.torch_choice(1.0) if node.op == "call_function"]
        every = frozenset(graph.source[i] for i in saved) if self.away else frozenset()
        self.step = step_of(graph, saved, offloaded=every, early=self.early)
        return choice_of(graph, self.step)


def images_and_network() -> tuple[torch.Tensor, nn.Module]:
    """Convolutions with their channels last."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(4)]
    network = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    return torch.randn(2, 8, 24, 24).to(memory_format=torch.channels_last), network


def trained(run: object, network: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Result and gradients of two steps."""
    found = []
    for _ in range(2):
        network.zero_grad()
        result = run(images)  # type: ignore[operator]
        result.square().sum().backward()
        found += [result.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]
    return found


def test_numbers_are_the_same_bit_for_bit_and_the_peak_falls_with_what_left() -> None:
    found, peaks, sent = [], [], []
    for away, early in ((False, 0.0), (True, 0.0), (True, 1e6)):
        torch._dynamo.reset()
        images, network = images_and_network()
        chooser = Sent(away, early)
        run = compile_planned(network.forward, Partitioner(chooser), kernels=False)
        found.append(trained(run, network, images))
        assert chooser.step is not None and bool(chooser.step.ways) == away
        network.zero_grad()
        peaks.append(measured_peak(lambda run=run, images=images: run(images).sum().backward(), CPU))
        sent.append(chooser.step.offloaded_bytes)
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)
    assert not offload_ops._tickets
    assert peaks[1] <= peaks[0] - 0.25 * sent[1], (peaks, sent)  # what comes back late
    assert peaks[1] < peaks[2] <= peaks[0]  # and what comes back early
    kept = [run(images) for _ in range(3)]  # a forward without a backward leaves nothing behind
    assert offload_ops._tickets
    kept[1].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        kept[1].sum().backward()
    del kept
    gc.collect()
    assert not offload_ops._tickets


def test_a_model_gives_its_room_back() -> None:
    store = offload_ops._store(CPU)
    gc.collect()
    before = dict(store.asked)
    room = offload_ops.Reservation(CPU)
    room.at_least(2**20)
    assert sum(store.asked.values()) == sum(before.values()) + 2**20
    del room
    assert store.asked == before


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("early", [0.0, 1.0])
def test_inductor_keeps_the_order_so_that_the_predicted_peak_holds(early: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)]
    network, batch = nn.Sequential(*layers), torch.randn(2048, 128)
    plain = copy.deepcopy(network)
    chooser = Sent(True, early)
    run = compile_planned(network.forward, Partitioner(chooser), **_AS_PLANNED)

    def step() -> None:
        run(batch).square().sum().backward()

    _, codes = run_and_get_code(step)
    assert "reload_wait" in codes[-1] and "reload_wait.default) is assumed to be not aligned" not in codes[-1]
    plain(batch).square().sum().backward()
    for one, two in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-2)
    network.zero_grad()
    step()
    network.zero_grad()
    assert chooser.step is not None and chooser.step.offloaded_bytes > 0.5 * chooser.step.saved_bytes
    assert measured_peak(step, CPU) < 1.05 * chooser.step.peak_bytes


@pytest.mark.slow
@needs_compiler
def test_a_budget_that_only_offloading_meets_is_met() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)]
    model, batch = nn.Sequential(*layers), torch.randn(8192, 64)
    settings = CompileSettings(None, OptimizerCost.of(0.0), offload=False)
    free = install_compiled_forward(copy.deepcopy(model), (batch,), {}, settings)
    budget = int(0.8 * free.least_bytes)
    plan = install_compiled_forward(model, (batch,), {}, replace(settings, budget_bytes=budget, offload=True))
    assert plan.offloaded_bytes and plan.measured_bytes is not None and plan.measured_bytes <= budget
    store = offload_ops._store(CPU)
    assert store.capacity_bytes >= plan.offloaded_bytes
    for rows in (8192, 8192, 1000):
        theirs = copy.deepcopy(model)
        del theirs.__dict__["forward"]
        for each in (model, theirs):
            each.zero_grad()
            each(batch[:rows]).square().sum().backward()
        for one, two in zip(model.parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None and two.grad is not None
            assert float((one.grad - two.grad).abs().max()) < 1e-3 * float(two.grad.abs().max()) + 1e-4


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")
def test_on_a_gpu_values_come_back_bit_for_bit_and_the_peak_holds() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found, peaks = [], []
    for away in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU()) for _ in range(8)]
        network = nn.Sequential(*layers).to(device)
        batch = torch.randn(8192, 1024, device=device)
        chooser = Sent(away)
        run = compile_planned(network.forward, Partitioner(chooser), **_AS_PLANNED)
        found.append(trained(run, network, batch))
        network.zero_grad()
        peaks.append(measured_peak(lambda run=run, batch=batch: run(batch).sum().backward(), device))
        assert chooser.step is not None
        print("predicted", chooser.step.peak_bytes, "measured", peaks[-1], "away", chooser.step.offloaded_bytes)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert peaks[1] < peaks[0]
    assert not offload_ops._tickets
