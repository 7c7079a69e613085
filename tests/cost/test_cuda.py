"""On a GPU: what is accounted is what the device keeps and what its allocator hands out."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from outcore.cost.measured.measure import measure
from outcore.cost.measured.saved_bytes import account
from outcore.cost.predicted.saved_bytes import kept
from outcore.cost.predicted.step_memory import memory_curve
from tests.cost.measured.test_saved_bytes import CASES, really_saved

from .networks import NETWORKS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(64, 3 * 64), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.contiguous() for t in self.project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)


TABLE_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3)), (8, 128, 64), "Dropout"),
    "attention": (lambda: Attention(0.0), (8, 128, 64), "scaled_dot_product_attention"),
    "attention with dropout": (lambda: Attention(0.1), (8, 128, 64), "scaled_dot_product_attention"),
    "layer norm": (lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), (8, 128, 64), "LayerNorm"),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (2, 3, 64, 64), "BatchNorm2d"),
    "max pool": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)), (2, 3, 64, 64), "MaxPool2d"),
}


@pytest.mark.parametrize("name", TABLE_CASES)
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_the_table_is_what_a_gpu_keeps(name: str, bf16: bool) -> None:
    build, shape, type_ = TABLE_CASES[name]
    model = build().cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        graph = outcore.capture(model, (torch.randn(shape, device="cuda"),))
    costs = account(graph)
    call = next(c for c in costs.calls.values() if c.type == type_)
    told = kept(graph, call.call, "cuda") or ()
    real = [s for s in call.saved if s.kind in ("value", "derived")]
    assert sum(s.bytes for s in told) == pytest.approx(sum(s.bytes for s in real), rel=0.02)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_saved_bytes_are_what_a_real_run_keeps(name: str, bf16: bool) -> None:
    torch.manual_seed(0)
    build, shape = CASES[name]
    model, x = build().cuda(), torch.randn(shape, device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        graph = outcore.capture(model, (x,))
        truth = really_saved(model, (x,))
    costs = account(graph)
    found = {s.of: s.bytes for c in costs.calls.values() for s in c.saved if s.kind in ("value", "derived")}
    assert sum(b for of, b in found.items() if of not in graph.inputs) == pytest.approx(truth, rel=0.02, abs=4096)


@pytest.mark.parametrize("name", ["ResNet-18", "ResNet-50", "U-Net", "MobileNet-v3", "Swin-T", "BERT"])
def test_the_predicted_peak_is_the_allocator_s(name: str) -> None:
    model, args = NETWORKS[name]()
    gc.collect()  # else what the network before held may go in the middle of this one
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    model.cuda()
    batch: tuple[Any, ...] = tuple(a.cuda() for a in args)
    graph = outcore.capture(model, batch)
    predicted = memory_curve(graph, measure(graph, time_limit_s=10), optimizer=torch.optim.Adam).peak_bytes
    torch._C._cuda_clearCublasWorkspaces()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    counted = torch.cuda.max_memory_allocated() - base
    print(f"\n{name}: predicted {predicted:,}, counted {counted:,}, error {predicted / counted - 1:+.2%}")
    assert predicted == pytest.approx(counted, rel=0.05)
