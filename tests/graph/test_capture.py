"""What goes in must come out: every kind of model, captured and replayed bitwise equal."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outcore
from tests.graph.replay import assert_same, check, run


class Double(torch.autograd.Function):
    """A backward that no inlined forward would have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


double = Double.apply  # bound long before anybody records


class Net(nn.Module):
    """A module from a function, with parts to call."""

    def __init__(self, forward: Any, **parts: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def image(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 4, 8, 8), generator=torch.Generator().manual_seed(3))


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)


def test_functions_between_modules() -> None:
    check(Net(lambda s, x: F.relu(s.a(x)) + torch.sigmoid(s.b(x)) * 2, a=conv(), b=conv()), (image(),))


def test_a_module_called_several_times_is_one_block_with_several_calls() -> None:
    graph = check(Net(lambda s, x: s.a(s.a(F.relu(s.a(x)))), a=conv()), (image(),))
    assert graph["a"].calls == 3
    assert [c.name for c in graph.leaves("a")] == ["a#0", "a#1", "a#2"]


def test_a_shared_module_has_one_path_and_aliases() -> None:
    shared = conv()
    graph = check(Net(lambda s, x: s.b(F.relu(s.a(x))), a=shared, b=shared), (image(),))
    assert graph["a"].calls == 2
    assert graph["a"].aliases == ("b",)
    assert graph.root.parameters == sum(p.numel() for p in shared.parameters())


def test_tied_parameters_are_read_under_one_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.head(self.embed(tokens))
            return out

    graph = check(Tied(), (torch.randint(11, (3, 5)),))
    assert graph.calls["head#0"].parameters == graph.calls["embed#0"].parameters == ("embed.weight",)


def test_in_place_operations_and_their_order() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        y = s.a(x)
        view = y[0]
        y.add_(1).mul_(0.5)
        y[:, 1] = 3.0
        y += view.sum()
        return F.relu(y, inplace=True) * view.mean()

    graph = check(Net(forward, a=conv()), (image(),))
    assert graph.values["add_()#0:out"].alias_of == "a#0:out"
    assert graph.calls["setitem()#0"].mutates == ("mul_()#0:out",)
    assert "relu()#0" in graph.calls["mean()#0"].after  # reads a view of what relu writes


def test_views_share_memory_and_copies_do_not() -> None:
    graph = check(Net(lambda s, x: s.a(x).transpose(2, 3).flatten(1) + s.a(x).clone().flatten(1), a=conv()), (image(),))
    assert graph.values["flatten()#1:out"].alias_of == "clone()#0:out"
    assert graph.values["transpose()#0:out"].alias_of == "a#0:out"


def test_in_place_batch_norm_and_dropout() -> None:
    net = nn.Sequential(conv(), nn.Dropout(0.4, inplace=True), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv())
    check(net, (image(),))


def test_keyword_none_and_plain_arguments() -> None:
    def forward(
        s: Any, x: Tensor, scale: float, *, mask: Tensor | None = None, skip: Any = None, mode: str = "a"
    ) -> Tensor:
        y = s.a(x) * scale
        y = y if mask is None else y.masked_fill(mask, 0)
        return y.relu() if mode == "b" else y

    net = Net(forward, a=conv())
    graph = check(net, (image(), 2.0), {"mask": image() > 0, "skip": None, "mode": "b"})
    assert graph.inputs == ("arg0", "mask")
    check(net, (image(), 3.0), {"mode": "a"})


class Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


@dataclasses.dataclass
class Result:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    note: str = "plain"


class Cache:
    """An object nobody told torch about."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.seen = 0


def test_results_of_any_structure_come_back_as_they_were() -> None:
    def forward(s: Any, x: Tensor) -> Any:
        cache = Cache()
        cache.layers.append(s.a(x))
        cache.seen = x.shape[0]
        result = Result(s.b(x), (x * 2, cache.layers[0]))
        return {"pair": Pair(x + 1, [x - 1]), "result": result, "cache": cache, "n": 3}

    net = Net(forward, a=conv(), b=conv())
    out = check(net, (image(),)).module(image())
    assert isinstance(out["pair"], Pair)
    assert isinstance(out["result"], Result)
    assert out["result"].note == "plain"
    assert isinstance(out["cache"], Cache)
    assert out["cache"].seen == 2
    assert out["n"] == 3


def test_structured_inputs() -> None:
    def forward(s: Any, batch: dict[str, Any]) -> Tensor:
        out: Tensor = s.a(batch["image"]) * batch["weights"][1]
        return out

    batch = {"image": image(), "weights": [image(1), image(1)]}
    assert check(Net(forward, a=conv()), (batch,)).inputs == (
        "arg0.image",
        "arg0.weights.0",
        "arg0.weights.1",
    )


def test_buffers_constants_and_unregistered_tensors() -> None:
    table = torch.randn(4, 1, 1)

    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.randn(4, 1, 1))
            self.register_buffer("count", torch.zeros(()), persistent=False)
            self.plain = torch.randn(4, 1, 1)
            self.gain = nn.Parameter(torch.randn(4, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            steps = torch.arange(x.shape[-1], device=x.device)
            return (x - self.mean) * self.gain + self.plain + table + steps + self.count + torch.tensor([2.0])

    graph = check(Constants(), (image(),))
    assert "mean" in graph.calls["sub()#0"].parameters


def test_random_draws_repeat_in_order() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = F.dropout(s.a(x), 0.3, training=s.training)
        return h + torch.randn_like(h) * torch.rand(1) + torch.empty_like(h).bernoulli_(0.5)

    check(Net(forward, a=conv()), (image(),))


def test_hooks_on_leaves_and_containers_run_on_replay() -> None:
    seen: list[str] = []
    net = Net(lambda s, x: s.block(x), block=nn.Sequential(conv(), nn.ReLU()))
    net.block[0].register_forward_hook(lambda m, a, out: seen.append("leaf"))
    net.block.register_forward_pre_hook(lambda m, a: (a[0] * 2,))
    net.block.register_forward_hook(lambda m, a, out: seen.append("container") or out + 1)
    net.register_forward_hook(lambda m, a, k, out: seen.append("root"), with_kwargs=True)
    check(net, (image(),))
    seen.clear()
    outcore.capture(net, (image(),)).module(image())
    assert seen[-3:] == ["leaf", "container", "root"]


def test_backward_hooks_fire_on_replay() -> None:
    seen: list[str] = []
    net = Net(lambda s, x: s.block(s.a(x)).relu(), a=conv(), block=nn.Sequential(conv(), nn.ReLU()))
    net.a.register_full_backward_hook(lambda m, gi, go: seen.append("leaf"))
    net.block.register_full_backward_hook(lambda m, gi, go: seen.append("container"))
    x = image().requires_grad_()
    graph = check(net, (x,))
    assert graph["block"].kind == "opaque"
    seen.clear()
    outcore.capture(net, (x,)).module(x).sum().backward()
    assert seen == ["container", "leaf"]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal", "old weight_norm", "old spectral_norm"])
def test_parametrizations(wrap: str) -> None:
    source = torch.nn.utils if wrap.startswith("old") else torch.nn.utils.parametrizations

    def build() -> nn.Module:  # one under the old weight_norm cannot be copied
        torch.manual_seed(0)
        return nn.Sequential(getattr(source, wrap.removeprefix("old "))(nn.Linear(6, 6)), nn.Tanh())

    mine, theirs, x = build(), build(), image(3, 6)
    graph = outcore.capture(mine, (x,))
    assert graph["0"].kind == "module"
    assert_same(run(theirs, (x,), {}, theirs), run(graph.module, (x,), {}, mine))


def test_custom_autograd_functions_keep_their_backward() -> None:
    graph = check(Net(lambda s, x: double(s.a(x), 5.0) + Double.apply(x, 7.0), a=conv()), (image().requires_grad_(),))
    assert graph["Double()"].kind == "opaque"
    assert graph["Double()"].calls == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_regions_stay_whole(reentrant: bool) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        scale = h.mean().detach()

        def region(y: Tensor) -> Tensor:
            out: Tensor = F.dropout(s.b(y), 0.3) * scale
            return out

        out: Tensor = checkpoint(region, h, use_reentrant=reentrant)
        return out

    graph = check(Net(forward, a=conv(), b=nn.Sequential(conv(), nn.ReLU())), (image(),))
    assert graph["checkpoint()"].kind == "opaque"
    assert graph.calls["checkpoint()#0"].parameters == ("b.0.weight", "b.0.bias")
    assert "detach()#0:out" in graph.calls["checkpoint()#0"].inputs


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripted_and_compiled_parts_stay_whole() -> None:
    def build() -> nn.Module:  # a copy of a scripted module has no leaf parameters
        torch.manual_seed(0)
        return Net(lambda s, x: s.b(s.a(x)), a=conv(), b=torch.jit.script(nn.Sequential(conv(), nn.ReLU())))

    mine, theirs, x = build(), build(), image()
    graph = outcore.capture(mine, (x,))
    assert_same(run(theirs, (x,), {}, theirs), run(graph.module, (x,), {}, mine))
    assert graph["b"].kind == "opaque"
    assert graph["b"].children == ()

    compiled = torch.compile(nn.Sequential(conv(), nn.ReLU()), backend="eager")
    graph = outcore.capture(Net(lambda s, x: s.b(s.a(x)), a=conv(), b=compiled), (image(),))
    assert graph["b"].kind == "opaque"
    assert graph.calls["b#0"].parameters == ("b._orig_mod.0.weight", "b._orig_mod.0.bias")


def test_no_grad_and_autocast_regions_are_kept() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = s.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = s.b(x)
            with torch.autocast("cpu", enabled=False):
                high = s.b(x)
        return frozen + low.float() + high

    graph = check(Net(forward, a=conv(), b=conv()), (image(),))
    assert not graph.calls["a#0"].grad
    assert graph.values["b#0:out"].dtype == "bfloat16"


def test_under_autocast_outside() -> None:
    net = nn.Sequential(conv(), nn.ReLU(), conv())
    mine, theirs = copy.deepcopy(net), copy.deepcopy(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = outcore.capture(mine, (image(),))
        assert graph.values["0#0:out"].dtype == "bfloat16"
        assert_same(run(theirs, (image(),), {}, theirs), run(graph.module, (image(),), {}, mine))
    assert_same(run(theirs, (image(),), {}, theirs), run(graph.module, (image(),), {}, mine))


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_and_attention_layers(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    check(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (image(3, 5, 8),))
    graph = check(
        Net(lambda s, x: s.rnn(x)[0] + s.rnn(x)[1][0].mean(), rnn=nn.LSTM(8, 8, 2, dropout=0.2)),
        (image(3, 5, 8),),
    )
    assert graph.calls["rnn#0"].outputs == ("rnn#0:0", "rnn#0:1.0", "rnn#0:1.1")


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
    assert "test_capture.py" in graph.notes[0]
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
    attributes = dict(net.__dict__)
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
    assert nn.Module.__call__ is outcore.graph.intercept.call_module


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
    with pytest.raises(outcore.CaptureError, match=r"in block block at tests/graph/test_capture.py:\d+") as caught:
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
    import threading

    other = nn.Linear(2, 2)
    results: list[Tensor] = []

    def forward(s: Any, x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: results.append(other(torch.ones(1, 2))))
        thread.start()
        thread.join()
        out: Tensor = s.a(x)
        return out

    graph = outcore.capture(Net(forward, a=conv()), (image(),))
    assert list(graph.calls) == ["a#0"]
    assert type(results[0]) is Tensor
