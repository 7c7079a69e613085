"""When a recording may be used again, and what capture leaves behind: nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from tests.graph.nets import Net, conv, image
from tests.graph.replay import assert_same, check, run


def test_after_eval_the_graph_is_recorded_again() -> None:
    net = Net(lambda s, x: F.dropout(s.b(s.a(x)), 0.5, training=s.training), a=conv(), b=nn.BatchNorm2d(4))
    mine, theirs = copy.deepcopy(net), copy.deepcopy(net)
    graph = outcore.capture(mine, (image(),))
    for training in (True, False, True):
        mine.train(training), theirs.train(training)
        for size in (2, 3, 2):
            x = image(size, 4, 8 + size, 8)
            assert_same(run(theirs, (x,), {}, theirs), run(graph.module, (x,), {}, mine))
    assert len(graph.module.recordings) == 5  # the captured key, and two sizes in each of two modes
    assert not graph.module.train(False).training
    assert not mine.training


def test_names_are_the_same_in_train_and_eval_and_at_any_size() -> None:
    net = outcore.models.UNet(width=4, depth=2)
    graphs = [outcore.capture(net.train(mode), [(n, 3, 32, 32)]) for mode in (True, False) for n in (1, 2)]
    assert all(list(g.values) == list(graphs[0].values) for g in graphs)
    assert len({g.fingerprint for g in graphs}) == 1


def test_branches_on_data_follow_the_data() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return s.b(s.a(x))  # type: ignore[no-any-return]
        return s.b(x[x > 0].sum() * s.a(x))  # type: ignore[no-any-return]

    net = Net(forward, a=conv(), b=nn.BatchNorm2d(4))
    mine, theirs = copy.deepcopy(net), copy.deepcopy(net)
    graph = outcore.capture(mine, (image(),))
    assert "recorded on real data" in graph.notes[0]
    assert "test_capture_again.py" in graph.notes[0]
    for x in (image() + 1, image() - 1, image() + 2, image() - 2):
        assert_same(run(theirs, (x,), {}, theirs), run(graph.module, (x,), {}, mine))


def test_numbers_drawn_by_numpy_and_python_are_drawn_again() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        mask = torch.from_numpy(np.random.rand(4, 1, 1).astype(np.float32))
        return s.a(x) * mask * random.random()  # type: ignore[no-any-return]

    net = Net(forward, a=conv())
    mine, theirs = copy.deepcopy(net), copy.deepcopy(net)
    module = outcore.capture(mine, (image(),)).module
    for seed in (1, 2):
        outs = []
        for runner in (module, theirs):
            random.seed(seed)
            np.random.seed(seed)
            outs.append(runner(image()))
        assert torch.equal(*outs)


class Stateful(nn.Module):
    """Does everything a forward should not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = conv(), nn.BatchNorm2d(4)
        self.log: list[Any] = []
        self.register_buffer("total", torch.zeros(4))
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.a(x))
        self.last, self.steps = h, getattr(self, "steps", 0) + 1
        self.log.append(h)
        self.total = self.total + h.sum((0, 2, 3))
        with torch.no_grad():
            self.a.weight.mul_(0.9)
        if self.fail:
            raise RuntimeError("as asked")
        return F.dropout(h)


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_is_left_as_it_was(fail: bool) -> None:
    net = Stateful()
    net.fail = fail
    before, random_state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    attributes, call = dict(net.__dict__), nn.Module.__call__
    if fail:
        with pytest.raises(outcore.CaptureError, match=r"as asked"):
            outcore.capture(net, [(2, 4, 8, 8)])
    else:
        outcore.capture(net, [(2, 4, 8, 8)])
    assert net.__dict__ == attributes
    assert net.log == []
    after = net.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert torch.equal(random_state, torch.get_rng_state())
    assert nn.Module.__call__ is call


def test_function_caches_hold_no_stand_ins() -> None:
    import functools

    @functools.lru_cache
    def table(n: int) -> Tensor:
        return torch.arange(n) * 2.0

    net = Net(lambda s, x: s.a(x) + table(x.shape[-1]), a=conv())
    check(net, (image(),))
    outcore.capture(net, (image(),))
    assert type(table(8)) is Tensor


def test_lazy_modules_are_refused_with_what_to_do() -> None:
    with pytest.raises(outcore.CaptureError, match=r"1 is a LazyLinear .* run the model once"):
        outcore.capture(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), [(2, 4)])


def test_a_wrong_shape_names_block_and_line() -> None:
    net = Net(lambda s, x: s.block(x), block=nn.Sequential(nn.Linear(5, 3)))
    with pytest.raises(
        outcore.CaptureError, match=r"in block block at tests/graph/record/test_capture_again.py:\d+"
    ) as caught:
        outcore.capture(net, [(2, 4)])
    assert "4" in str(caught.value)
    assert "5" in str(caught.value)


def test_wrong_arguments_say_what_to_write() -> None:
    with pytest.raises(outcore.CaptureError, match=r"args=\(x,\)"):
        outcore.capture(nn.Linear(2, 2), "x")


@pytest.mark.parametrize(
    "given",
    [
        [(1, 3, 64, 64)],
        (1, 3, 64, 64),
        torch.randn(1, 3, 64, 64),
        (torch.empty(1, 3, 64, 64, device="meta"),),
    ],
)
def test_inputs_may_be_shapes_tensors_or_meta_tensors(given: Any) -> None:
    graph = outcore.capture(nn.Conv2d(3, 2, 3), given)
    assert graph.values["input"].shape == (1, 3, 64, 64)


def test_models_on_the_meta_device() -> None:
    with torch.device("meta"):
        net = outcore.models.UNet(width=4, depth=2)
    graph = outcore.capture(net, [(1, 3, 64, 64)])
    assert graph.values[graph.outputs[0]].shape == (1, 2, 64, 64)


def test_channels_last_is_seen() -> None:
    net = nn.Sequential(conv(), nn.ReLU()).to(memory_format=torch.channels_last)
    graph = check(net, (image().to(memory_format=torch.channels_last),))
    assert graph.values["0#0:out"].stride == (256, 1, 32, 4)


def test_state_dict_and_parameters_are_the_models_own() -> None:
    net = outcore.models.UNet(width=4, depth=2)
    module = outcore.capture(net, [(1, 3, 32, 32)]).module
    assert list(module.state_dict()) == list(net.state_dict())
    assert [id(p) for p in module.parameters()] == [id(p) for p in net.parameters()]
    module.load_state_dict(outcore.models.UNet(width=4, depth=2).state_dict())


def test_a_replaced_submodule_is_used() -> None:
    net = nn.Sequential(conv(), nn.ReLU())
    module = outcore.capture(net, (image(),)).module
    net[1] = nn.Sigmoid()
    assert torch.equal(module(image()), net(image()))


def test_other_threads_are_not_recorded() -> None:
    import queue
    import threading

    other = nn.Linear(2, 2)
    results: queue.SimpleQueue[Tensor] = queue.SimpleQueue()  # a list would be again what it was

    def forward(s: Any, x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: results.put(other(torch.ones(1, 2))))
        thread.start()
        thread.join()
        out: Tensor = s.a(x)
        return out

    graph = outcore.capture(Net(forward, a=conv()), (image(),))
    assert list(graph.calls) == ["a#0"]
    assert type(results.get_nowait()) is Tensor


def test_what_vmap_computes_is_computed_anew_or_refused() -> None:
    def constant(s: Any, x: Tensor) -> Tensor:
        out: Tensor = s.a(x) * torch.vmap(lambda i: i * 2)(torch.arange(x.shape[-1]))
        return out

    check(Net(constant, a=conv()), (image(),))
    with pytest.raises(outcore.CaptureError, match="made where recording cannot see it"):
        outcore.capture(Net(lambda s, x: torch.vmap(lambda i: i * 2)(s.a(x)), a=conv()), (image(),))


class _NoModule:
    """A model of no framework."""


@pytest.mark.parametrize(
    ("thing", "advice"),
    [
        (nn.Linear, r"make a model of it: Linear\(...\)"),
        (_NoModule(), "put what it computes into the forward"),
        (lambda x: x, "function is none"),
        (type("Model", (), {"__module__": "tf_keras.src.models"})(), "outcore.keras.to_torch first"),
    ],
)
@pytest.mark.parametrize("asked", [outcore.capture, outcore.estimate, outcore.memory_of])
def test_what_is_no_torch_module_is_refused_with_what_to_do(
    asked: Callable[..., object], thing: object, advice: str
) -> None:
    with pytest.raises(outcore.CaptureError, match=advice):
        asked(thing, [(1, 3)])
