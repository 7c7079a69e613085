from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import outcore
from outcore.cost.measured.saved_bytes import account


def really_saved(model: nn.Module, args: tuple[Any, ...]) -> int:
    """Bytes of the distinct storages autograd keeps in a real run, without inputs, parameters and buffers."""
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        storages[kept.untyped_storage()._cdata] = kept.untyped_storage()
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = model(*args)
    given = [*model.parameters(), *model.buffers(), *(a for a in args if isinstance(a, Tensor))]
    for tensor in given:
        storages.pop(tensor.untyped_storage()._cdata, None)
    del result
    return sum(s.nbytes() for s in storages.values())


class Branches(nn.Module):
    """Views, in-place operations, a shared layer, several outputs, a write by index."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.lstm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.LSTM(6, 4, batch_first=True)
        self.shared = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.norm(self.conv(x)))
        a, b = x.chunk(2, dim=1)
        y = torch.cat([a * b, F.silu(a)], dim=1)
        y = y.flatten(2).transpose(1, 2)
        y[:, 0] = 0.0
        z, (h, _) = self.lstm(y)
        z = self.shared(torch.tanh(self.shared(z)))
        return (z.softmax(-1) * z).sum() + h.pow(2).mean()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inside, x, use_reentrant=False))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model[0].requires_grad_(False)
    return model


IMAGE = (2, 3, 10, 10)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "branches": (Branches, IMAGE),
    "checkpointed": (Checkpointed, (4, 8)),
    "attention": (Attention, (2, 6, 16)),
    "frozen first layer": (frozen, IMAGE),
    "dropout": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.3), nn.Flatten(), nn.Linear(256, 3)), IMAGE),
    "pool": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2)), IMAGE),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_saved_bytes_are_exactly_what_a_real_run_keeps(name: str, autocast: bool) -> None:
    torch.manual_seed(0)
    build, shape = CASES[name]
    model, x = build(), torch.randn(shape)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        graph = outcore.capture(model, (x,))
        costs = account(graph)
        truth = really_saved(model, (x,))
    inputs = set(graph.inputs)
    kept = {s.of: s.bytes for c in costs.calls.values() for s in c.saved if s.kind in ("value", "derived")}
    predicted = sum(size for of, size in kept.items() if of not in inputs)
    # Fake batch norm says bfloat16 for statistics that are float32.
    assert predicted == (pytest.approx(truth, rel=0.01) if autocast else truth)


def test_a_saved_tensor_is_named_by_the_first_value_in_its_memory() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
    costs = account(outcore.capture(model, [IMAGE]))
    assert [s.of for s in costs["1#0"].saved] == ["0#0:out"]
    assert [s.of for s in costs["2#0"].saved] == ["0#0:out", "2.weight"]


def test_casts_indices_and_masks_are_derived_and_say_what_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Dropout(0.5))
    with torch.autocast("cpu", torch.bfloat16):
        costs = account(outcore.capture(model, [IMAGE]))
    what = {s.what for c in costs.calls.values() for s in c.saved if s.kind == "derived"}
    assert any(w.startswith("bfloat16 4x3x3x3") and w.endswith("of 0.weight") for w in what)
    assert any(w.startswith("int64 2x4x4x4") for w in what)
    assert any("bernoulli" in w or "div" in w or "empty" in w for w in what)


def test_a_gradient_that_is_handed_on_takes_no_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return (y + y.tanh()).flatten(1)

    costs = account(outcore.capture(Sum(), [IMAGE]))
    assert {g.passes for g in costs["add()#0"].gradients} == {"add()#0:out"}
    assert [g.bytes for g in costs["flatten()#0"].gradients] == [0]
    assert [g.bytes for g in costs["tanh()#0"].gradients] == [4 * 2 * 3 * 10 * 10]


def test_a_huge_image_needs_neither_memory_nor_time() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2))
    costs = account(outcore.capture(model, [(1, 3, 100_000, 100_000)]))
    assert costs["1#0"].saved[0].bytes == 64 * 50_000 * 50_000 * 4
    assert costs["0#0"].flops_forward == 2 * 64 * 3 * 49 * 50_000**2


def test_calls_that_are_alike_have_the_same_costs_under_their_own_names() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(3)))
    costs = account(outcore.capture(model, [IMAGE]))
    assert [s.of for s in costs["2.0#0"].saved] == ["1.1#0:out", "2.0.weight"]
    assert costs["2.0#0"].flops_forward == costs["1.0#0"].flops_forward


def test_the_model_and_the_random_numbers_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    graph = outcore.capture(model, [IMAGE])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    random = torch.get_rng_state()
    account(graph)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_without_weights_in_memory_is_accounted_too() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    costs = account(outcore.capture(model, [IMAGE]), "cpu")
    assert costs["1#0"].saved[0].bytes == 2 * 4 * 8 * 8 * 4


def test_a_graph_read_from_a_file_is_refused() -> None:
    graph = outcore.capture(nn.Sequential(nn.ReLU()), [(2, 2)])
    with pytest.raises(outcore.OutcoreError, match="capture the model to run it"):
        account(outcore.Graph.from_json(graph.to_json()))
