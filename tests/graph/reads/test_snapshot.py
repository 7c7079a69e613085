"""What a recording reads from Python is noticed when it changes, and what it does not read is not."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outcore
from outcore.errors import VaryingError
from outcore.graph.reads.frozen import frozen
from outcore.graph.reads.snapshot import Snapshot

FACTOR = 1.5
TABLE = {"bias": [0.5]}


class Mode(enum.Enum):
    PLAIN = 1
    TWICE = 2


@dataclass
class Options:
    scale: float = 1.0
    sizes: list[int] = field(default_factory=lambda: [1, 2])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def shifted(x: torch.Tensor, *, by: float = 0.25) -> torch.Tensor:
    return x + by * FACTOR + TABLE["bias"][0]


def around() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    """A function that reads a variable around it, and one that sets that variable."""
    slope = 2.0

    def sloped(x: torch.Tensor) -> torch.Tensor:
        return x * slope

    def set_slope(value: float) -> None:
        nonlocal slope
        slope = value

    return sloped, set_slope


class Net(nn.Module):
    """Reads numbers from everywhere."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.0)
        self.sloped, self.set_slope = around()
        self.alpha, self.mode, self.name = 1.0, Mode.PLAIN, "net"
        self.options, self.slotted, self.config = Options(), Slotted(), {"a": {"b": [1.0]}}
        self.space, self.chosen, self.weights = types.SimpleNamespace(c=1.0), {1, 2}, np.ones(3)
        self.mask = torch.ones(3)
        self.register_buffer("shift", torch.zeros(3))
        self.epoch = 0  # nobody reads it

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.alpha * self.gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(self.layer(x)) * self.mask + self.shift
        x = x * self.options.scale * self.options.sizes[0] * self.slotted.scale * self.config["a"]["b"][0]
        x = x * self.space.c * len(self.chosen) * float(self.weights.sum())
        x = x * 2 if self.mode is Mode.TWICE else x
        if hasattr(self, "extra"):
            x = x + self.extra
        return self.sloped(shifted(self.drop(x)))


def recorded(model: nn.Module, x: torch.Tensor) -> tuple[nn.Module, Snapshot]:
    graph = outcore.capture(model, (x,))
    assert graph.executable is not None and not graph.notes
    module, recording = graph.executable
    assert recording.reads is not None
    return module, recording.reads


@pytest.fixture
def global_names() -> Iterator[None]:
    """Global names and classes as they were."""
    factor, bias = FACTOR, list(TABLE["bias"])
    yield
    globals()["FACTOR"], TABLE["bias"] = factor, bias
    Net.gain = 1.0
    shifted.__kwdefaults__ = {"by": 0.25}


def set_global(_: Net) -> None:
    globals()["FACTOR"] = 2.5


def set_class(_: Net) -> None:
    Net.gain = 3.0


def set_default(_: Net) -> None:
    shifted.__kwdefaults__ = {"by": 0.75}


def attribute(path: str, value: Any) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        *way, name = path.split(".")
        owner: Any = net
        for part in way:
            owner = getattr(owner, part)
        setattr(owner, name, value)

    return change


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "a number": (attribute("alpha", 2.0), "self.alpha of Net"),
    "a number of another type": (attribute("alpha", 1), "self.alpha of Net"),
    "an enum": (attribute("mode", Mode.TWICE), "self.mode of Net"),
    "a name that was missing": (attribute("extra", 1.0), "self.extra of Net"),
    "a dataclass": (attribute("options.scale", 2.0), "self.options of Net"),
    "a list inside": (lambda net: net.options.sizes.__setitem__(0, 3), "self.options of Net"),
    "slots": (attribute("slotted.scale", 2.0), "self.slotted of Net"),
    "a dictionary": (lambda net: net.config["a"]["b"].__setitem__(0, 2.0), "self.config of Net"),
    "a namespace": (attribute("space.c", 2.0), "self.space of Net"),
    "a set": (lambda net: net.chosen.add(3), "self.chosen of Net"),
    "an array": (lambda net: net.weights.__setitem__(0, 2.0), "self.weights of Net"),
    "a function": (attribute("sloped", torch.tanh), "self.sloped of Net"),
    "a plain tensor": (attribute("mask", torch.zeros(3)), "self.mask of Net"),
    "a layer's number": (attribute("drop.p", 0.5), "self.p of Dropout (drop)"),
    "a class attribute": (set_class, f"Net.gain of {__name__}"),
    "a global name": (set_global, f"FACTOR of {__name__}"),
    "inside a global name": (lambda _: TABLE["bias"].__setitem__(0, 1.0), f"TABLE of {__name__}"),
    "a default": (set_default, f"a default of shifted of {__name__}"),
    "a variable around": (lambda net: net.set_slope(3.0), f"slope around around.<locals>.sloped of {__name__}"),
    "a hook": (lambda net: net.layer.register_forward_hook(lambda m, i, o: o * 2), "self.hooks of Linear (layer)"),
    "a buffer of another shape": (attribute("shift", torch.zeros(1)), "self.shift of Net"),
}


@pytest.mark.parametrize("which", CHANGES)
def test_what_was_read_is_noticed_when_it_changes(which: str, global_names: None) -> None:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3)
    module, reads = recorded(net, x)
    assert reads.holds()
    assert torch.equal(module(x), net(x))
    change, told = CHANGES[which]
    change(net)
    assert not reads.holds()
    assert told in list(reads.changed())
    assert torch.equal(module(x), net(x))
    assert torch.equal(module(x), net(x))


def test_what_nobody_reads_and_equal_values_are_no_change(global_names: None) -> None:
    net, x = Net(), torch.randn(2, 3)
    _, reads = recorded(net, x)
    net.epoch += 1
    net.unknown = "new"
    net.alpha, net.config = float("1.0"), {"a": {"b": [float("1.0")]}}
    net.mask.add_(1.0)  # a replay reads its numbers where they are
    net.layer.weight.data.mul_(2.0)
    assert reads.holds()
    net.shift = torch.ones(3)  # found by its name in a replay
    assert reads.holds() and reads.renewed == 1


def test_values_are_told_apart_by_type_sign_and_content() -> None:
    different = [1, 1.0, True, 0.0, -0.0, "1", None, (1,), [1], {1}, {1: 1}, Mode.PLAIN, torch.float32, Options(2.0)]
    copies = [frozen(value) for value in different]
    assert all(a != b for i, a in enumerate(copies) for b in copies[:i])
    assert frozen(float("nan")) == frozen(float("nan")) and frozen(Options()) == frozen(Options())
    tensor = torch.ones(2)
    assert frozen(tensor) == frozen(tensor) and frozen(tensor) != frozen(tensor.clone())


def test_what_forward_writes_is_written_by_a_replay() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.features, self.found = nn.Linear(3, 3), [], {}
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.relu(self.layer(x))
            self.aux_loss, self.parts = y.square().mean(), [y, {"size": y.shape[0]}]
            self.features.append(y)
            self.found["y"] = y
            self.mean = y.detach().mean(0)
            return y.sum()

    net = Writes()
    module, _ = recorded(net, torch.randn(2, 3))
    assert not hasattr(net, "aux_loss") and not net.features and not net.mean.any()
    for _ in range(4):
        x = torch.randn(2, 3)
        net.features.clear(), net.found.clear()
        module(x)
        mine = (net.aux_loss, net.parts[0], net.features[0], net.found["y"], net.mean)
        net.features.clear(), net.found.clear()
        net(x)
        theirs = (net.aux_loss, net.parts[0], net.features[0], net.found["y"], net.mean)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert net.parts[1] == {"size": 2} and mine[0].requires_grad
    (key,) = module.recordings
    assert len(module.recordings[key]) <= 2


def test_what_is_set_once_is_recorded_once_more() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.table = nn.Linear(3, 3), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(3.0)
            return self.layer(x) * self.table

    net, plain = Cached(), Cached()
    plain.load_state_dict(net.state_dict())
    module, _ = recorded(net, torch.randn(2, 3))
    for _ in range(6):
        x = torch.randn(2, 3)
        assert torch.equal(module(x), plain(x))
    assert isinstance(net.table, torch.Tensor)


class Counting(nn.Module):
    """Counts its calls, or changes what a template cannot say."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.step, self.what = nn.Linear(3, 3), 0, what
        self.space, self.draws = types.SimpleNamespace(n=[]), np.random.default_rng(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "counter":
            self.step += 1
        elif self.what == "inside":
            self.space.n.append(1)
        else:
            x = x * self.draws.random()
        return self.layer(x) * (1 + self.step)


def test_a_counter_is_refused_by_its_name() -> None:
    net, plain, x = Counting("counter"), Counting("counter"), torch.randn(2, 3)
    plain.load_state_dict(net.state_dict())
    module, _ = recorded(net, x)
    for _ in range(2):
        assert torch.equal(module(x), plain(x))
    with pytest.raises(VaryingError, match=r"self\.step of Counting changes in every call"):
        module(x)


@pytest.mark.parametrize(("what", "told"), [("inside", "self.space"), ("generator", "self.draws")])
def test_what_cannot_be_done_again_is_refused(what: str, told: str) -> None:
    net, x = Counting(what), torch.randn(2, 3)
    module, _ = recorded(net, x)
    with pytest.raises(VaryingError, match=f"forward changes {told} of Counting"):
        module(x)


def test_values_that_come_back_find_their_recording() -> None:
    net, x = Net().eval(), torch.randn(2, 3)
    module, _ = recorded(net, x)
    for value in (1.0, 2.0, 1.0, 2.0, 3.0, 3.0, 1.0):
        net.alpha = value
        assert torch.equal(module(x), net(x))
    (key,) = module.recordings
    assert len(module.recordings[key]) == 3


def test_the_number_of_comparisons_grows_with_the_modules_alone() -> None:
    def objects(blocks: int) -> int:
        layers = [nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Dropout(0.1)) for _ in range(blocks)]
        _, reads = recorded(nn.Sequential(*layers), torch.randn(2, 3))
        return len(reads)

    ten, twenty, fifty = objects(10), objects(20), objects(50)
    assert twenty - ten == (fifty - twenty) / 3
    assert fifty < 200 * 20  # 200 modules, at most twenty comparisons each


def test_of_a_very_large_table_the_number_of_entries_is_compared_and_nothing_else() -> None:
    class Looked(nn.Module):
        def __init__(self, entries: int) -> None:
            super().__init__()
            self.layer, self.table = nn.Linear(3, 3), list(range(entries))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.table[3]

    small, large = (Looked(n) for n in (100, 30_000))
    for net, entries_too in ((small, True), (large, False)):
        _, reads = recorded(net, torch.randn(2, 3))
        assert (len(reads) > 100) == entries_too and reads.holds()
        net.table[7] = -1
        assert reads.holds() != entries_too
        net.table[7] = 7
        assert reads.holds()
        net.table.append(0)
        assert not reads.holds()


def test_hooks_and_layers_that_change_themselves_are_repeated_as_they_are() -> None:
    counted: list[int] = []

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        counted.append(1)
        module.calls = len(counted)
        return output * len(counted)

    net, plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    plain.load_state_dict(net.state_dict())
    module, _ = recorded(net, torch.randn(2, 3))
    net[0].register_forward_hook(hook)
    module(torch.randn(2, 3))  # recorded again, for which the hook is called once more
    for n in range(1, 6):
        x = torch.randn(2, 3)
        counted[:] = [1] * (n - 1)
        assert torch.equal(module(x), F.relu(plain[0](x) * n))
