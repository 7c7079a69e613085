"""Capture and replay on a CUDA device: same kernels, same bits."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import outcore
from outcore.models import ReLayNet, ResNet110V2, UNet
from tests.graph.replay import assert_same, run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "unet": (lambda: UNet(width=16, depth=3), (2, 3, 61, 67)),
    "resnet110v2": (lambda: ResNet110V2(depth=29), (2, 3, 32, 32)),
    "relaynet": (lambda: ReLayNet(width=16), (2, 1, 64, 64)),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
        (2, 16, 32),
    ),
    "lstm": (lambda: nn.LSTM(16, 16, 2, dropout=0.3), (5, 2, 16)),
}


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_replay_on_cuda(name: str, autocast: bool, layout: torch.memory_format) -> None:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, x = build().cuda(), torch.randn(shape, device="cuda")
    if len(shape) == 4:
        model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    with deterministic(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        mine, theirs = copy.deepcopy(model), copy.deepcopy(model)
        for mode in (True, False) if name != "lstm" else (True,):  # cuDNN has no backward for an LSTM in eval mode
            mine.train(mode), theirs.train(mode)
            graph = outcore.capture(mine, (x,))
            torch.cuda.manual_seed(1)
            expected = run(theirs, (x,), {}, theirs)
            torch.cuda.manual_seed(1)
            assert_same(expected, run(graph.module, (x,), {}, mine))


def test_capture_takes_no_device_memory() -> None:
    model = UNet(width=16, depth=3).cuda()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graph = outcore.capture(model, [(1, 3, 20_000, 20_000)])
    assert torch.cuda.max_memory_allocated() == before
    assert graph.values[graph.outputs[0]].shape == (1, 2, 20_000, 20_000)
