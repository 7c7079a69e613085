"""What a forward does where no call on a tensor is seen: memory written by others, settings, views that are computed
when they are read. Values that are made again have to be those of the forward all the same."""

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import outcore
from outcore.errors import OutcoreError
from outcore.memory.offload.backends import DiskBackend

from .programs.run import Run, differences, rows

Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Three layers, and what is done with them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b, self.c, self.body = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _by_overload(x: Tensor) -> None:
    torch.ops.aten.mul_.Tensor(x, torch.tensor(2.0))


def _by_thread(x: Tensor) -> None:
    thread = threading.Thread(target=x.mul_, args=(2.0,))
    thread.start()
    thread.join()


def _by_numpy(x: Tensor) -> None:
    x.detach().numpy()[...] *= 2


def _by_array(x: Tensor) -> None:
    np.asarray(x.detach())[...] *= 2


def _by_dlpack(x: Tensor) -> None:
    np.from_dlpack(x.detach())  # shares its memory
    torch.from_dlpack(x.detach()).mul_(2.0)


WRITES = {
    "overload": _by_overload,
    "thread": _by_thread,
    "numpy": _by_numpy,
    "array": _by_array,
    "dlpack": _by_dlpack,
}


def _before_use(write: Callable[[Tensor], None]) -> Body:
    def body(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        write(h)
        return net.b(F.gelu(h) * torch.sigmoid(h))

    return body


def _of_a_mask(write: Callable[[Tensor], None]) -> Body:
    def body(net: Net, x: Tensor) -> Tensor:
        mask = torch.ones(6, 8)
        write(mask)
        return net.b(F.gelu(net.a(x).tanh() * mask)).sigmoid()

    return body


def _after_use(write: Callable[[Tensor], None]) -> Body:
    def body(net: Net, x: Tensor) -> Tensor:
        h = net.a(x)
        g = F.gelu(h + 1)
        y = net.b(g)
        write(h)
        return net.c(y.tanh())

    return body


def _noted(body: Body, mode: str | None, seed: int = 0) -> Run:
    torch.manual_seed(0)
    run = Run(mode, seed)
    model = run.manage(Net(body), (rows(0),))
    run.train(model, rows, steps=2)
    return run


@pytest.mark.parametrize("mode", ["recompute", "mixture"])
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("where", [_before_use, _of_a_mask])
def test_a_value_that_was_written_unseen_is_not_made_again(where: Any, how: str, mode: str) -> None:
    body = where(WRITES[how])
    assert differences(_noted(body, None), _noted(body, mode)) == []


@pytest.mark.parametrize("how", WRITES)
def test_what_was_made_from_a_value_before_it_is_written_unseen_is_right_or_refused(how: str) -> None:
    body = _after_use(WRITES[how])
    try:
        found = _noted(body, "recompute")
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert differences(_noted(body, None), found) == []


def _conjugate(net: Net, x: Tensor) -> Tensor:
    c = torch.complex(net.a(x), net.b(x)).conj()
    return net.c((c.resolve_conj() * c).abs().tanh() * c.imag)


def _negative(net: Net, x: Tensor) -> Tensor:
    h = torch.complex(net.a(x), net.b(x)).conj().imag
    return net.c(F.gelu(h) * torch.sigmoid(h))


def _without_mkldnn(net: Net, x: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        h = F.gelu(net.a(x))
    return net.b(h).tanh()


def _in_double(net: Net, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        weight = (torch.arange(48).view(6, 8) / 7).sqrt().float()
    finally:
        torch.set_default_dtype(torch.float32)
    return net.b(F.gelu(net.a(x) * weight)).tanh()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["recompute", "mixture", "offload"])
@pytest.mark.parametrize("body", [_conjugate, _negative, _without_mkldnn, _in_double])
def test_lazy_views_and_settings_are_those_of_the_forward(body: Body, mode: str) -> None:
    assert differences(_noted(body, None), _noted(body, mode)) == []


def test_a_directional_derivative_is_that_of_plain_pytorch() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        return net.b(F.gelu(net.a(x)))

    def found(mode: str | None) -> Run:
        torch.manual_seed(0)
        run = Run(mode)
        model = run.manage(Net(body), (rows(0),))
        with forward_ad.dual_level():
            out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(rows(0), rows(5))))
            (out.square().mean() + tangent.square().mean()).backward()
        run.note(out, tangent)
        run.note_model(model)
        return run

    assert differences(found(None), found("recompute")) == []


def _in_a_fork(function: Callable[[], bool]) -> None:
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_forked_processes_offload_each_for_itself() -> None:
    tier = DiskBackend(4096)
    before = torch.arange(256, dtype=torch.uint8)
    held = tier.evict(before)
    held.wait_out()

    def child() -> bool:
        theirs = torch.full((256,), 7, dtype=torch.uint8)
        buffer = tier.evict(theirs)
        with pytest.raises(OutcoreError, match="forked between"):
            held.bytes_back()
        return torch.equal(buffer.bytes_back(), theirs)

    _in_a_fork(child)
    assert torch.equal(held.bytes_back(), before)


def test_a_model_whose_values_leave_trains_in_a_forked_process() -> None:
    torch.manual_seed(0)
    run = Run("offload")
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    model = run.manage(plain, (rows(0, 512),))

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(model(rows(1, 512)).square().mean(), list(model.parameters())))

    expected = gradients()
    _in_a_fork(lambda: all(map(torch.equal, gradients(), expected)))
    assert all(map(torch.equal, gradients(), expected))
    outcore.release(model)
