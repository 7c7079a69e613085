"""Under a limit of the process's memory at the budget, no compiled step has to look twice for room. A budget that is
too small is refused before training, and the one that is named instead does."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outcore
from outcore.compiled.plan import CompiledPlan
from outcore.errors import PlanError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:TensorFloat32"),  # Inductor recommends it
]


class Skips(nn.Module):
    """Down and up again with connections between, whose values are of many sizes and are held for long."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        sizes = [width * 2**k for k in range(depth)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(self.pair(a, 2 * a) for a in sizes)
        self.up = nn.ModuleList(self.pair(3 * a, a) for a in reversed(sizes))

    @staticmethod
    def pair(inputs: int, outputs: int) -> nn.Sequential:
        """Two convolutions with their norms."""
        layers: list[nn.Module] = []
        for a in (inputs, outputs):
            layers += [nn.Conv2d(a, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = []
        for block in self.down:
            kept.append(x)
            x = block(F.max_pool2d(x, 2))
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return x


@pytest.mark.parametrize("share", [1.0, 0.7])
def test_the_budget_of_a_compiled_step_is_a_wall(share: float) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = Skips().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(16, 3, 128, 128, device="cuda").contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    total = torch.cuda.get_device_properties(0).total_memory

    def loss(output: Tensor) -> Tensor:
        return output.float().square().mean()

    def managed(memory: int) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            outcore.within(model, (images,), memory=memory, loss=loss, optimizer=optimizer, compile=True, quiet=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            output: Tensor = model(images)
        loss(output).backward()
        optimizer.step()
        return output

    managed(total // 2)
    plan = outcore.memory_plan(model)
    assert isinstance(plan, CompiledPlan) and plan.measured_bytes is not None
    budget, most = int(share * plan.measured_bytes), plan.measured_bytes
    outcore.release(model)
    try:
        for _ in range(3):
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(budget / total)
            try:
                managed(budget)
                break
            except PlanError as refused:  # what it names has to do
                assert refused.least_bytes is not None and budget < refused.least_bytes < most
                budget = refused.least_bytes
                print(refused)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        held: list[Tensor] = []
        for number in range(16):
            held.append(step())
            if number % 3:
                held.clear()
            if number == 7:
                held.clear()
                torch.cuda.empty_cache()
            del held[:-1]
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.backends.cudnn.benchmark = False
    reserved = torch.cuda.max_memory_reserved()
    print("budget", budget, "of", most, "reserved", reserved, outcore.memory_plan(model))
    for name in ("num_alloc_retries", "num_ooms"):
        assert after[name] == before[name], name
    assert reserved <= budget
