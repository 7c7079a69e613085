"""What a forward writes where no call on a tensor is seen is in no recording: it is refused, never left out."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.errors import CaptureError
from outcore.graph.record.recorder import planning


class Net(nn.Module):
    """Two layers and a buffer, and something done between them."""

    def __init__(self, between: Callable[["Net", Tensor], None]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.between(self, h)
        return self.b(torch.tanh(h))


def _overload(x: Tensor) -> None:
    torch.ops.aten.mul_.Tensor(x, torch.tensor(2.0))


def _thread(x: Tensor) -> None:
    thread = threading.Thread(target=x.mul_, args=(2.0,))
    thread.start()
    thread.join()


UNSEEN = {
    "value": lambda _, h: _overload(h),
    "value in a thread": lambda _, h: _thread(h),
    "view": lambda _, h: _overload(h[:, :2]),
    "buffer": lambda net, _: _overload(net.count),
    "constant": lambda _, h: h.mul_(_doubled(torch.ones(4))) and None,
}


def _doubled(x: Tensor) -> Tensor:
    _overload(x)
    return x


@pytest.mark.parametrize("how", UNSEEN)
def test_an_unseen_write_is_refused(how: str) -> None:
    with pytest.raises(CaptureError, match="was written where recording cannot see it"):
        outcore.capture(Net(UNSEEN[how]), (torch.randn(2, 4),))


def test_for_a_plan_alone_it_is_recorded_and_never_run() -> None:
    with planning():
        graph = outcore.capture(Net(UNSEEN["value"]), (torch.randn(2, 4),))
    assert graph.recording.volatile


def _seen(net: Net, h: Tensor) -> None:
    with torch.no_grad():
        h[:, :2].mul_(2.0)
        net.count[1:].add_(h[0, 1:].detach())
        net.count.data.mul_(0.5)
        torch.add(h.detach(), 1, out=h.detach())


def _in_double(_: Net, h: Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        h.data.mul_((torch.arange(4) / 7).sqrt())
    finally:
        torch.set_default_dtype(torch.float32)


def _without_mkldnn(net: Net, h: Tensor) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        h.data.add_(net.b(h.detach()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("between", [_seen, _in_double, _without_mkldnn])
def test_writes_that_are_seen_and_settings_are_recorded(between: Callable[[Net, Tensor], None]) -> None:
    torch.manual_seed(0)
    net, x = Net(between), torch.randn(2, 4)
    before = net.count.clone()
    graph = outcore.capture(net, (x,))
    assert torch.equal(net.count, before)
    expected, count = net(x), net.count.clone()
    net.count.copy_(before)
    assert torch.equal(graph.recording.run(net, (x,)), expected)
    assert torch.equal(net.count, count)
