"""All foreign models under every policy: gradients, loss and buffers of plain training bit for bit.

A model is captured once and trained plainly twice; where these two differ already (a sum whose order the device does
not fix), there is nothing to compare with and the model is left out, which the skip says. Then it is trained under each
policy; in fp32 as it is, and in bf16 autocast with channels last.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.cost.rough import by_bytes
from outcore.cost.saved import account
from outcore.graph.structure import leaves, substitute
from outcore.memory import Pass, prepare
from outcore.memory.tiers import tier_for
from outcore.planner.keeping import Keeping

from ..foreign.zoo import ZOO, Foreign
from .oracle import LINK, policies, total

MODES = ("recompute", "offload", "encode", "mixture")
PRECISIONS = ("fp32", "bf16 channels_last")

Numbers = dict[str, torch.Tensor]


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("foreign", ZOO, ids=str)
def test_all_foreign_models(foreign: Foreign, precision: str) -> None:
    _every_policy(foreign, torch.device("cpu"), bf16=precision != "fp32")


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.foreign
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("foreign", ZOO, ids=str)
def test_all_foreign_models_on_a_gpu(foreign: Foreign, precision: str) -> None:
    with _deterministic():
        _every_policy(foreign, torch.device("cuda", 0), bf16=precision != "fp32")


def _every_policy(foreign: Foreign, device: torch.device, *, bf16: bool = False) -> None:
    torch.manual_seed(0)
    model = foreign.build().train().to(device)
    args, kwargs = substitute(foreign.inputs(2), torch.Tensor, lambda t: t.to(device))
    if bf16:
        model = _channels_last(model)
        args, kwargs = substitute((args, kwargs), torch.Tensor, _images_last)

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()

    state = copy.deepcopy(model.state_dict())
    try:
        want = _step(model, lambda: model(*args, **kwargs), precision)
    except RuntimeError as error:
        if not bf16:
            raise
        pytest.skip(f"plain training cannot do it in bf16 or with channels last: {error}")
    model.load_state_dict(state)
    if _differing(want, _step(model, lambda: model(*args, **kwargs), precision)):
        pytest.skip("plain training differs from run to run")
    model.load_state_dict(state)
    with precision():
        graph = outcore.capture(model, args, kwargs)
        assert graph.executable is not None
        recording = graph.executable[1]
        if recording.uses_data or recording.volatile:
            pytest.skip("it looks at data")
        keeping = Keeping(graph, by_bytes(account(graph), 1e9), 0.0, LINK)
    tensors = [t for _, t in leaves((args, kwargs), torch.Tensor)]
    found: dict[str, list[str]] = {}
    for mode in MODES:
        policy = policies(keeping, mode)
        outcome = keeping.evaluate(policy)
        holding = prepare(graph, recording, model, keeping.buffers, keeping.resolved(policy), outcome.transfers)
        tier = tier_for(device, holding.offloaded_bytes) if holding.offloaded_bytes else None
        model.load_state_dict(state)
        passed = Pass(holding, model, tensors, tier)
        if differing := _differing(want, _step(model, passed.forward, precision)):
            found[mode] = differing
        del passed
        if tier is not None:
            tier.close()
    assert not found, found


def _step(model: nn.Module, run: Callable[[], Any], precision: Callable[[], AbstractContextManager[Any]]) -> Numbers:
    """Loss, gradients and buffers of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    with precision():
        output = run()
    loss = total(output)
    loss.backward()
    gradients = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    buffers = {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    return {"loss": loss.detach(), **gradients, **buffers}


def _differing(want: Numbers, got: Numbers) -> list[str]:
    missing = sorted(want.keys() ^ got.keys())
    return missing + [n for n in want if n in got and not torch.equal(want[n], got[n])]


def _channels_last(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = _images_last(parameter.data)
    return model


def _images_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.to(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which operations have no fixed order is seen from the numbers
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.deterministic = before[1]
