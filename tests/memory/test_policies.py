"""Every policy, and mixtures of all, give the gradients of plain training bit for bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import outcore
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.rough import by_bytes
from outcore.errors import PlanError
from outcore.memory.offload.backends import DiskBackend
from outcore.memory.replay.compile_policies import prepare
from outcore.memory.replay.replay_forward import ReplayPass
from outcore.planner.memory.copy_schedule import OffloadTarget
from outcore.planner.memory.evaluate import StepModel
from outcore.planner.memory.script import emit
from outcore.program.policies import OFFLOAD, Encode, parse_policies

from ..foreign.zoo import QUICK, by_name
from .oracle import LINK, compare, policies

MODES = ("keep", "recompute", "offload", "encode", "mixture")


class Everything(nn.Module):
    """In-place operations, shared weights, dropout, statistics, views, pools, a frozen layer, a long skip."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.norm2, self.drop = nn.BatchNorm2d(8), nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm1(self.conv1(x)), inplace=True)
        skip = x
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = F.relu(self.shared(x))
        x = self.norm2(self.shared(x))
        x += F.avg_pool2d(skip, 2)
        x = F.silu(self.frozen(x))
        x = torch.cat([x, x.flip(1)], 1)[:, ::2]
        x = self.drop(x.mean((2, 3)))
        return F.dropout(self.head(x), 0.2, self.training)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("training", [True, False])
def test_everything_at_once(mode: str, training: bool) -> None:
    torch.manual_seed(0)
    result = compare(Everything().train(training), (torch.randn(2, 3, 16, 16),), mode=mode)
    assert result is not None and result.equal, result.differing


@pytest.mark.parametrize("mode", ["recompute", "offload", "encode"])
def test_channels_last(mode: str) -> None:
    torch.manual_seed(0)
    model = Everything().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    result = compare(model, (images,), mode=mode)
    assert result is not None and result.equal, result.differing


@pytest.mark.parametrize("mode", MODES)
def test_under_autocast(mode: str) -> None:
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = compare(Everything(), (torch.randn(2, 3, 16, 16),), mode=mode)
    assert result is not None and result.equal, result.differing


@pytest.mark.parametrize("seed", range(6))
def test_mixtures(seed: int) -> None:
    torch.manual_seed(0)
    result = compare(Everything(), (torch.randn(2, 3, 16, 16),), mode="mixture", seed=seed)
    assert result is not None and result.equal, result.differing


QUICKEST = (
    "torchvision/resnet18",
    "torchvision/shufflenet_v2_x0_5",
    "torchvision/mobilenet_v2",
    "monai/UNet2d",
    "monai/AttentionUnet2d",
    "hf/bert",
    "hf/gpt2",
    "timm/convnext_atto",
)


@pytest.mark.foreign
@pytest.mark.parametrize("name", QUICKEST)
def test_foreign_models_under_mixtures(name: str) -> None:
    foreign = by_name(name)
    torch.manual_seed(0)
    result = compare(foreign.build().train(), *foreign.inputs(2), mode="mixture")
    assert result is not None and result.equal, result.differing


def test_there_are_quick_models() -> None:
    assert {by_name(name).name for name in QUICKEST} <= {foreign.name for foreign in QUICK}


@pytest.mark.parametrize(("mode", "share"), [("offload", 0.6), ("encode", 1.01)])
def test_what_leaves_takes_no_memory(mode: str, share: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)
    result = compare(model, (torch.randn(2, 3, 64, 64),), mode=mode)
    assert result is not None and result.equal
    assert result.bytes < share * result.plain_bytes


@pytest.mark.parametrize("mode", ["keep", "recompute", "offload"])
def test_predicted_peak(mode: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Tanh()) for _ in range(5)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
    result = compare(model, (torch.randn(2, 4, 96, 96),), mode=mode)
    assert result is not None and result.equal
    assert abs(result.bytes / result.predicted_bytes - 1) < 0.05, result


@pytest.mark.parametrize("rate", [1e11, 1e8])
@pytest.mark.parametrize("seed", [3, 4])
def test_predicted_peak_of_mixtures_however_slow_the_link_is(seed: int, rate: float) -> None:
    torch.manual_seed(0)

    def block(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(True))

    layers = [block(3), block(32), nn.MaxPool2d(3, 2, 1), block(32), nn.Dropout(0.2), *(block(32) for _ in range(8))]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    link = OffloadTarget(rate, rate, least_bytes=2**14)
    result = compare(model, (torch.randn(2, 3, 48, 48),), seed=seed, link=link)
    assert result is not None and result.equal
    assert abs(result.bytes / result.predicted_bytes - 1) < 0.02, result


class Noisy(nn.Module):
    """Between its layers it makes tensors that backward does not go through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh()) for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            noise = torch.empty(x.shape[0], 1, 1, 1)
            for _ in range(3):
                noise = noise.bernoulli_(0.8).div_(0.8)
            x = layer(x) * noise
        return x


@pytest.mark.parametrize("rate", [5e7, 7e7, 1e8, 2e8])
def test_copies_start_and_end_only_where_backward_comes_by(rate: float) -> None:
    torch.manual_seed(0)
    model, x, link = Noisy(), torch.randn(2, 8, 64, 64), OffloadTarget(rate, rate, least_bytes=2**14)
    graph = outcore.capture(model, (x,))
    keeping = StepModel(graph, by_bytes(account(graph), 1e9), 0.0, link)
    transfers = keeping.evaluate(policies(keeping, "offload")).transfers
    assert transfers is not None and any(t.wait[0] == "backward" for t in transfers.moved)
    for t in transfers.moved:
        assert t.fetch in keeping.differentiated and (t.wait[0] == "forward" or t.wait[1] in keeping.differentiated)
        assert keeping.forward_at[t.evict] < t.gone_at <= t.back_at
    result = compare(model, (x,), mode="offload", link=link)
    assert result is not None and result.equal and result.bytes <= result.predicted_bytes, result


def test_what_was_encoded_is_not_held_in_both_forms() -> None:
    """The peak is in the pool's backward, which needs indices of eight bytes that wait as one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.MaxPool2d(2, 1), nn.Conv2d(16, 1, 1))
    result = compare(model, (torch.randn(1, 3, 512, 512),), mode="encode")
    assert result is not None and result.equal
    assert abs(result.bytes / result.predicted_bytes - 1) < 0.02, result


def test_what_is_made_beside_a_value_is_made_again_with_it() -> None:
    """A pool that runs again finds its indices again, which nobody needs then."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2, 1), nn.Conv2d(16, 4, 1)]
    graph = outcore.capture(nn.Sequential(*layers), [(1, 3, 32, 32)])
    buffers = StepModel(graph, account(graph), 0.0, LINK).buffers
    assert buffers["1#0:out"].workspace_bytes >= buffers["1#0~1"].bytes == 8 * 16 * 31 * 31


class Overwrites(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y * 3  # reads y before it is overwritten
        y.add_(1)
        return torch.tanh(z) * torch.tanh(y + z)


def test_what_is_read_before_it_is_overwritten_is_not_made_again() -> None:
    result = compare(Overwrites(), (torch.randn(4, requires_grad=True),), mode="recompute")
    assert result is not None and result.equal
    graph = outcore.capture(Overwrites(), (torch.randn(4, requires_grad=True),))
    buffers = StepModel(graph, account(graph), 0.0, LINK).buffers
    assert "overwrites" in buffers["mul()#1:out"].obstacle


def test_wrong_policies_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    graph = outcore.capture(model, [(1, 3, 8, 8)])
    assert graph.executable is not None
    keeping = StepModel(graph, account(graph), 0.0, LINK)

    def attempt(policy: dict[str, str]) -> None:
        emit(keeping, parse_policies(policy))

    with pytest.raises(PlanError, match="needs all of it"):
        attempt({"1#0:out": "encode:sign"})
    with pytest.raises(PlanError, match="no memory of"):
        attempt({"nowhere": "recompute"})
    with pytest.raises(PlanError, match="encodings are"):
        attempt({"1#0:out": "encode:zip"})


class LooksAtItsInput(nn.Module):
    """What is made again reads the input under other names: cast to what it is already, cut, turned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        b = torch.tanh(self.second(x[..., 1:, 1:].transpose(2, 3)))
        return a[..., 1:, 1:] * b


def test_what_is_made_from_a_view_of_an_input() -> None:
    result = compare(LooksAtItsInput(), (torch.randn(2, 3, 8, 8),), mode="recompute")
    assert result is not None and result.equal, result.differing


def test_what_is_not_on_the_device_does_not_leave_it() -> None:
    """It would come back on the device, where its operation does not expect it."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    graph = outcore.capture(model, (x,))
    assert graph.executable is not None
    keeping = StepModel(graph, by_bytes(account(graph), 1e9), 0.0, LINK)
    script = emit(keeping, {"1#0:out": OFFLOAD})
    compiled = prepare(graph, graph.executable[1], model, keeping.buffers, script)
    tier = DiskBackend(compiled.offloaded_bytes)
    free, tier.device = tier.arena.free_bytes, torch.device("cuda")
    loss = ReplayPass(compiled, model, [x], tier).forward().sum()
    assert tier.arena.free_bytes == free
    loss.backward()
    assert model[0].weight.grad is not None
    tier.close()


class Folds(nn.Module):
    """Products of something that is not contiguous with a matrix that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(23, 64))
        self.linear = nn.Linear(23, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh().transpose(1, 2) @ self.matrix.transpose(0, 1)
        return self.linear(y.transpose(0, 1)).exp().tanh()


class Ran(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_products_are_made_again_as_they_were_made() -> None:
    """Torch folds a batch of products into one if the matrix requires a gradient, and may sum in another order then."""
    torch.manual_seed(0)
    with Ran() as ran:
        result = compare(Folds(), (torch.randn(64, 4, 4, 64),), mode="recompute")
    assert result is not None and result.equal, result.differing
    assert "aten.mm.default" in ran.names and "aten.bmm.default" not in ran.names


@pytest.mark.parametrize("way", ["module", "function", "volume"])
def test_pools_over_windows_wider_than_a_byte_can_tell(way: str) -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(1, 4, 3, padding=1) if way == "volume" else nn.Conv2d(3, 4, 3, padding=1)
            self.pool = nn.MaxPool3d((1, 16, 18)) if way == "volume" else nn.MaxPool2d(17)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x).tanh()
            return F.max_pool2d(x, [16], stride=4) if way == "function" else self.pool(x)

    torch.manual_seed(0)
    model = Pools()
    images = torch.randn(2, 1, 3, 36, 36) if way == "volume" else torch.randn(2, 3, 36, 36)
    result = compare(model, (images,), mode="encode")
    assert result is not None and result.equal, result
    graph = outcore.capture(model, (images,))
    keeping = StepModel(graph, by_bytes(account(graph), 1e9), 0.0, LINK)
    (indices,) = [name for name, b in keeping.buffers.items() if b.dtype == "int64"]
    assert Encode("window") not in keeping.choices(keeping.buffers[indices])
    assert graph.executable is not None
    with pytest.raises(PlanError, match="at most 255 pixels each"):
        emit(keeping, {indices: Encode("window")})


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4, affine=False), nn.InstanceNorm2d(4, track_running_stats=True)])
def test_norms_without_weights_are_made_again_in_the_precision_of_their_statistics(norm: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Tanh(), nn.Conv2d(4, 4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        result = compare(model, (torch.randn(2, 3, 9, 9),), mode="recompute")
    assert result is not None and result.equal, result


def test_what_is_made_again_lies_in_memory_as_it_did() -> None:
    """Without autograd, torch lays out the result of this pool otherwise."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.pool, self.outer = nn.Linear(5, 6), nn.MaxPool1d(2), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pooled = self.pool(self.inner(x).transpose(1, 2)).transpose(1, 2)
            return self.outer(pooled + pooled.mean(1, keepdim=True))

    torch.manual_seed(0)
    model, x = Reads(), torch.randn(2, 8, 5)
    want = torch.autograd.grad(model(x).square().sum(), tuple(model.parameters()))
    outcore.within(model, (x,), memory=None, plan={"pool#0:out": "recompute", "add()#0:out": "recompute"}, quiet=True)
    got = torch.autograd.grad(model(x).square().sum(), tuple(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_what_is_saved_without_any_numbers_is_not_sent_away() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval(), nn.Tanh())  # whose statistics are empty then
    images = torch.randn(2, 3, 8, 8)
    model(images).sum().backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    outcore.within(model, (images,), memory=None, plan={"1#0~4": "offload"}, quiet=True)
    model(images).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(want, model.parameters(), strict=True) if p.grad is not None)
    outcore.release(model)
