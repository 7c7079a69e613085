"""Compiled steps as CUDA graphs within a budget."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import outcore
from outcore.compiled.plan import CompiledPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32"),  # Inductor recommends it
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # of a piece without kernels
]


def network(device: torch.device) -> nn.Sequential:
    """Many small layers, which the interpreter cannot feed fast enough."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(16)]
    return nn.Sequential(*layers).to(device)


def test_a_step_as_graphs_trains_as_plain_within_its_budget() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch._dynamo.reset()
    plain = network(device)
    model: nn.Module = copy.deepcopy(plain)
    batches = [torch.randn(4096, 256, device=device) for _ in range(6)]
    optimizers = [torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9) for m in (model, plain)]
    outcore.within(
        model, (batches[0],), memory="90%", compile=True, graphs=True, optimizer=optimizers[0], exact="reassociated"
    )
    plan = outcore.memory_plan(model)
    assert isinstance(plan, CompiledPlan) and plan.graphs and plan.budget_bytes is not None
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, batch in enumerate(batches):
        results = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            result = each(batch)
            result.square().mean().backward()
            if number % 3 != 1:  # once, gradients of two batches are added up
                optimizer.step()
                optimizer.zero_grad()
            results.append(result.detach())
        kept.append((results[0], results[1]))
        with torch.no_grad():
            torch.testing.assert_close(model(batch[:64]), plain(batch[:64]), rtol=1e-2, atol=1e-3)
    for ours, theirs in kept:  # what the loop has kept is not overwritten
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_graphs_hold_under_a_hard_limit() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch._dynamo.reset()
    model = network(device)
    batch = torch.randn(32768, 256, device=device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def loss(output: torch.Tensor) -> torch.Tensor:  # its memory is counted where it is given
        return output.square().mean()

    outcore.within(model, (batch,), memory="60%", compile=True, graphs=True, loss=loss, optimizer=optimizer, quiet=True)
    plan = outcore.memory_plan(model)
    assert isinstance(plan, CompiledPlan) and plan.budget_bytes is not None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    beside = torch.cuda.memory_allocated() - sum(t.nbytes for t in (*model.parameters(), batch))
    for _ in range(5):
        loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    print("as graphs", plan.graphs, "reserved", torch.cuda.max_memory_reserved(), "budget", plan.budget_bytes)
    assert torch.cuda.max_memory_reserved() - beside <= plan.budget_bytes
