"""What goes in must come out: every kind of model, captured and replayed bitwise equal."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outcore
from tests.graph.nets import Double, Net, conv, double, image
from tests.graph.replay import assert_same, check, run


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


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_a_tensor_that_is_given_twice_is_two_inputs(real: bool) -> None:
    """As in ``model(input_ids=x, labels=x)``: the next call may bring two different ones."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor, *, more: dict[str, Tensor]) -> Tensor:
            scale = float(x.detach().abs().max()) if real else 2.0  # the first is known on real numbers alone
            return self.a(x) * scale + self.b(y) - more["z"]  # type: ignore[no-any-return]

    model, x, y, z = Two(), *(torch.ones(3, 4) * k for k in (1, 2, 3))
    graph = outcore.capture(model, (x, x), {"more": {"z": x}})
    apart = outcore.capture(model, (x, y), {"more": {"z": z}})
    assert graph.inputs == apart.inputs == ("x", "y", "more.z") and graph.fingerprint == apart.fingerprint
    for args in ((x, x, x), (x, y, z), (x, y, y)):
        given = (*args[:2],), {"more": {"z": args[2]}}
        assert torch.equal(graph.module(*given[0], **given[1]), model(*given[0], **given[1]))


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
