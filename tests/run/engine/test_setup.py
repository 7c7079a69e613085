"""Before a run: which device a rank gets, what of the model it holds, and in which groups its optimizer has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.errors import EngineError
from outcore.run.engine.setup import check_separable, choose_device, make_optimizer, strip
from tests.memory.param_offload.own_optimizers import OWN, SEPARABLE, Averaged, Noisy
from tests.run.networks import CASES
from tests.run.pool import Pool
from tests.run.training import make_plan
from tests.run.varying import PIPE


def test_without_a_gpu_the_host_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(EngineError, match='torch sees no GPU here; use "cpu"'):
        choose_device("cuda")
    with pytest.raises(EngineError, match="no device 'gpu'; use cpu, cuda or"):
        choose_device("gpu")


def test_each_rank_of_a_computer_gets_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device(None, rank).index for rank in range(3)] == [0, 1, 0]
    assert choose_device("cuda:1", 0).index == 1
    with pytest.raises(EngineError, match="device cuda:2 was asked for, but there are 2 GPUs"):
        choose_device("cuda:2")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.norm.register_buffer("nothing", None)


def test_what_a_rank_does_not_hold_has_no_content_and_what_is_tied_stays_tied() -> None:
    model = Tied()
    held = {"first.bias": model.first.bias, "norm.running_var": model.norm.running_var}
    strip(model, held.values())
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert {name for name, tensor in state.items() if not tensor.is_meta} == held.keys()
    assert all(state[name] is tensor for name, tensor in held.items())
    assert model.last.weight is model.first.weight and isinstance(model.last.weight, nn.Parameter)
    assert {name: t.shape for name, t in state.items()} == {name: t.shape for name, t in Tied().state_dict().items()}


def test_groups_are_those_of_the_whole_model_on_every_rank() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    every = list(model.named_parameters())
    held = {name: p for name, p in every if name.startswith("2.") or name == "0.bias"}
    made = make_optimizer(
        lambda rows: torch.optim.SGD(rows, lr=0.1),
        lambda name, p: {"weight_decay": 0.5} if p.ndim > 1 else {"lr": 0.2},
        every,
        held,
    )
    groups = [(g["lr"], g["weight_decay"], [id(p) for p in g["params"]]) for g in made.param_groups]
    weights, others = [id(held["2.weight"])], [id(held["0.bias"]), id(held["2.bias"])]
    assert groups == [(0.1, 0.5, weights), (0.2, 0, others)]
    empty = make_optimizer(lambda rows: torch.optim.SGD(rows, lr=0.1), lambda name, p: {"lr": float(p.ndim)}, every, {})
    assert [(g["lr"], g["params"]) for g in empty.param_groups] == [(2.0, []), (1.0, [])]


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_optimizers_that_look_at_several_parameters_are_not_divided(kind: Any) -> None:
    check_separable(kind, divided=False, copied=False)
    if kind in SEPARABLE:
        check_separable(kind, divided=True, copied=True)
    else:
        with pytest.raises(EngineError, match=f"{kind.__name__}.*cannot be divided among stages or ranks"):
            check_separable(kind, divided=True, copied=False)
    if kind is not Noisy:
        check_separable(kind, divided=False, copied=True)
    else:
        with pytest.raises(EngineError, match="draws random numbers"):
            check_separable(kind, divided=False, copied=True)


def _refused(kind: Any, plan: dict[str, Any]) -> str:
    job, made = CASES["unet"].job, make_plan("unet", **plan)
    try:
        outcore.Engine(job, made, optimizer=lambda rows: kind(rows)).close()
    except EngineError as error:
        return str(error)
    return ""


def test_ranks_refuse_what_would_train_something_else(ranks: Pool) -> None:
    said = ranks.run(_refused, 2, Averaged, PIPE)
    assert all("Averaged does not update each parameter by itself" in text for text in said)
    copies = {"stages": 1, "replicas": 2}
    assert ranks.run(_refused, 2, Averaged, copies) == ["", ""]
    assert all("draws random numbers" in text for text in ranks.run(_refused, 2, Noisy, copies))


def test_a_step_that_needs_a_closure_is_refused_before_the_first_one() -> None:
    job = CASES["unet"].job
    with pytest.raises(EngineError, match="a step of LBFGS has to be given a closure"):
        outcore.Engine(job, optimizer=torch.optim.LBFGS)
